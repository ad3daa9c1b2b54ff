"""Holds of a journal that is lost, on a disk that refuses (adr/0102, docs/internals/tests.md)."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from ckptd.base import extents, files
from ckptd.core.model.records import UNIVERSAL, ZERO, UploadRecord, UploadState
from ckptd.core.model.save import SealedSave
from ckptd.daemon.intake.clones import recover_holds, settle_holds
from ckptd.errors import SourceChanged
from ckptd.observe.audit import Audit
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local import clones
from tests.stores.scene import Node
from tests.support.states import job_state


def held(save_dir: Path, tag: str, number: int, step: int) -> None:
    """A hold of a checkpoint that the trainer has removed since."""
    node = Node(save_dir, tag=tag)
    node.write_all()
    sealed = node.sealed(step=step)
    place = save_dir / "_ckptd" / "hold"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{tag}.{number}.json").write_text(sealed.model_dump_json())
    (save_dir / tag).rename(place / f"{tag}.{number}")


def test_a_hold_of_what_is_written_while_it_is_cloned_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer saves again in place between two clones: some of each save would be held as one (P4)."""
    node = Node(tmp_path, tag="global_step5")
    node.write_all()
    save = node.sealed(step=5)
    place, first = tmp_path / "_ckptd" / "hold", tmp_path / "global_step5" / save.files[0].path
    is_written: list[bool] = []

    def clone(source: int, target: int) -> bool:
        os.write(target, os.pread(source, 1 << 20, 0))
        if not is_written:
            is_written.append(True)
            first.write_bytes(b"again")
        return True

    monkeypatch.setattr(extents, "clone_file", clone)
    with files.opened_dir(tmp_path) as fd, pytest.raises(SourceChanged):
        clones.make(fd, "global_step5", "global_step5.1", save.files, b"{}")
    assert is_written
    assert list(place.iterdir()) == []


def test_a_hold_keeps_the_empty_folders_of_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clone that is uploaded, and that a journal which is lost takes up, is the whole save."""
    node = Node(tmp_path, tag="global_step5")
    node.write_all()
    empty = ("offloaded_tensors/rank00", "offloaded_tensors/rank01")
    save = node.sealed(step=5).model_copy(update={"empty": empty})
    for path in empty:
        (tmp_path / "global_step5" / path).mkdir(parents=True)

    def clone(source: int, target: int) -> bool:
        os.write(target, os.pread(source, 1 << 20, 0))
        return True

    monkeypatch.setattr(extents, "clone_file", clone)
    place = tmp_path / "_ckptd" / "hold" / "global_step5.1"
    with files.opened_dir(tmp_path) as fd:
        clones.make(fd, save.tag, place.name, save.files, save.model_dump_json().encode(), save.empty)
        assert all((place / path).is_dir() for path in empty)
        shutil.rmtree(tmp_path / "global_step5")
        journal = Journal(tmp_path / "journal.db")
        state = job_state(journal)
        recover_holds(state, fd)
    assert [(row.held, row.save.empty) for row in state.saves.rows.values()] == [(True, empty)]
    journal.close()


def lines(state_dir: Path) -> list[tuple[str, str, list[str]]]:
    """What audit.jsonl says of holds that went: tag, reason, keys of COMMITs."""
    try:
        texts = (state_dir / "audit.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [json.loads(text) for text in texts]
    assert {(row["action"], row["form"]) for row in rows} <= {("release-hold", "hold")}
    return [(row["tag"], row["reason"], [key for key, _ in row["commits"]]) for row in rows]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_hold_that_cannot_be_renamed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The other hold is taken up, status says why, and once the disk lets it be this one is as well."""
    held(tmp_path, "global_step5", 7, 5)
    held(tmp_path, "global_step6", 9, 6)
    journal = Journal(tmp_path / "journal.db")
    state = job_state(journal)
    write = files.write_atomic

    def refusing(dir_fd: int, name: str, data: bytes) -> None:
        if name == "global_step5.1.json":
            raise OSError(code, os.strerror(code))
        write(dir_fd, name, data)

    with files.opened_dir(tmp_path) as fd:
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_atomic", refusing)
            recover_holds(state, fd)
            settle_holds(state, fd)
            assert [row.save.tag for row in state.saves.rows.values() if row.held] == ["global_step6"]
            assert state.holds.stray == {"global_step5.7": ""}
            assert list(state.failures.all()) == ["settling _ckptd/hold/global_step5.7"]
            assert (tmp_path / "_ckptd" / "hold" / "global_step5.7").is_dir()
        settle_holds(state, fd)
    assert sorted(row.save.tag for row in state.saves.rows.values() if row.held) == [
        "global_step5",
        "global_step6",
    ]
    assert not state.holds.stray
    assert not state.failures.all()
    journal.close()


