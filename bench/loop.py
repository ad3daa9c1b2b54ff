"""File systems in an image on a loop device with direct I/O, for benchmarks; needs root.

XFS shares extents. The ext4 has a journal, as on most nodes: without one every flush writes its inode, and
each new file looks at all that were deleted within minutes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_MAKE = {
    "xfs": ("mkfs.xfs", "-q", "-f", "-m", "reflink=1", "-l", "size=64m"),
    "ext4": ("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
}


def available(kind: str = "xfs") -> bool:
    """Tell whether this process may make and mount one."""
    return os.geteuid() == 0 and shutil.which(_MAKE[kind][0]) is not None


@contextlib.contextmanager
def mounted(work: Path, size_bytes: int, kind: str = "xfs") -> Iterator[Path]:
    """Make an image in `work`, mount what is in it on `work`/`kind`, take both away at the end.

    Raises:
        CalledProcessError: it could not be made or mounted.
    """
    work.mkdir(parents=True, exist_ok=True)
    image = work / f"{kind}.image"
    with image.open("wb") as out:
        out.truncate(size_bytes + -size_bytes % 4096)  # a device has whole blocks
    try:
        with attached(image, work / kind, kind) as place:
            yield place
        place.rmdir()
    finally:
        image.unlink()


@contextlib.contextmanager
def attached(image: Path, place: Path, kind: str) -> Iterator[Path]:
    """Make a file system in `image` and mount it on the folder `place`, until the end.

    Raises:
        CalledProcessError: it could not be made or mounted.
    """
    place.mkdir(parents=True, exist_ok=True)
    command = ["losetup", "--show", "--direct-io=on", "-f", str(image)]
    device = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    try:
        subprocess.run([*_MAKE[kind], device], check=True)
        subprocess.run(["mount", device, str(place)], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)  # as soon as nobody has it mounted
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
