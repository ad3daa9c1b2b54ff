"""A real node whose tasks wait for memory: the daemon's conversions rest, then go on (P11; adr/0223)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ckptd.daemon.resources.memory_pressure import FILE, STALLED_PERCENT
from tests.e2e.harness import RUN, made_before, node
from tests.support import cgroup

pytestmark = [pytest.mark.real, pytest.mark.faults]

real_saves = made_before(RUN)

MIB = 1 << 20
READS = """
import os, random, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
while True:
    os.pread(fd, 1 << 20, random.randrange(400) << 20)
"""
"""A trainer with half of the page cache that it needs: it reads again what it has just lost."""


def stalled_percent() -> float:
    """Share of the last ten seconds in which a task of this machine waited for memory."""
    return float(FILE.read_text().split()[1].partition("=")[2])


@pytest.fixture
def thrash(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    reason = cgroup.why_not() or (None if FILE.exists() else "this kernel tells no pressure")
    if reason:
        pytest.skip(reason)
    data = tmp_path / "data.bin"
    with data.open("wb") as out:
        for _ in range(400):
            out.write(os.urandom(MIB))
        os.fsync(out.fileno())
    with cgroup.group(128 * MIB) as group:
        words = [sys.executable, "-c", READS, str(data)]
        inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]
        with subprocess.Popen(inside) as reader:
            try:
                yield reader
            finally:
                reader.kill()


def test_conversions_rest_while_somebody_waits_for_memory(
    tmp_path: Path, thrash: subprocess.Popen[bytes]
) -> None:
    with node(tmp_path) as here:
        here.wait("a machine short of memory", lambda: stalled_percent() > STALLED_PERCENT + 2)
        here.start()
        here.save(1)
        here.wait("the log to say so", lambda: "waited for memory" in here.log.read_text())
        daemon = psutil.Process(here.processes[-1].pid)

        def is_stopped() -> bool:
            return any(one.status() == psutil.STATUS_STOPPED for one in daemon.children())

        here.wait("a conversion that rests", is_stopped)
        assert not (here.save_dir / "latest_universal").is_symlink()
        thrash.kill()
        began = time.monotonic()
        here.wait("the universal form", (here.save_dir / "latest_universal").exists)
        assert time.monotonic() - began < 60
