"""What the deciding thread remembers and the journal does not: when something may be tried again."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckptd.base import files
from ckptd.conversion.engine.children import Watched
from ckptd.conversion.engine.supervisor import failure
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.listing import SaveDirListing
from ckptd.core.model.other_layouts import NOTHING_DECLARED
from ckptd.core.model.records import (
    UNIVERSAL,
    ZERO,
    DeletionIntent,
    DerivedRecord,
    DerivedState,
    SaveRow,
    UploadRecord,
    UploadState,
)
from ckptd.core.policy.actions import Convert, Upload
from ckptd.core.policy.derived_forms import MAX_CONVERSION_TRIES
from ckptd.core.policy.planner import plan
from ckptd.daemon.actions.local import LocalActions
from ckptd.daemon.crash_recovery import finish_after_crash
from ckptd.daemon.health import status
from ckptd.daemon.health.checks import report_conversions
from ckptd.daemon.health.stalls import why_gone
from ckptd.daemon.state.state import JobState
from ckptd.daemon.uploads.uploads import UploadManager
from ckptd.errors import LockHeld, NoSpaceError, NotPermitted, RefusedError, SourceChanged
from ckptd.observe.audit import Audit
from ckptd.storage.journal import history
from ckptd.storage.journal.history import ANY_TAG
from ckptd.storage.journal.journal import Journal
from tests.support.core_views import job_view, save_view, sealed
from tests.support.recover_scene import Scene, known_save
from tests.support.states import job_state

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.errors import CkptdError


def test_a_backoff_outlives_reading_the_journal_again(tmp_path: Path) -> None:
    state = job_state(Journal(tmp_path / "journal.db"))
    save_id = state.journal.add_save(sealed(1), found_first=False, adopted=True, seen_at=0.0)
    state.load()
    failed = UploadRecord(remote="nas", form=ZERO, state=UploadState.FAILED, tries=2, retry_at_seconds=1e9)
    state.uploads.put(save_id, failed)
    state.load()
    assert state.uploads.record(save_id, "nas", ZERO) == failed
    state.uploads.put(
        save_id, failed.model_copy(update={"state": UploadState.UPLOADING, "retry_at_seconds": 0.0})
    )
    state.load()
    assert state.uploads.record(save_id, "nas", ZERO).retry_at_seconds == 0.0
    state.journal.close()


def _state_of(path: Path, count: int) -> tuple[JobState, list[int]]:
    state = job_state(Journal(path))
    ids = [
        state.journal.add_save(sealed(step), found_first=False, adopted=True, seen_at=0.0)
        for step in range(1, count + 1)
    ]
    state.load()
    return state, ids


def _conversions_seen(state: JobState) -> list[tuple[str, str, str]]:
    state.problems.begin_turn()
    report_conversions(state.problems, state)
    state.problems.end_turn()
    return [(p.code, p.about, p.text) for p in state.problems.all()]


def _failing(state: JobState, save_id: int, error: CkptdError) -> None:
    nothing = cast("Any", None)
    config = cast("Any", SimpleNamespace(trainer="auto", declared=NOTHING_DECLARED))
    local_actions = LocalActions(
        config,
        state,
        nothing,
        nothing,
        nothing,
        wake=lambda: None,
        is_pinned=lambda _tag: False,
        holds_lease=lambda: True,
    )
    local_actions._not_converted(save_id, error)


@pytest.mark.parametrize(
    "error",
    [
        SourceChanged("rank_0.pt was written meanwhile"),
        failure(Watched(timed_out=True, status=-signal.SIGKILL), "planning the conversion"),
    ],
    ids=["source-changed", "planning-takes-too-long"],
)
def test_a_conversion_that_fails_whenever_it_is_tried_is_told_and_ends(
    tmp_path: Path, error: CkptdError
) -> None:
    """It was begun again at every turn, for ever, and nobody was told; one that hung once was refused."""
    state, (save_id,) = _state_of(tmp_path / "journal.db", 1)
    for times in range(1, 4):
        _failing(state, save_id, error)
        derived = state.saves.rows[save_id].derived
        assert (derived.state, derived.tries) == (DerivedState.FAILED, times)
        assert derived.retry_at_seconds > 0
    ended = state.saves.rows[save_id].derived
    view = job_view([save_view(1, sealed(1), universal=ended)], now_seconds=ended.retry_at_seconds + 1)
    assert not [a for a in plan(view).actions if type(a).__name__ == "Convert"]
    assert [code for code, _, _ in _conversions_seen(state)] == ["conversion-failed"]
    state.journal.close()


def test_a_conversion_without_room_waits_and_says_so(tmp_path: Path) -> None:
    """It was tried again at every turn: planned, written until the reserve, removed."""
    state, (save_id,) = _state_of(tmp_path / "journal.db", 1)
    _failing(state, save_id, NoSpaceError("the universal form needs 5 bytes"))
    derived = state.saves.rows[save_id].derived
    assert (derived.state, derived.tries) == (DerivedState.FAILED, 0)
    view = job_view([save_view(1, sealed(1), universal=derived)], now_seconds=0.0)
    assert not [a for a in plan(view).actions if type(a).__name__ == "Convert"]
    later = job_view([save_view(1, sealed(1), universal=derived)], now_seconds=derived.retry_at_seconds + 1)
    assert [a for a in plan(later).actions if type(a).__name__ == "Convert"]
    assert _conversions_seen(state) == [
        ("conversion-failed", "s1b1", "converting s1b1: the universal form needs 5 bytes")
    ]
    state.saves.put_derived(save_id, DerivedRecord(state=DerivedState.READY))
    assert _conversions_seen(state) == []
    state.journal.close()


@pytest.mark.parametrize("error", [NotPermitted("read-only"), LockHeld("another conversion")])
def test_a_conversion_outlives_lost_rights(tmp_path: Path, error: CkptdError) -> None:
    """A disk that was read-only for five minutes used up the three tries: no universal form ever."""
    state, (save_id,) = _state_of(tmp_path / "journal.db", 1)
    for _ in range(MAX_CONVERSION_TRIES + 2):
        _failing(state, save_id, error)
    derived = state.saves.rows[save_id].derived
    for seconds, is_tried in ((-1, False), (1, True)):
        now_seconds = derived.retry_at_seconds + seconds
        view = job_view([save_view(1, sealed(1), universal=derived)], now_seconds=now_seconds)
        assert any(isinstance(a, Convert) for a in plan(view).actions) == is_tried
    assert [code for code, _, _ in _conversions_seen(state)] == ["conversion-failed"]
    state.journal.close()


def test_a_form_whose_files_are_gone_is_made_again(tmp_path: Path) -> None:
    """A journal of before it went calls it ready: its upload was begun at every turn, for ever."""
    scene = Scene(tmp_path)
    _, state = known_save(scene, tmp_path / "journal.db")
    (save_id,) = state.saves.rows
    state.saves.put_derived(save_id, DerivedRecord(state=DerivedState.READY))
    links = cast("Any", {"nas": None})
    audit = Audit(tmp_path / "audit.jsonl")
    uploads = UploadManager(scene.job(), "digest", state, links, audit, lambda: None)
    with files.opened_dir(scene.save_dir) as fd:
        uploads.upload(Upload(save_id=save_id, remote="nas", form=UNIVERSAL, generation=1, attempt=1), fd, 0)
    assert state.saves.rows[save_id].derived.state is DerivedState.NONE
    assert state.uploads.record(save_id, "nas", UNIVERSAL).state is UploadState.NEW
    state.journal.close()


def test_what_has_no_universal_form_is_said_once(tmp_path: Path) -> None:
    """One line per reason, not one per checkpoint; gone with the last of them, there after a restart."""
    state, ids = _state_of(tmp_path / "journal.db", 3)
    for save_id in ids:
        _failing(state, save_id, RefusedError("Muon is not converted"))
    state.journal.close()
    state = job_state(Journal(tmp_path / "journal.db"))
    state.load()
    text = "s3b1 has no universal form: Muon is not converted (nor have 2 older ones)"
    assert _conversions_seen(state) == [("conversion-refused", "s3b1", text)]
    for save_id in ids:
        state.journal.end_save(save_id, "pruned")
    state.load()
    assert _conversions_seen(state) == []
    state.journal.close()


def test_why_it_went_is_known_after_a_restart_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what we pruned the journal's own words, not those of a prune that was taken back."""
    state, ids = _state_of(tmp_path / "journal.db", 4)
    intents = [_intent().model_copy(update={"reason": reason}) for reason in ("beyond the limit", "no")]
    for intent, is_done in zip(intents, (True, False), strict=True):
        state.journal.end_deletion(state.journal.intend_deletion(ids[0], "t", intent), done=is_done)
    for save_id, end in zip(ids, ("pruned", "pruned", "vanished"), strict=False):
        state.journal.end_save(save_id, end)  # type: ignore[arg-type]
    state.journal.close()
    state = job_state(Journal(tmp_path / "journal.db"))
    state.load()
    words = ["beyond the limit", None, "removed by somebody else", None]
    assert [why_gone(state, state.saves.rows[save_id]) for save_id in ids] == words
    monkeypatch.setattr(Journal, "deletion_reason", lambda _self, _id: None)
    assert [why_gone(state, state.saves.rows[save_id]) for save_id in ids] == words
    state.journal.close()


