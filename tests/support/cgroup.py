"""A memory cgroup (version 1) around one command: processes, page cache and dirty pages count together.

It exists because a promise about memory is only proved where the kernel kills whoever breaks it. Needs
root and the memory controller mounted at /sys/fs/cgroup/memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, slots=True)
class Confined:
    """How a command ended inside its limit; `peak_bytes` is the cgroup's own high-water mark."""

    status: int
    seconds: float
    peak_bytes: int
    peak_anonymous_bytes: int
    peak_dirty_bytes: int
    """Dirty pages and pages being written back, sampled every 10 ms."""
    killed: int
    """Processes that the kernel killed for want of memory."""
    stdout: str
    stderr: str


def why_not() -> str | None:
    """Why there is no memory cgroup to be had here; None when there is."""
    if os.geteuid() != 0:
        return "a memory cgroup needs root"
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        return f"no cgroup version 1 memory controller at {CONTROLLER}"
    return None


@contextlib.contextmanager
def group(limit_bytes: int) -> Iterator[Path]:
    """A new cgroup's folder; whoever goes in (`cgroup.procs`) must have ended before it is left."""
    made = CONTROLLER / f"ckptd-test-{os.getpid()}-{time.monotonic_ns()}"
    made.mkdir()
    try:
        (made / "memory.limit_in_bytes").write_text(str(limit_bytes))
        (made / "memory.swappiness").write_text("0")
        yield made
    finally:
        _remove(made)


def _remove(group: Path) -> None:
    """Busy while a grandchild that was killed is on its way out."""
    end = time.monotonic() + 200
    while True:
        try:
            (group / "memory.force_empty").write_text("0")
            group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


def run_confined(command: Sequence[str], limit_bytes: int, *, cwd: Path, timeout: float = 500.0) -> Confined:
    """Run `command` with all its children under `limit_bytes`."""
    with group(limit_bytes) as inside_of:
        started = time.monotonic()
        inside = ["sh", "-c", f'echo $$ > {inside_of}/cgroup.procs && exec "$@"', "sh", *command]
        with subprocess.Popen(
            inside, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            watcher = Watcher(inside_of)
            try:
                stdout, stderr = child.communicate(timeout=timeout)
            finally:
                child.kill()
                watcher.stop()
        seconds = time.monotonic() - started
        killed = dict(line.split() for line in (inside_of / "memory.oom_control").read_text().splitlines())
        return Confined(
            child.returncode,
            seconds,
            int((inside_of / "memory.max_usage_in_bytes").read_text()),
            watcher.peak_bytes,
            watcher.peak_dirty_bytes,
            int(killed.get("oom_kill", 0)),
            stdout,
            stderr,
        )


class Watcher:
    """Samples the anonymous memory and the dirty pages of a cgroup."""

    def __init__(self, group: Path) -> None:
        import threading

        self.peak_bytes = self.peak_dirty_bytes = 0
        self._group = group
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            stat = dict(line.split() for line in (self._group / "memory.stat").read_text().splitlines())
            self.peak_bytes = max(self.peak_bytes, int(stat["total_rss"]))
            dirty = int(stat["total_dirty"]) + int(stat["total_writeback"])
            self.peak_dirty_bytes = max(self.peak_dirty_bytes, dirty)
