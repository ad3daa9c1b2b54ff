"""Half a checkpoint in the trash never comes back; what is not ours there stays and is told (adr/0153)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.core.model.records import UploadState
from ckptd.core.model.save import SealedFile
from ckptd.errors import StorageError
from ckptd.storage.local import fs
from ckptd.storage.local.fs import is_as_sealed
from tests.unit.core.model.test_prune_taken_back import Killed, killed, permit_files, taken
from tests.unit.storage.local.test_local_prune import NAMES, TAG, permit_for, prune, save_dir

__all__ = ["killed", "save_dir"]


def half(killed: Killed) -> Path:
    """The removal took its first file before the daemon was killed."""
    [name] = killed.trash
    folder = killed.save_dir / fs.TRASH / name
    (folder / NAMES[0]).unlink()
    return folder


def is_open(killed: Killed) -> bool:
    """Its intent stands, nothing of it is in the trainer's inventory, and status says so."""
    said = killed.state.failures.all().get(f"deleting {TAG}")
    assert not (killed.save_dir / TAG).exists()
    is_told = said is not None and "by hand" in said.hint and fs.TRASH in said.text
    return is_told and len(killed.state.journal.open_deletions()) == 1


def test_what_has_another_mode_since_is_still_ours(killed: Killed) -> None:
    """chmod -R, chown -R: the rest goes at the first start, and nothing is left for the second."""
    folder = half(killed)
    for path in (folder / name for name in NAMES[1:]):
        path.chmod(0o600)
    killed.start()
    assert killed.trash == []
    assert killed.state.saves.rows[killed.save_id].state == "pruned"
    killed.start()
    assert not (killed.save_dir / TAG).exists()


def _write(folder: Path, name: str = NAMES[1]) -> str:
    (folder / name).write_text("of another save")
    return name


def _replace(folder: Path) -> str:
    before = (folder / NAMES[1]).stat()
    (folder / NAMES[1]).rename(folder.parent.parent / "old")
    (folder / NAMES[1]).write_text(NAMES[1])
    os.utime(folder / NAMES[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    return NAMES[1]


def _link(folder: Path) -> str:
    (folder / NAMES[1]).unlink()
    (folder / NAMES[1]).symlink_to("/etc")
    return NAMES[1]


def _add(folder: Path) -> str:
    (folder / "notes.txt").write_text("mine")
    return "notes.txt"


@pytest.mark.parametrize("change", [_write, _replace, _link, _add])
def test_what_is_not_ours_stays_there_and_is_told(
    killed: Killed, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], str]
) -> None:
    """However often the daemon starts; it ends when a person has looked."""
    folder = half(killed)
    stays = change(folder)
    for _ in range(2):
        killed.start()
        assert is_open(killed)
        assert [p.name for p in folder.iterdir()] == [stays], "what was sealed is gone"
    killed.later(monkeypatch)
    assert is_open(killed)
    assert killed.pruner.seconds_to_tidy is not None
    folder.rename(killed.save_dir / "looked at")
    killed.later(monkeypatch)
    assert killed.state.journal.open_deletions() == []
    assert killed.state.saves.rows[killed.save_id].state == "pruned"
    killed.start()
    assert not (killed.save_dir / TAG).exists()


def test_of_what_is_whole_nothing_goes_where_a_file_is_not_ours(
    killed: Killed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name is taken and its COMMIT is there: half of it would be left beside a file of somebody's."""
    [name] = killed.trash
    folder = killed.save_dir / fs.TRASH / name
    _write(folder, NAMES[0])
    killed.put(UploadState.COMMITTED)
    killed.state.deletions.observed.add("nas")
    with taken(killed.save_dir):
        killed.start()
        killed.later(monkeypatch)
        assert all((folder / one).exists() for one in NAMES)
        assert len(killed.state.journal.open_deletions()) == 1
        assert killed.state.deletions.interrupted
        assert f"{NAMES[0]} in {fs.TRASH}/{name} is not the file that was committed" in caplog.text


def test_a_file_that_comes_while_it_goes_keeps_the_intent_open(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stands in that folder writes there: the removal is not called done."""
    remove = files.remove_file

    def writing(dir_fd: int, name: str) -> None:
        remove(dir_fd, name)
        (save_dir / fs.TRASH / "aside" / "late.txt").write_text("late")

    monkeypatch.setattr(files, "remove_file", writing)
    with pytest.raises(StorageError, match=r"late\.txt"):
        prune(save_dir, permit_for(save_dir))
    assert [p.name for p in (save_dir / fs.TRASH / "aside").iterdir()] == ["late.txt"]


def test_an_empty_folder_that_nobody_listed_goes_too(save_dir: Path) -> None:
    (save_dir / TAG / "configs" / "more").mkdir()
    prune(save_dir, permit_for(save_dir))
    assert list((save_dir / fs.TRASH).iterdir()) == []


@pytest.mark.parametrize(
    ("field", "is_ours"),
    [("dev", True), ("ctime_ns", True), ("ino", False), ("size_bytes", False), ("mtime_ns", False)],
)
def test_what_tells_in_the_trash(killed: Killed, field: str, is_ours: bool) -> None:
    """A disk has another number after a boot, chown sets ctime; what is written has another mtime."""
    [name] = killed.trash
    sealed: SealedFile = permit_files(killed)[0]
    other = replace(sealed.identity, **{field: getattr(sealed.identity, field) + 1})
    with files.opened_dir(killed.save_dir / fs.TRASH / name) as folder:
        assert is_as_sealed(folder, sealed)
        assert is_as_sealed(folder, sealed.model_copy(update={"identity": other})) == is_ours