def test_what_changed_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing, holding and pruning of thousands read the row that changed, not all of them each time."""
    state, ids = _state_of(tmp_path / "journal.db", 40)
    read: list[int] = []
    whole = history.save_row

    def noted(row: tuple[Any, ...]) -> SaveRow:
        read.append(row[0])
        return whole(row)

    monkeypatch.setattr(history, "save_row", noted)
    failed = UploadRecord(remote="nas", form=ZERO, state=UploadState.FAILED, tries=2, retry_at_seconds=1e9)
    state.uploads.put(ids[3], failed)
    state.set_held(ids[3], held=True)
    again = state.journal.add_save(sealed(4), found_first=False, adopted=True, seen_at=0.0)
    state.reload(again, ids[3])
    assert read == [ids[3], ids[3], again]
    assert state.saves.of_tag(sealed(4).tag) == state.saves.rows[again]
    assert (state.saves.rows[ids[3]].state, state.saves.rows[ids[3]].held) == ("superseded", True)
    assert state.uploads.record(ids[3], "nas", ZERO) == failed
    state.journal.end_save(again, "pruned")
    state.reload(again)
    assert state.saves.of_tag(sealed(4).tag) is None
    fresh = job_state(state.journal)
    fresh.load()
    assert (fresh.saves.rows, fresh.saves._by_tag) == (state.saves.rows, state.saves._by_tag)
    assert fresh.saves.widest_save_seconds == state.saves.widest_save_seconds
    state.journal.close()


def test_what_ended_long_ago_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is here, was here before us, may come back, or decides on an order."""
    monkeypatch.setattr(history, "KEPT_ENDED", 5)
    monkeypatch.setattr(history, "_FACTS_SECONDS", -1.0)
    state, ids = _state_of(tmp_path / "journal.db", 40)
    journal = state.journal
    state.folders.listing = SaveDirListing(device=1, folders=())
    first = journal.add_save(sealed(50), found_first=True, adopted=False, seen_at=0.0)
    highest = journal.add_save(sealed(99), found_first=False, adopted=True, seen_at=0.0)
    more = [
        journal.add_save(sealed(step), found_first=False, adopted=True, seen_at=0.0) for step in range(60, 66)
    ]
    for save_id in [*ids[2:], first, highest, *more[1:]]:
        journal.end_save(save_id, "pruned")
        state.uploads.put(save_id, UploadRecord(remote="nas", form=ZERO, state=UploadState.COMMITTED))
        journal.end_deletion(journal.intend_deletion(save_id, f"t{save_id}", _intent()), done=True)
    journal.set_held(ids[2], held=True)
    journal.set_derived(ids[3], DerivedRecord(state=DerivedState.READY))
    journal.intend_deletion(ids[4], "trash", _intent())
    old = sealed(30).files[0]
    journal.put_facts([(old.identity, FileFacts(path=old.path, bytes=100, archive=Archive.ZIP))])
    state.load()
    state.saves.busy[ids[5]] += 1
    state.tidy(0.0)
    assert state.saves.rows.keys() == {*ids[:6], first, highest, *more}
    assert state.uploads.records.keys() <= state.saves.rows.keys()
    gone = sealed(20)
    assert journal.past_order(gone.tag, gone.fingerprints) == gone.order
    assert journal.past_order(gone.tag, ()) is None
    assert journal.past_order(ANY_TAG, gone.fingerprints) == gone.order, "a copy of it is told as one"
    assert journal.facts(old.path, old.identity) is None
    assert [row.trash for row in journal.open_deletions()] == ["trash"]
    journal.close()
    again = job_state(Journal(tmp_path / "journal.db"))
    again.load()
    assert (again.saves.rows, again.uploads.records) == (state.saves.rows, state.uploads.records)
    assert again.saves.widest_save_seconds == state.saves.widest_save_seconds
    again.journal.close()