REQUIRED = ("nas", "cloud")
COMMITTED = [
    pytest.param((), False, id="nowhere"),
    pytest.param((("nas", ZERO), ("nas", UNIVERSAL), ("cloud", UNIVERSAL), ("spare", ZERO)), False, id="one"),
    pytest.param((("nas", ZERO), ("cloud", ZERO)), True, id="all"),
]


@pytest.mark.parametrize(("committed", "is_done"), COMMITTED)
def test_what_a_hold_that_failed_leaves(
    tmp_path: Path, committed: tuple[tuple[str, str], ...], is_done: bool
) -> None:
    """Its word goes at the next look; clones only once their save is committed wherever it must be: they may
    be the last copy.
    """
    held(tmp_path, "global_step5", 1, 5)
    place = tmp_path / "_ckptd" / "hold"
    save = SealedSave.model_validate_json((place / "global_step5.1.json").read_text())
    journal = Journal(tmp_path / "journal.db")
    audit = Audit(tmp_path / "audit.jsonl")
    state = job_state(journal, required=REQUIRED, audit=audit)
    save_id = journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    for remote, form in committed:
        record = UploadRecord(remote=remote, form=form, state=UploadState.COMMITTED)
        state.uploads.put(save_id, record.model_copy(update={"commit_key": f"{remote} {form}"}))
    state.holds.failed.add(save_id)
    state.saves.busy[save_id] += 1
    with files.opened_dir(tmp_path) as fd:
        settle_holds(state, fd)
        assert sorted(os.listdir(place)) == ["global_step5.1", "global_step5.1.json"]  # another attempt is on
        state.saves.busy[save_id] -= 1
        settle_holds(state, fd)
        assert bool(os.listdir(place)) != is_done
        shutil.rmtree(place / "global_step5.1", ignore_errors=True)
        settle_holds(state, fd)
    assert not os.listdir(place)
    assert not state.holds.failed
    assert lines(tmp_path) == ([("global_step5", "committed", ["nas zero", "cloud zero"])] if is_done else [])
    journal.close()


@pytest.mark.parametrize(("committed", "is_done"), COMMITTED)
@pytest.mark.parametrize("number", [1, 7])
def test_a_hold_of_which_a_restart_finds_no_note(
    tmp_path: Path, committed: tuple[tuple[str, str], ...], is_done: bool, number: int
) -> None:
    """Made and not noted (1), or of a journal that is lost (7): likewise."""
    held(tmp_path, "global_step5", number, 5)
    place = tmp_path / "_ckptd" / "hold"
    save = SealedSave.model_validate_json((place / f"global_step5.{number}.json").read_text())
    journal = Journal(tmp_path / "journal.db")
    audit = Audit(tmp_path / "audit.jsonl")
    state = job_state(journal, required=REQUIRED, audit=audit)
    save_id = journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    for remote, form in committed:
        record = UploadRecord(remote=remote, form=form, state=UploadState.COMMITTED)
        state.uploads.put(save_id, record.model_copy(update={"commit_key": f"{remote} {form}"}))
    with files.opened_dir(tmp_path) as fd:
        recover_holds(state, fd)
        settle_holds(state, fd)
    assert state.saves.rows[save_id].held != is_done
    assert sorted(os.listdir(place)) == ([] if is_done else ["global_step5.1", "global_step5.1.json"])
    told = [(tag, reason.partition(";")[0], commits) for tag, reason, commits in lines(tmp_path)]
    assert told == ([("global_step5", "committed", ["nas zero", "cloud zero"])] if is_done else [])
    journal.close()


