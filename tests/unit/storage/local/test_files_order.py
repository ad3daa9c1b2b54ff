"""What is flushed before what: a file, then its name, then the folder; aside before anything goes (P7)."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base import files
from ckptd.storage.local import fs
from tests.unit.storage.local.test_local_prune import permit_for, prune, save_dir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["save_dir"]


class Calls:
    """Calls that change names, and flushes, in order: (what, inode of the file or folder)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        for name in ("rename", "link", "unlink", "fsync"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))
        real = files.rename_noreplace
        monkeypatch.setattr(files, "rename_noreplace", self._aside(real))

    def _noting(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **more: Any) -> None:
            fd = arguments[0] if name == "fsync" else more.get("dst_dir_fd", more.get("dir_fd"))
            real(*arguments, **more)
            if isinstance(fd, int):
                self.made.append((name, os.fstat(fd).st_ino))

        return call

    def _aside(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(source_fd: int, source: str, target_fd: int, target: str) -> None:
            real(source_fd, source, target_fd, target)
            self.made.append(("aside", os.fstat(source_fd).st_ino))

        return call


@pytest.mark.parametrize("create", [files.write_atomic, files.create_exclusive])
def test_a_name_is_durable_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Callable[..., object]
) -> None:
    """The bytes, then the name, then the folder that holds the name."""
    calls, folder = Calls(monkeypatch), tmp_path.stat().st_ino
    with files.opened_dir(tmp_path) as fd:
        create(fd, "latest", b"global_step1")
    made = [call for call in calls.made if call[0] != "unlink"]
    assert [what for what, _ in made] == ["fsync", made[1][0], "fsync"]
    assert made[1:] == [(made[1][0], folder), ("fsync", folder)]
    assert made[0][1] == (tmp_path / "latest").stat().st_ino


def test_nothing_is_removed_before_it_lies_aside_for_good(
    save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not give back half a checkpoint under its tag."""
    permit, calls = permit_for(save_dir), Calls(monkeypatch)
    prune(save_dir, permit)
    top, trash = save_dir.stat().st_ino, (save_dir / fs.TRASH).stat().st_ino
    what = [name for name, _ in calls.made]
    between = calls.made[what.index("aside") : what.index("unlink")]
    assert {("fsync", top), ("fsync", trash)} <= set(between)
    assert calls.made[-1] == ("fsync", trash), "and it is gone for good when that is told"


@pytest.mark.parametrize("create", [files.write_atomic, files.create_exclusive])
def test_a_flush_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Callable[..., object]
) -> None:
    """The kernel drops the pages and says so once: a second fsync would call them written."""
    real, failures = os.fsync, [OSError(errno.EIO, "Input/output error")]

    def fsync(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with files.opened_dir(tmp_path) as fd, pytest.raises(OSError, match="Input/output"):
        create(fd, "latest", b"global_step1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_folder_that_a_disk_refuses_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """A descriptor that stays open keeps its lock: no conversion into that place until the next start."""
    (tmp_path / "a").mkdir()
    real, calls = os.fstat, 0

    def fstat(fd: int) -> os.stat_result:
        nonlocal calls
        calls += 1
        if calls == refused:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd)

    before = sorted(os.listdir("/proc/self/fd"))
    with files.opened_dir(tmp_path) as fd:
        monkeypatch.setattr(os, "fstat", fstat)
        with pytest.raises(OSError, match="Stale"):
            files.open_dir_beneath(fd, "a")
        monkeypatch.undo()
    assert sorted(os.listdir("/proc/self/fd")) == before
