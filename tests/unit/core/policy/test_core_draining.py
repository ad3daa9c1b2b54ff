"""The rules of a drain and of a pause over plain views: what is sent first, what will not make it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.cli.daemon.drain import not_begun, reasons
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.policy import actions as a
from ckptd.core.policy.derived_forms import PRESSURE
from ckptd.core.policy.drain import COMMIT_SECONDS
from ckptd.core.policy.planner import plan
from ckptd.core.policy.view import Disk, Drain, RemoteView
from tests.support import status_gallery as gallery
from tests.support.core_views import NAS, job_view, save_view, sealed

if TYPE_CHECKING:
    from ckptd.core.policy.view import JobView, SaveView

SIZE = 100
"""Bytes of a save of core_views."""
BF16 = "weights-bf16"


def drain(seconds: float, speed: float | None = 10.0, **left: int) -> Drain:
    """Seconds besides those of the COMMIT; the speed of the one remote; bytes left of save `s<id>`."""
    return Drain(
        seconds_left=seconds + COMMIT_SECONDS,
        speeds={} if speed is None else {NAS: speed},
        left_bytes={(int(name[1:]), NAS, ZERO): count for name, count in left.items()},
    )


def open_save(number: int, **changes: Any) -> SaveView:
    return save_view(number, sealed(number * 10), committed=False, **changes)


def shipping(view: JobView, save_id: int, form: str = ZERO) -> JobView:
    """The one remote ships that."""
    remote = replace(view.remotes[0], is_busy=True, uploading=form, uploading_save_id=save_id)
    return replace(view, remotes=(remote, *view.remotes[1:]))


def done(view: JobView) -> list[str]:
    """The plan in short words."""
    words = []
    for action in plan(view).actions:
        match action:
            case a.Upload(save_id=save_id, form=form, remote=remote):
                words.append(f"{remote}: {form} of {save_id}")
            case a.CancelUpload(remote=remote):
                words.append(f"{remote}: make way")
            case _:
                words.append(type(action).__name__)
    return words


def test_the_newest_goes_first_and_what_is_under_way_makes_way_for_it() -> None:
    view = job_view([open_save(1), open_save(2)], drain=drain(100))
    assert done(view) == ["nas: zero of 2"]
    assert done(shipping(view, 1)) == ["nas: make way"]
    assert done(shipping(view, 2)) == []
    assert done(shipping(view, 2, UNIVERSAL)) == ["nas: make way"]


def test_an_older_one_that_fits_comes_before_a_newer_one_that_does_not() -> None:
    """Half of it is there already: committed it is worth more than half of the newer one."""
    view = job_view([open_save(1), open_save(2)], drain=drain(5, s1=SIZE // 2))
    assert done(view) == ["nas: zero of 1"]
    told = plan(view).drained
    assert told == a.Drained(missing=("s20b1", "s10b1"), late=("s20b1",))


def test_what_does_not_fit_is_tried_all_the_same() -> None:
    """What is durable is not sent again, should the node come back."""
    view = job_view([open_save(1)], drain=drain(5))
    assert done(view) == ["nas: zero of 1"]
    assert plan(view).drained == a.Drained(missing=("s10b1",), late=("s10b1",))


def test_of_a_link_of_unknown_speed_nothing_is_said_to_be_late() -> None:
    view = job_view([open_save(1), open_save(2)], drain=drain(0.1, None))
    assert done(view) == ["nas: zero of 2"]
    assert plan(view).drained == a.Drained(missing=("s20b1", "s10b1"))


def test_a_wandering_estimate_does_not_stop_what_is_under_way() -> None:
    """It needs 10 s: with 9 s it stays, since estimates wander; with 5 s the older one that fits is taken."""
    view = shipping(job_view([open_save(1), open_save(2)], drain=drain(9, s1=SIZE // 2)), 2)
    assert done(view) == []
    assert done(replace(view, drain=drain(5, s1=SIZE // 2))) == ["nas: make way"]


def weights_too(view: JobView) -> JobView:
    return replace(view, remotes=(replace(view.remotes[0], forms=(ZERO, BF16)),))


def test_weights_alone_where_that_is_all_that_fits() -> None:
    """A sixth of the bytes; only where the remote takes them, and only if nothing whole fits first."""
    view = weights_too(job_view([open_save(1)], drain=drain(5)))
    assert done(view) == [f"nas: {BF16} of 1"]
    assert done(replace(view, drain=drain(1))) == ["nas: zero of 1"]
    assert done(replace(view, drain=drain(11))) == ["nas: zero of 1"]
    assert done(job_view([open_save(1)], drain=drain(5))) == ["nas: zero of 1"]
    both = weights_too(job_view([open_save(1), open_save(2)], drain=drain(7, s1=SIZE // 2)))
    assert done(both) == ["nas: zero of 1"]
    refused = open_save(1, weights={BF16: DerivedRecord(state=DerivedState.REFUSED)})
    assert done(weights_too(job_view([refused], drain=drain(5)))) == ["nas: zero of 1"]


def test_weights_under_way_go_on_while_the_window_shrinks() -> None:
    """What is left of them counts, not what they were."""
    view = weights_too(job_view([open_save(1)], drain=drain(5)))
    busy = shipping(view, 1, BF16)
    assert done(busy) == []
    left = replace(drain(1), left_bytes={(1, NAS, BF16): 9})
    assert done(replace(busy, drain=left)) == []
    late = replace(drain(1), left_bytes={(1, NAS, BF16): 90})
    assert done(replace(busy, drain=late)) == ["nas: make way"]


def test_weights_take_the_generation_that_the_shards_would() -> None:
    """Of a tag that the remote knows it is asked for first."""
    view = weights_too(job_view([open_save(1)], drain=drain(5)))
    known = replace(view, remotes=(replace(view.remotes[0], known_tags=frozenset({"s10b1"})),))
    assert plan(known).actions == (a.Describe(remote=NAS, tag="s10b1", save_id=1, form=ZERO),)


def test_other_remotes_wait_until_nothing_is_missing_on_those_that_count() -> None:
    other = RemoteView(name="other", is_required=False, forms=(ZERO,), is_attached=True, is_busy=False)
    view = job_view([open_save(1)], drain=drain(100))
    view = replace(view, remotes=(view.remotes[0], other))
    assert done(view) == ["nas: zero of 1"]
    busy = replace(other, is_busy=True, uploading=ZERO, uploading_save_id=1)
    assert done(replace(view, remotes=(view.remotes[0], busy))) == ["nas: zero of 1", "other: make way"]
    whole = job_view([save_view(1, sealed(10))], drain=drain(100))
    whole = replace(whole, remotes=(whole.remotes[0], other))
    assert done(whole) == ["other: zero of 1"]
    assert plan(whole).drained == a.Drained()


def test_nothing_is_converted_pruned_or_retired_in_a_drain_or_a_pause() -> None:
    ready = DerivedRecord(state=DerivedState.NONE)
    saves = [save_view(n, sealed(n * 10), universal=ready) for n in (1, 2, 3)]
    usual = job_view(saves)
    assert {type(x) for x in plan(usual).actions} >= {a.Convert, a.DeleteLocal}
    assert done(replace(usual, drain=drain(100))) == []
    assert done(replace(usual, is_paused=True)) == []


def test_a_refused_one_is_missing_and_never_sent() -> None:
    record = UploadRecord(remote=NAS, form=ZERO, state=UploadState.REFUSED)
    view = job_view([open_save(1, uploads={(NAS, ZERO): record})], drain=drain(100))
    assert done(view) == []
    assert plan(view).drained == a.Drained(missing=("s10b1",))


def test_a_remote_that_is_away_gets_nothing_and_still_counts() -> None:
    view = job_view([open_save(1)], drain=drain(100))
    away = replace(view, remotes=(replace(view.remotes[0], is_attached=False),))
    assert done(away) == []
    assert plan(away).drained == a.Drained(missing=("s10b1",))


# --- a pause -------------------------------------------------------------------------------------------


def test_a_pause_stops_what_is_under_way_and_begins_nothing() -> None:
    view = job_view([open_save(1), open_save(2)], is_paused=True)
    assert done(view) == []
    assert done(shipping(view, 2)) == ["nas: make way"]
    assert plan(view).drained is None


def test_holds_go_on_in_a_pause_and_room_is_made_for_the_trainer() -> None:
    """What is ours never fills the disk (P13), whatever a person paused."""
    clones = Disk(free_bytes=10_000, reserve_bytes=1000, can_clone=True)
    assert done(job_view([open_save(1)], is_paused=True, disk=clones)) == ["Hold"]
    short = replace(clones, free_bytes=10)
    held = open_save(1, is_held=True)
    assert done(job_view([held], is_paused=True, disk=short)) == ["ReleaseHold"]
    committed = save_view(1, sealed(10), is_held=True)
    assert done(job_view([committed], is_paused=True, disk=clones)) == []
    made = DerivedRecord(state=DerivedState.READY)
    assert "DropDerived" in done(job_view([open_save(1, universal=made)], is_paused=True, disk=short))


@pytest.mark.parametrize(
    "rests", [{}, {"is_paused": True}, {"drain": drain(600)}], ids=["", "pause", "drain"]
)
def test_the_only_copy_is_the_last_hold_that_goes(rests: dict[str, Any]) -> None:
    """On a short disk the hold of a committed checkpoint goes, whose folder the trainer removed long ago."""
    in_a_hold = {"is_present": False, "is_intact": False, "is_held": True}
    only_copy = open_save(1, **in_a_hold)
    committed = save_view(2, sealed(20), **in_a_hold)
    short = Disk(free_bytes=10, reserve_bytes=1000, can_clone=True)
    view = job_view([only_copy, committed, open_save(3)], disk=short, **rests)
    assert _released(view) == [(2, "committed")]
    room = replace(short, free_bytes=10_000)
    assert _released(replace(view, disk=room)) == ([] if rests else [(2, "committed")])
    view = job_view([only_copy, open_save(3)], disk=short, **rests)
    assert _released(view) == [(1, PRESSURE)], "nothing else makes room (P13)"


def _released(view: JobView) -> list[tuple[int, str]]:
    return [(x.save_id, x.reason) for x in plan(view).actions if isinstance(x, a.ReleaseHold)]


def test_a_drain_comes_before_a_pause() -> None:
    assert done(job_view([open_save(1)], is_paused=True, drain=drain(100))) == ["nas: zero of 1"]


# --- whatever comes ------------------------------------------------------------------------------------


@given(
    left=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    seconds=st.floats(0.0, 60.0),
    speed=st.sampled_from([None, 1.0, 7.0, 50.0]),
    under_way=st.integers(0, 5),
)
def test_whatever_the_link_something_is_always_on_its_way(
    left: list[int], seconds: float, speed: float | None, under_way: int
) -> None:
    """And following the plan ends with no flapping: what was chosen stays chosen while nothing changes."""
    saves = [open_save(number) for number in range(1, len(left) + 1)]
    named = {f"s{number}": count for number, count in enumerate(left, 1)}
    view = job_view(saves, drain=drain(seconds, speed, **named))
    if 1 <= under_way <= len(left):
        view = shipping(view, under_way)
    words = done(view)
    assert len(words) <= 1
    if words == ["nas: make way"]:
        words = done(
            replace(
                view,
                remotes=(replace(view.remotes[0], uploading=None, uploading_save_id=None, is_busy=False),),
            )
        )
    if words:
        chosen = int(words[0].rpartition(" ")[2])
        assert done(shipping(view, chosen)) == []
    told = plan(view).drained
    assert told is not None
    assert set(told.late) <= set(told.missing)
    assert len(told.missing) == len(left)


@pytest.mark.parametrize("speed", [10.0, 25.0])
def test_late_is_what_the_sum_says(speed: float) -> None:
    """Three saves of 100 bytes and 9 s: none of 10 bytes a second, two of 25."""
    view = job_view([open_save(n) for n in (1, 2, 3)], drain=drain(9, speed))
    told = plan(view).drained
    assert told is not None
    assert len(told.late) == (3 if speed == 10.0 else 1)


def test_what_a_window_was_too_short_for_is_named_with_what_else_is_wrong() -> None:
    """A longer window does not help where the remote refuses: the reason stands beside what is missing."""
    problem = gallery.problem("remote", "attention", "nas: no credentials", "give some")
    note = gallery.problem("small", "note", "small", "")
    rows = (gallery.checkpoint(7, state="sealing"), gallery.checkpoint(6))
    job = gallery.job(problems=(problem, note), checkpoints=rows)
    assert not_begun(job) == "global_step7 (sealing)"
    assert not_begun(None) == "what is being saved"
    text, step = reasons(job)
    assert text.startswith("! nas: no credentials (")
    assert step == "→ give some"
    assert reasons(None) == []