def test_the_seat_belt_outlives_a_start(tmp_path: Path) -> None:
    """What was sealed and what went within the hour counts, but for what was taken back or is older."""
    state, ids = _state_of(tmp_path / "journal.db", 4)
    journal = state.journal
    for save_id in ids:
        deletion = journal.intend_deletion(save_id, "trash", _intent())
        journal.end_deletion(deletion, done=save_id != ids[0])
    journal._db.execute("UPDATE deletions SET at = at - 7200 WHERE save_id = ?", (ids[1],))
    journal.close()
    again = job_state(Journal(tmp_path / "journal.db"))
    with files.opened_dir(tmp_path) as fd:
        finish_after_crash(again, fd, Audit(tmp_path / "audit.jsonl"))
    assert len(again.deletions.local_at) == 2
    assert len(again.deletions.completed_at) == 4
    assert max(again.deletions.local_at) <= time.monotonic()
    again.journal.close()


def _intent() -> DeletionIntent:
    save = sealed(1)
    return DeletionIntent(
        tag=save.tag, generation=1, folder=save.folder, files=save.files, commits=(), reason="limit"
    )


@pytest.mark.parametrize(
    ("row", "held", "form", "shown"),
    [
        ("present", False, ZERO, "failed"),
        ("pruned", True, ZERO, "failed"),
        ("pruned", False, ZERO, "none"),
        ("present", False, UNIVERSAL, "failed"),
        ("pruned", False, UNIVERSAL, "none"),
    ],
)
def test_an_upload_that_failed_before_its_source_went_is_not_shown_as_failed(
    row: str, held: bool, form: str, shown: str
) -> None:
    """With `unuploaded = "delete"`: nothing is to be sent any more, so nothing failed."""
    save = SimpleNamespace(state=row, held=held, derived_of=lambda _: DerivedRecord())
    state = cast("JobState", SimpleNamespace(uploads=SimpleNamespace(progress={})))
    record = UploadRecord(remote="nas", form=form, state=UploadState.FAILED)
    told = status._form(state, cast("SaveRow", save), record, (1, "nas", form), {}, stands_still=False)
    assert told.state == shown
