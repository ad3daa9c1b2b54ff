"""A disk that loses what it took: whoever waits for a part of a file to be written says so (P7).

The kernel tells it once for each open file, whichever call waits first: a later fsync would say nothing.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from ckptd.base import extents
from ckptd.conversion.engine.writer import Dirty
from ckptd.storage.stores.directory import DirectoryStore
from tests.faults.test_daemon_ground import mount, umount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.faults
MIB = 1 << 20
SIZE_BYTES = 96 * MIB


@pytest.fixture
def thin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk that takes a few MiB, loses some, and takes all again: a thin volume that is extended."""
    pool, place = tmp_path / "pool", tmp_path / "disk"
    flush_range, full = extents.flush_range, list[bool]()

    def flush_and_extend(fd: int, offset: int, length: int) -> None:
        try:
            flush_range(fd, offset, length)
        finally:
            full.append(os.statvfs(pool).f_bavail == 0)
            # the second: of a write that it takes a part of, a loop device says that it took all
            if sum(full) == 2:
                mount("-o", "remount,size=400m", pool)

    monkeypatch.setattr(extents, "flush_range", flush_and_extend)
    pool.mkdir()
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", pool)
    try:
        with (pool / "image").open("wb") as file:
            file.truncate(256 * MIB)
        made = ("mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(pool / "image"))
        subprocess.run(made, check=True)
        mount("-o", "loop", pool / "image", place)
        try:
            yield place
        finally:
            umount(place)
    finally:
        umount(pool)


def converted(fd: int, _nas: Path) -> None:
    """As the executor writes what may not fill the page cache."""
    dirty = Dirty(fd, 16 * MIB)
    for end in range(MIB, SIZE_BYTES + 1, MIB):
        extents.write_at(fd, bytes(MIB), end - MIB)
        dirty.wrote(end, MIB)


def restored(fd: int, nas: Path) -> None:
    """As a restore writes a range of an object."""
    (nas / "shard").write_bytes(bytes(SIZE_BYTES))
    DirectoryStore(str(nas), owner="n0").write_range("shard", 0, SIZE_BYTES, fd, lambda _: None)


@pytest.mark.parametrize("write", [converted, restored])
def test_what_a_disk_lost_is_told_by_whoever_waits_for_it(
    thin: Path, write: Callable[[int, Path], None]
) -> None:
    (nas := thin.parent / "nas").mkdir()
    with (thin / "file").open("wb") as file, pytest.raises(OSError, match=r"No space|Input/output"):
        write(file.fileno(), nas)
        os.fsync(file.fileno())
        pytest.fail("nobody said that bytes are lost")
