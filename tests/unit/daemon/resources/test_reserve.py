"""A few MiB for the moment when the disk is full: made above the line alone, let go when needed (P13)."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from ckptd.core.policy.view import Disk
from ckptd.daemon.resources.reserve import BYTES, NAME, Reserve
from ckptd.daemon.state.problems import Problems
from ckptd.errors import JournalDamaged, JournalFailed, NoSpaceError, StorageError
from ckptd.storage.journal.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
MIB = 1 << 20


class Scene:
    """A save_dir with its state in it."""

    def __init__(self, save_dir: Path) -> None:
        self.save_dir = save_dir
        self.state = save_dir / "_ckptd" / "state"
        self.state.mkdir(parents=True)
        self.file = self.state / NAME
        self.problems = Problems()
        self.reserve = Reserve(self.problems, save_dir)

    def keep(self, line_bytes: int = 0) -> None:
        """As at a turn a while later."""
        self.reserve._look_at_seconds = 0.0
        fd = os.open(self.save_dir, os.O_RDONLY)
        try:
            status = os.fstatvfs(fd)
            free = status.f_bavail * status.f_frsize
            disk = Disk(free_bytes=free, reserve_bytes=line_bytes, min_free_bytes=0, can_clone=False)
            self.reserve.keep(self.state, fd, disk)
        finally:
            os.close(fd)

    def fill(self, name: str = "filler") -> Path:
        """Until nothing more fits."""
        path = self.save_dir / name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for size in (MIB, 4096):
                try:
                    while True:
                        os.write(fd, b"x" * size)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
        finally:
            os.close(fd)
        return path

    def codes(self) -> set[str]:
        return {problem.code for problem in self.problems.all()}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Scene]:
    """On a disk of 20 MiB."""
    point = tmp_path / "nvme"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(point)], check=True)
    try:
        yield Scene(point)
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def test_it_is_allocated_once_and_never_grows(scene: Scene) -> None:
    scene.keep()
    first = scene.file.stat()
    assert (first.st_size, first.st_mode & 0o777) == (BYTES, 0o600)
    assert first.st_blocks * 512 >= BYTES
    scene.keep()
    assert scene.file.stat().st_ino == first.st_ino
    assert [path.name for path in scene.state.iterdir()] == [NAME]


def test_where_room_that_is_granted_is_not_kept_it_is_not_made_again_and_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ZFS answers: it would give nothing back, and each try costs two flushes."""
    asked: list[int] = []

    def grants(fd: int, offset: int, length: int) -> None:
        asked.append(length)
        os.ftruncate(fd, offset + length)

    monkeypatch.setattr(os, "posix_fallocate", grants)
    for _ in range(5):
        scene.keep()
    assert len(asked) == 1
    assert not scene.file.exists()


def test_it_is_made_only_above_the_line(scene: Scene) -> None:
    status = os.statvfs(scene.save_dir)
    scene.keep(line_bytes=status.f_bavail * status.f_frsize + BYTES)
    assert not scene.file.exists()


def test_a_state_on_another_disk_needs_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def elsewhere(fd: int) -> os.stat_result:
        status = list(real(fd))
        status[2] += os.readlink(f"/proc/self/fd/{fd}").endswith("state")
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", elsewhere)
    scene.keep()
    assert not scene.file.exists()


def test_what_lies_there_instead_goes_and_no_link_is_followed(scene: Scene, tmp_path: Path) -> None:
    """A link, a hole, a half that a crash left: none of it is a reserve."""
    other = tmp_path / "other"
    other.write_bytes(b"theirs")
    scene.file.symlink_to(other)
    assert not scene.reserve.release(scene.state)
    scene.keep()
    assert not scene.file.is_symlink()
    assert other.read_bytes() == b"theirs"
    for size in (BYTES, BYTES // 2):
        scene.file.unlink()
        with scene.file.open("wb") as stream:
            stream.truncate(size)
        scene.keep()
        assert scene.file.stat().st_blocks * 512 >= scene.file.stat().st_size == BYTES


def test_only_a_lack_of_room_lets_it_go(scene: Scene) -> None:
    scene.keep()
    for error in (StorageError("I/O error"), JournalFailed("I/O error"), JournalDamaged("no journal")):
        assert not scene.reserve.helps(error, scene.state)
    assert scene.file.exists()
    assert scene.codes() == set()
    assert scene.reserve.helps(NoSpaceError("full"), scene.state)
    assert not scene.file.exists()
    assert scene.codes() == {"disk-full"}
    assert not scene.reserve.helps(NoSpaceError("full"), scene.state), "there is but one"
    scene.keep()
    assert scene.file.exists()
    assert scene.codes() == set()


@needs_root
@pytest.mark.root
def test_a_journal_that_a_full_disk_refuses_goes_on_from_it(small: Scene) -> None:
    """SQLite says "full"; then an upload's and a prune's worth of rows is written, and it is made again."""
    small.keep()
    journal = Journal(small.state / "journal.db")
    filler = small.fill()
    with pytest.raises(JournalFailed) as found:
        for number in range(2000):
            journal.set_meta(f"key{number}", "v" * 4000)
    journal.close()
    assert small.reserve.helps(found.value, small.state)
    journal = Journal(small.state / "journal.db")
    for number in range(600):
        journal.set_meta(f"key{number}", "w" * 2000)
    small.keep()
    assert small.codes() == {"disk-full"}, "no room for it yet"
    filler.unlink()
    small.keep()
    assert small.file.exists()
    assert small.codes() == set()
    journal.close()


@needs_root
@pytest.mark.root
def test_what_the_trainer_takes_at_once_is_gone_and_said_as_before(small: Scene) -> None:
    small.keep()
    small.fill()
    assert small.reserve.release(small.state)
    small.fill()
    with pytest.raises(JournalFailed) as found:
        Journal(small.state / "journal.db")
    assert not small.reserve.helps(found.value, small.state)
    assert small.codes() == {"disk-full"}
