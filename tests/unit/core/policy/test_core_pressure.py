"""Disk pressure in one turn: what of ours makes room, in which order, and what is not begun (P13)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptd.core.model.records import UNIVERSAL, DerivedRecord, DerivedState
from ckptd.core.policy.actions import (
    Convert,
    DeleteLocal,
    DropDerived,
    Hold,
    PointUniversal,
    ReleaseHold,
    StopConverting,
    Upload,
)
from ckptd.core.policy.blockers import blocked
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import Ephemeral, RetentionPolicy, Tier
from ckptd.core.policy.view import Disk, JobView, SaveView
from tests.support.core_views import job_view, save_view, sealed

ROOMY = Disk(free_bytes=10_000, reserve_bytes=1000, can_clone=True)
SHORT = Disk(free_bytes=999, reserve_bytes=1000, can_clone=True)
READY = DerivedRecord(state=DerivedState.READY, is_source_verified=True)
CLONED = READY.model_copy(update={"is_cloned": True})


def of(view: JobView, kind: type[Any]) -> list[Any]:
    return [a for a in plan(view).actions if isinstance(a, kind)]


def job(saves: list[SaveView], disk: Disk = SHORT, **changes: Any) -> JobView:
    """A job that keeps universal forms here and deletes nothing."""
    base: dict[str, Any] = {
        "local_forms": (UNIVERSAL,),
        "disk": disk,
        "local_retention": RetentionPolicy(save_total_limit=9),
        "latest_universal": "_ckptd/derived/universal/s3b1",
    }
    return job_view(saves, **(base | changes))


def three(**changes: Any) -> list[SaveView]:
    return [save_view(n, sealed(n), universal=READY, **changes) for n in (1, 2, 3)]


def test_universal_forms_go_oldest_first_one_a_turn() -> None:
    assert [a.save_id for a in of(job(three()), DropDerived)] == [1]
    assert of(job(three(), ROOMY), DropDerived) == []


def test_the_last_one_goes_after_its_pointer() -> None:
    """`latest_universal` never names what is not there: the pointer is removed by an earlier action."""
    view = job([*three()[2:]])
    actions = [type(a) for a in plan(view).actions if isinstance(a, PointUniversal | DropDerived)]
    assert actions == [PointUniversal, DropDerived]
    assert [a.tag for a in of(view, PointUniversal)] == [None]


def test_the_last_one_goes_after_its_pointer_though_its_source_is_gone() -> None:
    """The trainer removed the checkpoint: its form was made here, and is no form that `resume` fetched."""
    gone = [replace(three()[2], is_present=False, is_intact=False)]
    actions = [a for a in plan(job(gone)).actions if isinstance(a, PointUniversal | DropDerived)]
    assert [type(a) for a in actions] == [PointUniversal, DropDerived]


def test_what_frees_most_goes_first() -> None:
    """A form that shares its extents with shards that are still here frees next to nothing."""
    saves = three()
    saves[0] = replace(saves[0], universal=CLONED)
    assert [a.save_id for a in of(job(saves), DropDerived)] == [2]


def test_one_that_is_being_sent_is_left_to_end() -> None:
    saves = three()
    saves[0] = replace(saves[0], is_busy=True)
    assert [a.save_id for a in of(job(saves), DropDerived)] == [2]


def test_no_hold_is_given_up_while_a_derived_form_is_left() -> None:
    held = [replace(s, is_held=True, uploads={}) for s in three()]
    assert of(job(held), ReleaseHold) == []
    bare = [replace(s, universal=DerivedRecord()) for s in held]
    assert [a.save_id for a in of(job(bare), ReleaseHold)] == [1]


def test_nothing_is_made_and_nothing_held_while_space_is_short() -> None:
    """But the newest is sent all the same."""
    bare = [replace(s, universal=DerivedRecord(), uploads={}) for s in three()]
    assert of(job(bare), Convert) == []
    assert of(job(bare), Hold) == []
    assert [a.save_id for a in of(job(bare), Upload)] == [3]
    assert [a.save_id for a in of(job(bare, ROOMY), Convert)] == [3]
    assert len(of(job(bare, ROOMY), Hold)) == 3


def test_a_form_is_made_again_only_where_it_leaves_room_for_the_next_save() -> None:
    """Without clones a form costs what its save holds: making it must not bring the pressure back."""
    newest = [replace(three()[2], universal=DerivedRecord())]
    size = newest[0].save.total_bytes
    tight = Disk(free_bytes=1000 + size - 1, reserve_bytes=1000, can_clone=False)
    fits = Disk(free_bytes=1000 + size, reserve_bytes=1000, can_clone=False)
    assert of(job(newest, tight), Convert) == []
    assert len(of(job(newest, fits), Convert)) == 1


def test_a_conversion_under_way_is_given_up_below_min_free() -> None:
    """Not at the line: what it writes leaves that room, so the save in flight is larger than all before."""
    low = Disk(free_bytes=100, reserve_bytes=1000, min_free_bytes=100, can_clone=False)
    lower = replace(low, free_bytes=99)
    assert of(job(three(), low, is_converting=True, is_save_in_flight=True), StopConverting) == []
    assert len(of(job(three(), lower, is_converting=True, is_save_in_flight=True), StopConverting)) == 1
    assert of(job(three(), lower, is_save_in_flight=True), StopConverting) == []


def test_a_form_that_is_sent_without_lying_here_needs_room_for_its_plan_alone() -> None:
    """Short or not, the remote gets it; below `min_free` nothing is begun."""
    newest = [replace(three()[2], universal=DerivedRecord())]
    low = Disk(free_bytes=100, reserve_bytes=1000, min_free_bytes=100, can_clone=False)
    assert [a.form for a in of(job(newest, low, local_forms=()), Upload)] == [UNIVERSAL]
    assert of(job(newest, replace(low, free_bytes=99), local_forms=()), Upload) == []


def test_a_full_disk_takes_nothing_that_the_policy_keeps() -> None:
    full = Disk(free_bytes=0, reserve_bytes=1000, can_clone=False)
    assert of(job(three(), full), DeleteLocal) == []
    limited = job(three(), full, local_retention=RetentionPolicy(save_total_limit=2))
    assert [a.save_id for a in of(limited, DeleteLocal)] == [1]


# --- a ladder here (adr/0094) ------------------------------------------------------------------------------

LADDER = RetentionPolicy(save_total_limit=2, ladder=(Tier(form="universal", after_newer=1),))
TIGHT = Disk(free_bytes=999, reserve_bytes=1000, can_clone=False)
BARE = DerivedRecord()


def laddered(*forms: DerivedRecord, disk: Disk = TIGHT, **changes: Any) -> JobView:
    """Saves 1 … n, whole, with these universal forms."""
    saves = [save_view(n, sealed(n), universal=form) for n, form in enumerate(forms, start=1)]
    return job(saves, disk, **{"local_retention": LADDER, "latest_universal": None} | changes)


def test_what_a_rung_will_leave_goes_after_all_others() -> None:
    """Of the older one the source goes sooner: the newest loses its form before it, a pinned one first."""
    view = laddered(READY, READY)
    assert [a.save_id for a in of(view, DropDerived)] == [2]
    pinned = replace(view, saves=(replace(view.saves[0], is_pinned=True), view.saves[1]))
    assert [a.save_id for a in of(pinned, DropDerived)] == [1]
    passing = LADDER.model_copy(update={"ephemeral": Ephemeral(every_steps=2, keep=2)})
    assert [a.save_id for a in of(laddered(READY, READY, local_retention=passing), DropDerived)] == [1]


def test_a_save_that_steps_down_keeps_what_is_left_of_it() -> None:
    """Two of three lose their form at most, though the disk stays short."""
    view = laddered(READY, READY, READY)
    assert [a.save_id for a in of(view, DropDerived)] == [3]
    view = laddered(READY, READY, BARE)
    assert [a.save_id for a in of(view, DropDerived)] == [2]
    assert of(laddered(READY, BARE, BARE), DropDerived) == []
    assert [a.save_id for a in of(laddered(READY, BARE, BARE), DeleteLocal)] == [1], (
        "its source makes the room"
    )


def test_what_a_rung_waits_for_is_made_once_it_fits() -> None:
    """Without clones too: a disk that was short for an hour keeps nothing whole for good."""
    size = sealed(1).total_bytes
    fits = Disk(free_bytes=1000 + size, reserve_bytes=1000, can_clone=False)
    assert [a.save_id for a in of(laddered(BARE, READY, READY, disk=fits), Convert)] == [1]
    assert [a.save_id for a in of(laddered(BARE, READY, BARE, disk=fits), Convert)] == [3], "the newest first"
    assert of(laddered(BARE, READY, READY, disk=replace(fits, free_bytes=999 + size)), Convert) == []
    within = laddered(BARE, READY, disk=fits)
    assert of(within, Convert) == [], "what the limit keeps whole waits for nothing"
    plain = laddered(BARE, READY, READY, disk=fits, local_retention=RetentionPolicy(save_total_limit=3))
    assert of(plain, Convert) == []


def test_why_a_short_disk_keeps_more_than_the_limit_is_said() -> None:
    """The true reason, and a cure that works: an end of the ladder lets go what it names."""
    view = laddered(READY, BARE, BARE, BARE)
    gone = replace(view.saves[0], is_present=False, is_intact=False, is_pruned=True)
    view = replace(view, saves=(gone, *view.saves[1:]))
    found = blocked(view, plan(view).local_verdicts)
    assert found is not None
    assert "1 whole because there is no room to make the universal form" in found.text
    assert "2 within the policy, " in found.text
    assert found.text.endswith("and 1 universal form that the ladder left")
    assert 'end it by { after = N, form = "gone" }' in found.next_step
    assert "free 0.1 GB: then those forms are made" in found.next_step
    ends = (*LADDER.ladder, Tier(form="gone", after_newer=2))
    ended = replace(view, local_retention=LADDER.model_copy(update={"ladder": ends}))
    assert [a.save_id for a in of(ended, DropDerived)] == [1]
    assert [a.save_id for a in of(ended, DeleteLocal)] == [2]


def test_a_form_that_cannot_be_made_waits_for_no_room() -> None:
    view = laddered(DerivedRecord(state=DerivedState.REFUSED), BARE, BARE)
    found = blocked(view, plan(view).local_verdicts)
    assert found is not None
    assert "1 whole because the ladder leaves a universal form instead, and it has none" in found.text
    assert "those forms are made" not in found.next_step
