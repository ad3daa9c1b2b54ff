"""A loop-mounted XFS with reflinks in a sparse image: what cloning is measured on; needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def available() -> bool:
    """True when this process may make and mount one."""
    return os.geteuid() == 0 and shutil.which("mkfs.xfs") is not None


@contextlib.contextmanager
def mounted(work: Path, size_bytes: int) -> Iterator[Path]:
    """Make `work`/xfs.image, mount it on `work`/xfs, take both away at the end.

    Raises:
        CalledProcessError: it could not be made or mounted.
    """
    work.mkdir(parents=True, exist_ok=True)
    image, place = work / "xfs.image", work / "xfs"
    place.mkdir(exist_ok=True)
    with image.open("wb") as out:
        out.truncate(size_bytes)
    try:
        subprocess.run(["mkfs.xfs", "-q", "-f", "-m", "reflink=1", "-l", "size=64m", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)
    finally:
        image.unlink()
        place.rmdir()
