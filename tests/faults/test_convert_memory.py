"""P12 proved by the kernel: a conversion lives in a memory cgroup of 64 MiB, its dirty pages counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import sparse
from tests.support import cgroup
from tests.support.real import REPOSITORY

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(cgroup.why_not() is not None, reason=str(cgroup.why_not())),
]
MIB = 1 << 20
SHAPES = {"wide": (4096, 8192), "narrow": (3000, 4096), **{f"norm{i}": (4096,) for i in range(40)}}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("limit_mib", [64, 512])
def test_a_conversion_lives_within_its_budget(tmp_path: Path, stage: int, limit_mib: int) -> None:
    """Half a gigabyte, one parameter of 128 MiB in pieces of 2 MiB: dirty pages are bounded per file.

    Under 64 MiB the kernel would kill who needs more; under 512 MiB it reclaims nothing, so that what is
    dirty is what we let be dirty.
    """
    sparse.write(tmp_path / "in", sparse.Model("m", SHAPES, stage, 64))
    command = [sys.executable, "-m", "ckptd", "convert", str(tmp_path / "in"), str(tmp_path / "u")]
    done = cgroup.run_confined(
        [*command, "--memory-budget", "64MiB", "--json"], limit_mib * MIB, cwd=REPOSITORY, timeout=120
    )
    assert (done.status, done.killed) == (0, 0), done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["bytes"] > 500 * MIB
    assert report["peak_rss_bytes"] < 48 * MIB
    assert done.peak_anonymous_bytes < 48 * MIB
    assert done.peak_dirty_bytes < 24 * MIB
