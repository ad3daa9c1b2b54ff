"""Serve disk images with a volatile write cache, so that the power of a file system can be cut.

`python -m tests.vm.disks MOUNTPOINT SEED TORN IMAGE...` mounts a FUSE folder in which MOUNTPOINT/NAME is
IMAGE. A loop device over it passes the flushes of its file system on; what no flush covered yet stays in
memory. The line `cut` on standard input is the power cut of all images at one moment: each 4 KiB block that
no flush covered is kept or lost by itself, in any version that it had since, the share TORN of them torn at a
sector. From then on every call fails with EIO and the images are what the disks held; a line of JSON says
what was lost.
"""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mfusepy

BLOCK_BYTES = 4096
SECTOR_BYTES = 512


@dataclass(slots=True)
class Lost:
    """Unflushed blocks at a cut."""

    lost: int = 0
    kept: int = 0
    torn: int = 0


class Disk:
    """An image and the blocks that no flush covered: number → versions since the last one."""

    def __init__(self, image: Path) -> None:
        self._fd = os.open(image, os.O_RDWR)
        self.size_bytes = os.fstat(self._fd).st_size
        self._pending: dict[int, list[bytes]] = {}

    def _held(self, number: int) -> bytes:
        return os.pread(self._fd, BLOCK_BYTES, number * BLOCK_BYTES)

    def _block(self, number: int) -> bytes:
        versions = self._pending.get(number)
        return versions[-1] if versions else self._held(number)

    def read(self, offset: int, size: int) -> bytes:
        """Return what was written last."""
        end = min(offset + size, self.size_bytes)
        if end <= offset:
            return b""
        first, last = offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        data = b"".join(self._block(number) for number in range(first, last + 1))
        return data[offset - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def write(self, offset: int, data: bytes) -> None:
        """Take data into the cache."""
        at = 0
        while at < len(data):
            number, begin = divmod(offset + at, BLOCK_BYTES)
            piece = data[at : at + BLOCK_BYTES - begin]
            if len(piece) < BLOCK_BYTES:
                old = self._block(number)
                block = old[:begin] + piece + old[begin + len(piece) :]
            else:
                block = piece
            self._pending.setdefault(number, []).append(block)
            at += len(piece)

    def flush(self) -> None:
        """Make everything durable that was written before."""
        for number, versions in self._pending.items():
            os.pwrite(self._fd, versions[-1], number * BLOCK_BYTES)
        self._pending.clear()

    def cut(self, rng: random.Random, torn: float) -> Lost:
        """Lose a random subset of what no flush covered."""
        found = Lost()
        share = rng.choice((0.0, 0.0, 0.3, 0.5, 0.7, 1.0, rng.random()))
        for number, versions in sorted(self._pending.items()):
            if rng.random() >= share:
                found.lost += 1
                continue
            block = rng.choice(versions)
            if rng.random() < torn:
                at = SECTOR_BYTES * rng.randrange(1, BLOCK_BYTES // SECTOR_BYTES)
                block = block[:at] + self._held(number)[at:]
                found.torn += 1
            os.pwrite(self._fd, block, number * BLOCK_BYTES)
            found.kept += 1
        self._pending.clear()
        return found


class Folder(mfusepy.Operations):  # type: ignore[misc]
    """The disks as files of a FUSE folder; libfuse calls from one thread, the cut comes from another."""

    use_ns = True

    def __init__(self, images: list[Path], seed: int, torn: float) -> None:
        self._disks = {f"/{image.name}": Disk(image) for image in images}
        self._rng, self._torn = random.Random(seed), torn
        self._lock = threading.Lock()
        self._has_power = True

    def init(self, path: str) -> None:
        """Say that it is mounted."""
        print("ready", flush=True)

    def cut(self) -> Lost:
        """Cut the power of all disks at once."""
        with self._lock:
            self._has_power = False
            each = [disk.cut(self._rng, self._torn) for disk in self._disks.values()]
        return Lost(*(sum(getattr(one, name) for one in each) for name in ("lost", "kept", "torn")))

    def _disk(self, path: str) -> Disk:
        if not self._has_power:
            raise mfusepy.FuseOSError(errno.EIO)
        return self._disks[path]

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return size and kind."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path not in self._disks:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": self._disks[path].size_bytes}

    def readdir(self, path: str, fh: int) -> list[str]:
        """List the disks."""
        return [".", "..", *(name[1:] for name in self._disks)]

    def open(self, path: str, flags: int) -> int:
        """Accept an open."""
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read from a disk."""
        with self._lock:
            return self._disk(path).read(offset, size)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Write to a disk's cache."""
        with self._lock:
            self._disk(path).write(offset, data)
        return len(data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """Flush a disk's cache."""
        with self._lock:
            self._disk(path).flush()
        return 0

    def destroy(self, path: str) -> None:
        """Write what is in the caches: an orderly end without a cut."""
        if self._has_power:
            for disk in self._disks.values():
                disk.flush()


def _obey(folder: Folder) -> None:
    for line in sys.stdin:
        if line == "cut\n":
            print(json.dumps(asdict(folder.cut())), flush=True)


def main(mountpoint: str, seed: str, torn: str, *images: str) -> None:
    """Serve until unmounted."""
    folder = Folder([Path(image) for image in images], int(seed), float(torn))
    threading.Thread(target=_obey, args=(folder,), daemon=True).start()
    mfusepy.FUSE(folder, mountpoint, foreground=True, nothreads=True, allow_other=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
