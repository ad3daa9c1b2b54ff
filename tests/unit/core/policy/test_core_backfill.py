"""What of an old save_dir is sent: whatever may be its newest checkpoint (H20, adr/0102)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.model.records import ZERO
from ckptd.core.policy.actions import ReleaseHold, Upload
from ckptd.core.policy.drain import open_saves
from ckptd.core.policy.planner import plan
from ckptd.core.policy.safety import exposed, is_to_upload, newest_safe, steps_at_risk, unsent
from ckptd.core.policy.view import JobView, SaveView
from tests.support.core_views import NAS, committed_record, job_view, save_view, sealed


def found(*steps: int, rivals: tuple[int, ...] = (), **changes: Any) -> list[SaveView]:
    """Found at the first start, in the order in which they were sealed; `rivals`: those of the last one."""
    saves = [sealed(step) for step in steps]
    saves[-1] = saves[-1].model_copy(update={"rivals": rivals})
    return [
        replace(save_view(n, save, committed=False), was_found_first=True, is_adopted=False, **changes)
        for n, save in enumerate(saves, start=1)
    ]


def committed(save: SaveView) -> SaveView:
    return replace(save, uploads={(NAS, ZERO): committed_record(save.save)})


def sent(view: JobView) -> list[int]:
    return [s.save.step for s in view.saves if is_to_upload(view, s)]


@pytest.mark.parametrize(("latest", "rivals"), [("s300b1", ()), (None, (1, 2)), ("s300b1", (1, 2))])
def test_what_may_be_the_newest_is_sent_and_nothing_is_safe_before(
    latest: str | None, rivals: tuple[int, ...]
) -> None:
    """The run was rewound from 1000 to 300 before anybody watched it: `latest` tells, or times alone do."""
    saves = found(900, 1000, 300, rivals=rivals)
    view = job_view(saves, latest=latest)
    assert sent(view) == [1000, 300]
    assert [s.save.step for s in open_saves(view)] == [1000, 300]
    half = job_view([saves[0], committed(saves[1]), saves[2]], latest=latest)
    assert [a.save_id for a in plan(half).actions if isinstance(a, Upload)] == [3]
    lost = exposed(half, newest_safe(half))
    assert lost is not None
    assert (lost.save.step, steps_at_risk(half, lost)) == (300, 300)
    assert unsent(half) == ("s900b1",)
    done = job_view([saves[0], *map(committed, saves[1:])], latest=latest)
    assert exposed(done, newest_safe(done)) is None
    assert open_saves(done) == []
    assert unsent(done) == ("s900b1",)


def test_where_nothing_contradicts_the_newest_alone_is_sent() -> None:
    for latest in ("s1000b1", None, "gone"):
        view = job_view(found(300, 900, 1000), latest=latest)
        assert sent(view) == [1000]
        assert unsent(view) == ("s900b1", "s300b1")
    beside = job_view(found(900, 1000, 300, rivals=(1,)))
    assert sent(beside) == [1000], "it is surely older than 1000"
    assert sent(job_view(found(900, 1000, 300), latest="s300b1", existing="none")) == []


def test_the_next_save_ends_the_doubt_and_what_was_begun_is_ended() -> None:
    saves = found(900, 1000, 300, rivals=(1, 2))
    later = save_view(4, sealed(310, 2), committed=False)
    assert sent(job_view([*saves, later], latest="s310b2")) == [1000, 310]
    for begun in (replace(saves[2], is_busy=True), replace(saves[2], is_held=True, is_intact=False)):
        assert sent(job_view([*saves[:2], begun, later], latest="s310b2")) == [1000, 300, 310]
    torn = replace(saves[2], is_intact=False)
    assert sent(job_view([*saves[:2], torn], latest="s300b1")) == [1000], "nothing of it can be sent"


def test_a_part_that_was_held_in_doubt_is_let_go_after_it() -> None:
    """The other nodes never had that doubt and send nothing of it: it would wait for them for ever."""
    saves = found(900, 1000, 300, rivals=(1, 2))
    part = replace(saves[2], save=saves[2].save.model_copy(update={"is_part": True}), is_held=True)
    assert sent(job_view([*saves[:2], part])) == [1000, 300]
    view = job_view([*saves[:2], part, save_view(4, sealed(310, 2), committed=False)], latest="s310b2")
    assert sent(view) == [1000, 310]
    assert [a.save_id for a in plan(view).actions if isinstance(a, ReleaseHold)] == [3]
    gone = replace(part, is_intact=False)
    assert sent(job_view([*saves[:2], gone, *view.saves[3:]])) == [1000, 300, 310], (
        "the hold is the last copy"
    )


def test_what_the_trainer_goes_back_to_is_sent() -> None:
    """Somebody put `latest` on an old one that nobody had adopted: it is what the next save rests on."""
    saves = found(300, 900, 1000)
    view = job_view([*saves[:2], committed(saves[2])], latest="s300b1")
    assert sent(view) == [300, 1000]
    lost = exposed(view, newest_safe(view))
    assert lost is not None
    assert lost.save.step == 300
