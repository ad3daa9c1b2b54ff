"""The plan for forms of a save that no node has whole: what is made of the remote, and when (adr/0118)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.policy import actions as a
from ckptd.core.policy.leases import attempt_folder, attempts_folder
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy, Tier
from ckptd.core.policy.view import Drain, JobView, RemoteView, SaveView
from ckptd.daemon.health.checks import report_unused_remotes
from ckptd.daemon.state.problems import Problems
from tests.support.core_views import NAS, committed_record, job_view, remote_commit, save_view, sealed

BF16 = "weights-bf16"


def part(step: int = 5, *, committed: bool = True, **changes: Any) -> SaveView:
    """What this node has of a save over several."""
    save = sealed(step).model_copy(update={"is_part": True})
    open_ = {"universal": DerivedRecord(), "is_intact": True} | changes
    return save_view(step, save, committed=committed, **open_)


def with_record(save: SaveView, form: str = UNIVERSAL, **changes: Any) -> SaveView:
    record = UploadRecord(remote=NAS, form=form).model_copy(update=changes)
    return replace(save, uploads={**save.uploads, (NAS, form): record})


def made(view: JobView) -> list[tuple[int, str, bool]]:
    """(save, form, streamed) of what is sent beside ZeRO forms."""
    ships = [x for x in plan(view).actions if isinstance(x, a.Upload)]
    return [(x.save_id, x.form, x.is_streamed) for x in ships if x.form != ZERO]


def on(view: JobView, **changes: Any) -> JobView:
    """With another remote."""
    return replace(view, remotes=(replace(view.remotes[0], **changes),))


@pytest.mark.parametrize("local_forms", [(), (UNIVERSAL,)])
def test_a_committed_part_gets_its_form_whatever_this_node_keeps(local_forms: tuple[str, ...]) -> None:
    """Its files here may even be gone: none of them is read."""
    view = job_view([part()], local_forms=local_forms)
    assert made(view) == [(5, UNIVERSAL, True)]
    assert made(job_view([part(is_intact=False)], local_forms=local_forms)) == [(5, UNIVERSAL, True)]
    assert not [x for x in plan(view).actions if isinstance(x, a.Convert)]


def test_it_takes_the_generation_of_the_commit_it_is_made_of() -> None:
    save = part()
    zero = committed_record(save.save).model_copy(update={"generation": 3})
    view = job_view([replace(save, uploads={(NAS, ZERO): zero})])
    (upload,) = [x for x in plan(view).actions if isinstance(x, a.Upload)]
    assert (upload.generation, upload.form) == (3, UNIVERSAL)


def test_the_newest_committed_one_alone_and_what_was_begun_first() -> None:
    three = [part(4), part(5), part(6, committed=False)]
    assert made(on(job_view(three), is_busy=False)) == []  # the ZeRO form of the newest comes first
    sent = with_record(three[2], ZERO, state=UploadState.WAITING, retry_at_seconds=200.0)
    assert made(job_view([*three[:2], sent])) == [(5, UNIVERSAL, True)]
    begun = with_record(three[0], state=UploadState.NEW, generation=1)
    assert made(job_view([begun, three[1]])) == [(4, UNIVERSAL, True)]
    waits = with_record(three[0], state=UploadState.WAITING, generation=1)
    assert made(job_view([waits, three[1]])) == [(5, UNIVERSAL, True)]


def test_where_a_ladder_leaves_the_form_alone_older_ones_get_it_too() -> None:
    ladder = RetentionPolicy(save_total_limit=1, ladder=(Tier(form="universal", after_newer=1),))
    view = job_view([part(4), with_record(part(5), state=UploadState.COMMITTED, generation=1)])
    assert made(on(view, retention=ladder)) == [(4, UNIVERSAL, True)]


@pytest.mark.parametrize(
    "save",
    [
        part(committed=False),
        part(universal=DerivedRecord(state=DerivedState.REFUSED)),
        with_record(part(), state=UploadState.COMMITTED, generation=1),
        with_record(part(), state=UploadState.REFUSED),
        with_record(part(), state=UploadState.WAITING, retry_at_seconds=101.0),
        with_record(part(), state=UploadState.FAILED, retry_at_seconds=101.0),
    ],
    ids=["uncommitted", "no such form", "committed", "refused", "another makes it", "failed"],
)
def test_nothing_is_made(save: SaveView) -> None:
    assert made(job_view([save])) == []


def test_whoever_waits_for_another_node_looks_again() -> None:
    save = with_record(part(), state=UploadState.WAITING, retry_at_seconds=99.0, generation=1)
    assert made(job_view([save])) == [(5, UNIVERSAL, True)]


def test_weights_after_the_universal_form() -> None:
    forms = (ZERO, UNIVERSAL, BF16)
    assert made(on(job_view([part()]), forms=forms)) == [(5, UNIVERSAL, True)]
    done = with_record(part(), state=UploadState.COMMITTED, generation=1)
    assert made(on(job_view([done]), forms=forms)) == [(5, BF16, True)]


def test_a_remote_that_does_not_hold_the_shards_gets_none() -> None:
    """Its child speaks to that remote alone."""
    view = job_view([part()])
    other = RemoteView(name="hub", is_required=False, forms=(BF16,), is_attached=True, is_busy=False)
    done = with_record(part(), state=UploadState.COMMITTED, generation=1)
    assert made(replace(job_view([done]), remotes=(*view.remotes, other))) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"is_save_in_flight": True},
        {"is_converting": True},
        {"is_paused": True},
        {"disk": replace(job_view([]).disk, free_bytes=10, min_free_bytes=50)},
        {"drain": Drain(seconds_left=600.0, speeds={NAS: 1e9})},
    ],
    ids=["a save in flight", "another conversion", "paused", "the disk is full", "draining"],
)
def test_not_now(changes: dict[str, Any]) -> None:
    assert made(job_view([part()], **changes)) == []


def test_a_drain_ends_one_that_is_under_way_and_begins_none() -> None:
    """Another node has the time for it."""
    drain = Drain(seconds_left=20.0, speeds={NAS: 1.0})
    forms = (ZERO, UNIVERSAL, BF16)
    late = part(6, committed=False)
    assert made(on(job_view([part(5), late], drain=drain), forms=forms)) == []
    view = on(job_view([part()], drain=drain), is_busy=True, uploading=UNIVERSAL, uploading_save_id=5)
    assert a.CancelUpload(remote=NAS, reason="draining") in plan(view).actions


def test_removals_come_before_it() -> None:
    old, new = part(4), part(5)
    gone = replace(old, is_present=False, is_pruned=True, is_intact=False)
    view = job_view([gone, new])
    view = on(view, retention=RetentionPolicy(save_total_limit=1))
    kinds = [type(x) for x in plan(view).actions]
    assert a.DeleteRemote in kinds
    assert made(view) == []


def test_one_that_another_node_committed_meanwhile_is_given_up() -> None:
    save = with_record(part(), state=UploadState.UPLOADING, generation=1)
    shipping = {"is_busy": True, "uploading": UNIVERSAL, "uploading_save_id": 5}
    view = on(job_view([save]), **shipping)
    assert plan(view).actions == ()
    there = (remote_commit(save.save), remote_commit(save.save, UNIVERSAL))
    assert plan(on(view, commits=there)).actions == (
        a.CancelUpload(remote=NAS, reason="another node was faster"),
    )
    other = (there[0], replace(there[1], generation=2))
    assert plan(on(view, commits=other)).actions == ()


def test_a_remote_without_the_zero_form_gets_nothing_of_it_and_that_is_said() -> None:
    """Of a save that lies whole here it gets its forms as ever."""
    archive = RemoteView(
        name="archive", is_required=False, forms=(UNIVERSAL, BF16), is_attached=True, is_busy=False
    )
    whole = save_view(6, sealed(6), committed=True, universal=DerivedRecord())

    def seen(*saves: SaveView) -> JobView:
        view = job_view(list(saves), local_forms=())
        return replace(view, remotes=(*view.remotes, archive))

    for view, tag in ((seen(part(4), part(5)), "s5b1"), (seen(whole), None), (seen(part(4), whole), "s4b1")):
        problems = Problems()
        problems.begin_turn()
        report_unused_remotes(problems, view)
        problems.end_turn()
        said = [(p.code, p.about, p.severity) for p in problems.all()]
        assert said == ([("conversion-refused", "archive", "note")] if tag else [])
        assert all(f"gets no universal and weights-bf16 of {tag}" in p.text for p in problems.all())
    actions = plan(seen(part(4), whole)).actions
    sent = [x for x in actions if isinstance(x, a.Upload) and x.remote == "archive"]
    assert [(x.save_id, x.form) for x in sent] == [(6, UNIVERSAL)]


def test_each_attempt_has_a_folder_of_its_own() -> None:
    assert attempt_folder("s5", 1, UNIVERSAL, "", 1) == "s5_universal"
    assert attempt_folder("s5", 2, UNIVERSAL, "", 3) == "s5.g2_universal.a3"
    assert attempt_folder("s5", 1, BF16, "", 2) == "s5_weights-bf16.a2"
    beside = [attempt_folder("checkpoint-5", 1, UNIVERSAL, "global_step5_universal", n) for n in (1, 2)]
    assert beside == ["checkpoint-5", "checkpoint-5.a2"]
    assert attempts_folder("s5", 1, UNIVERSAL) == "_ckptd/shared/making/s5~g1~universal/"
