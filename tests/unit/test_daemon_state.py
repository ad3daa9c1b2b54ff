"""What the deciding thread remembers and the journal does not: when something may be tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ckptd.core.planner import plan
from ckptd.core.view import ZERO, DerivedRecord, DerivedState, ShipRecord, ShipState
from ckptd.daemon.checks import see_conversions
from ckptd.daemon.chores import Chores
from ckptd.daemon.problems import Problems
from ckptd.daemon.state import JobState
from ckptd.errors import NoSpaceError, RefusedError
from ckptd.journal import Journal
from tests.unit.core_views import job_view, save_view, sealed

if TYPE_CHECKING:
    from pathlib import Path


def test_a_backoff_outlives_reading_the_journal_again(tmp_path: Path) -> None:
    state = JobState(journal=Journal(tmp_path / "journal.db"), problems=Problems())
    save_id = state.journal.add_save(sealed(1), found_first=False, adopted=True, seen_at=0.0)
    state.load()
    failed = ShipRecord(remote="nas", form=ZERO, state=ShipState.FAILED, tries=2, retry_at_seconds=1e9)
    state.put_ship(save_id, failed)
    state.load()
    assert state.ship(save_id, "nas", ZERO) == failed
    state.put_ship(save_id, failed.model_copy(update={"state": ShipState.SHIPPING, "retry_at_seconds": 0.0}))
    state.load()
    assert state.ship(save_id, "nas", ZERO).retry_at_seconds == 0.0
    state.journal.close()


def _state_of(path: Path, count: int) -> tuple[JobState, list[int]]:
    state = JobState(journal=Journal(path), problems=Problems())
    ids = [
        state.journal.add_save(sealed(step), found_first=False, adopted=True, seen_at=0.0)
        for step in range(1, count + 1)
    ]
    state.load()
    return state, ids


def _conversions_seen(state: JobState) -> list[tuple[str, str, str]]:
    state.problems.begin_turn()
    see_conversions(state.problems, state)
    state.problems.end_turn()
    return [(p.code, p.about, p.text) for p in state.problems.all()]


def _failing(state: JobState, save_id: int, error: NoSpaceError | RefusedError) -> None:
    nothing = cast("Any", None)
    chores = Chores(nothing, state, nothing, nothing, nothing, wake=lambda: None)
    chores._not_converted(save_id, error)


def test_a_conversion_without_room_waits_and_says_so(tmp_path: Path) -> None:
    """It was tried again at every turn: planned, written until the reserve, removed."""
    state, (save_id,) = _state_of(tmp_path / "journal.db", 1)
    _failing(state, save_id, NoSpaceError("the universal form needs 5 bytes"))
    derived = state.rows[save_id].derived
    assert (derived.state, derived.tries) == (DerivedState.FAILED, 0)
    view = job_view([save_view(1, sealed(1), universal=derived)], now_seconds=0.0)
    assert not [a for a in plan(view).actions if type(a).__name__ == "Convert"]
    later = job_view([save_view(1, sealed(1), universal=derived)], now_seconds=derived.retry_at_seconds + 1)
    assert [a for a in plan(later).actions if type(a).__name__ == "Convert"]
    assert _conversions_seen(state) == [
        ("conversion-failed", "s1b1", "converting s1b1: the universal form needs 5 bytes")
    ]
    state.put_derived(save_id, DerivedRecord(state=DerivedState.READY))
    assert _conversions_seen(state) == []
    state.journal.close()


def test_what_has_no_universal_form_is_said_once(tmp_path: Path) -> None:
    """One line per reason, not one per checkpoint; gone with the last of them, there after a restart."""
    state, ids = _state_of(tmp_path / "journal.db", 3)
    for save_id in ids:
        _failing(state, save_id, RefusedError("Muon is not converted"))
    state.journal.close()
    state = JobState(journal=Journal(tmp_path / "journal.db"), problems=Problems())
    state.load()
    text = "s3b1 has no universal form: Muon is not converted (nor have 2 older ones)"
    assert _conversions_seen(state) == [("conversion-refused", "s3b1", text)]
    for save_id in ids:
        state.journal.end_save(save_id, "pruned")
    state.load()
    assert _conversions_seen(state) == []
    state.journal.close()
