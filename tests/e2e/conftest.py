"""Fixture of the end-to-end tests: an XFS that clones."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "not root: cannot mount a loop device"
    missing = [tool for tool in ("mkfs.xfs", "mount", "losetup") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    why = _why_not()
    if why:
        pytest.skip(why)
    image, mounted = tmp_path / "image", tmp_path / "xfs"
    with image.open("wb") as out:
        out.truncate(512 << 20)
    mounted.mkdir()
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a loop device here: {done.stderr.decode().strip()}")
    try:
        yield mounted
    finally:
        # lazily: once in a while the run itself still has something of it open (what, was not found)
        subprocess.run(["umount", "-l", str(mounted)], check=True)