def test_a_hold_takes_the_name_of_what_described_none(tmp_path: Path) -> None:
    """A description without its hold goes first: the only copy of a checkpoint may be given that name."""
    held(tmp_path, "global_step5", 1, 5)
    place = tmp_path / "_ckptd" / "hold"
    shutil.copy(place / "global_step5.1.json", place / "global_step5.2.json")
    other = Node(tmp_path, tag="global_step9")
    other.write_all()
    journal = Journal(tmp_path / "journal.db")
    state = job_state(journal)
    journal.add_save(other.sealed(step=9), found_first=False, adopted=True, seen_at=0.0)
    state.load()
    with files.opened_dir(tmp_path) as fd:
        recover_holds(state, fd)
    assert sorted(os.listdir(place)) == ["global_step5.2", "global_step5.2.json"]
    assert [row.save.tag for row in state.saves.rows.values() if row.held] == ["global_step5"]
    journal.close()


@pytest.mark.parametrize("why", ["held twice", "pruned"])
def test_a_hold_that_nobody_needs_goes_with_a_line(tmp_path: Path, why: str) -> None:
    """Of a journal that is lost, and of a save that this one has or let go; half of one has no line."""
    held(tmp_path, "global_step5", 7, 5)
    place = tmp_path / "_ckptd" / "hold"
    save = SealedSave.model_validate_json((place / "global_step5.7.json").read_text())
    journal = Journal(tmp_path / "journal.db")
    state = job_state(journal, audit=Audit(tmp_path / "audit.jsonl"))
    save_id = journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    shutil.copytree(place / "global_step5.7", place / "global_step5.1.partial")
    if why == "held twice":
        journal.set_held(save_id, held=True)
        shutil.copytree(place / "global_step5.7", place / "global_step5.1")
        shutil.copy(place / "global_step5.7.json", place / "global_step5.1.json")
    else:
        journal.end_save(save_id, "pruned")
    state.load()
    with files.opened_dir(tmp_path) as fd:
        recover_holds(state, fd)
    assert sorted(os.listdir(place)) == (
        ["global_step5.1", "global_step5.1.json"] if why == "held twice" else []
    )
    assert lines(tmp_path) == [("global_step5", f"{why}; of a journal that is lost", [])]
    journal.close()


@pytest.mark.parametrize("how", ["failed", "found", "lost"])
def test_a_hold_stays_where_its_line_cannot_be_written(tmp_path: Path, how: str) -> None:
    """A full disk: what went without a line would be told of by nothing."""
    held(tmp_path, "global_step5", 7 if how == "lost" else 1, 5)
    (place,) = (tmp_path / "_ckptd" / "hold").glob("*.json")
    save = SealedSave.model_validate_json(place.read_text())
    journal = Journal(tmp_path / "journal.db")
    (tmp_path / "audit.jsonl").mkdir()
    audit = Audit(tmp_path / "audit.jsonl")
    state = job_state(journal, required=("nas",), audit=audit)
    save_id = journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    state.uploads.put(save_id, UploadRecord(remote="nas", form=ZERO, state=UploadState.COMMITTED))
    with files.opened_dir(tmp_path) as fd:
        if how == "failed":
            state.holds.failed.add(save_id)
            settle_holds(state, fd)
        else:
            recover_holds(state, fd)
        assert place.with_suffix("").is_dir()
        assert list(state.failures.all()) == [f"settling _ckptd/hold/{place.stem}"]
        (tmp_path / "audit.jsonl").rmdir()
        settle_holds(state, fd)
    assert not place.with_suffix("").exists()
    assert len(lines(tmp_path)) == 1
    journal.close()
