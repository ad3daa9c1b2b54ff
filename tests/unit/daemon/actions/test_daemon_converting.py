"""A conversion under way and the room that the trainer needs: given up whole, and tried again (P13)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import extents, files
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.staging import partial_name
from ckptd.conversion.options import ConvertOptions
from ckptd.core.completeness.sealing import sealed_file
from ckptd.core.model.records import DerivedRecord, DerivedState, SaveRow
from ckptd.daemon.actions.convert import PLACE, Signals, make_universal
from ckptd.daemon.crash_recovery import finish_after_crash
from ckptd.errors import BehindError, NoSpaceError
from ckptd.observe.audit import Audit
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan_folder
from tests.support.core_views import sealed
from tests.support.states import job_state
from tests.support.synthetic import write_stage12

TAG = "global_step7"


@pytest.fixture
def row(tmp_path: Path) -> SaveRow:
    """A sealed save of two ranks, small and real."""
    write_stage12(tmp_path / TAG, [{f"w{i}": (64, 64) for i in range(4)}], 2)
    with files.opened_dir(tmp_path) as fd:
        listing = scan_folder(fd, TAG)
    assert listing is not None
    facts = {row.path: row for row in inspect_files(tmp_path / TAG, [f.path for f in listing.files])}
    sealed_files = tuple(sealed_file(f, facts[f.path], listing) for f in listing.files)
    changes: dict[str, Any] = {"tag": TAG, "folder": listing.folder, "files": sealed_files}
    return SaveRow(
        id=1,
        save=sealed(7).model_copy(update=changes),
        state="present",
        found_first=False,
        adopted=True,
        held=False,
        derived=DerivedRecord(),
        seen_at=0.0,
        sealed_at=0.0,
        ended_at=None,
    )


def made(save_dir: Path, row: SaveRow, signals: Signals, reserve_bytes: int = 0) -> DerivedRecord:
    options = ConvertOptions(memory_budget_bytes=256 << 20, reserve_bytes=reserve_bytes)
    with files.opened_dir(save_dir) as fd:
        return make_universal(fd, save_dir, row, options, lambda _: None, signals, lambda _: None)


def left(save_dir: Path) -> list[str]:
    """Files of ours."""
    return [str(p.relative_to(save_dir)) for p in (save_dir / "_ckptd").rglob("*") if p.is_file()]


@pytest.mark.parametrize(("signal", "error"), [("give_room", NoSpaceError), ("stop", BehindError)])
def test_paused_in_a_save_and_given_up(
    tmp_path: Path, row: SaveRow, signal: str, error: type[Exception]
) -> None:
    """It rests while a save is in flight; the room goes back at once, a stop keeps it for the next start."""
    signals = Signals()
    signals.pause.set()

    def end() -> None:
        deadline = time.monotonic() + 200
        while not left(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        getattr(signals, signal).set()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(error):
        made(tmp_path, row, signals)
    ending.join()
    assert bool(left(tmp_path)) is (signal == "stop")
    assert made(tmp_path, row, Signals()).state is DerivedState.READY


@pytest.mark.parametrize("is_same", [True, False])
def test_what_was_published_and_not_noted_is_noted_at_the_next_start(
    tmp_path: Path, row: SaveRow, is_same: bool
) -> None:
    """A kill between the two: it lay there until its save went, and then went without a line of its own."""
    made(tmp_path, row, Signals())
    state = job_state(Journal(tmp_path / "journal.db"))
    save = row.save if is_same else row.save.model_copy(update={"files": sealed(8).files})
    save_id = state.journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    state.saves.put_derived(save_id, DerivedRecord(state=DerivedState.CONVERTING))
    (tmp_path / fs.STAGING / partial_name(TAG)).mkdir()
    with files.opened_dir(tmp_path) as fd:
        finish_after_crash(state, fd, Audit(tmp_path / "audit.jsonl"))
    found = state.saves.rows[save_id].derived
    assert found.state is (DerivedState.READY if is_same else DerivedState.NONE)
    assert bool(found.plan_sha256) is is_same
    assert (tmp_path / fs.STAGING / partial_name(TAG)).exists() is not is_same
    state.journal.close()


def test_what_another_save_of_the_tag_left_goes_with_a_line(tmp_path: Path, row: SaveRow) -> None:
    """A folder in the place of the form, of whatever it was made."""
    place = tmp_path / PLACE / TAG
    place.mkdir(parents=True)
    (place / "ckptd.json").write_text("{}")
    reasons: list[str] = []
    options = ConvertOptions(memory_budget_bytes=256 << 20)
    with files.opened_dir(tmp_path) as fd:
        make_universal(fd, tmp_path, row, options, lambda _: None, Signals(), reasons.append)
    assert reasons == ["made from another save of the tag"]


def test_nothing_is_begun_that_would_eat_the_reserve(tmp_path: Path, row: SaveRow) -> None:
    with files.opened_dir(tmp_path) as fd:
        free = extents.free_bytes(fd)
    with pytest.raises(NoSpaceError, match="must stay free"):
        made(tmp_path, row, Signals(), reserve_bytes=free + (1 << 30))
    assert left(tmp_path) == []
