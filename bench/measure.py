"""Running one command and measuring it: wall, CPU, peak memory of its process tree, bytes written.

Memory is the sum of resident sets over the tree, sampled every 20 ms: pages that forked workers share are
counted once per process, for every tool alike. Page cache is set before a run and proved with mincore.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run; bytes written are those charged by the kernel (0 where extents are cloned)."""

    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    written_bytes: int
    read_bytes: int
    """Fetched from storage; what the page cache gave is not counted."""
    peak_disk_bytes: int
    """Largest size of what lay in the output's parent folder."""
    stdout: str


def measure(
    command: Sequence[str],
    *,
    cwd: Path,
    env: dict[str, str],
    flush: Path | None,
    limit_seconds: float | None = None,
) -> Run:
    """Run `command` and flush the file system of `flush`, if there is one; both count.

    Raises:
        RuntimeError: the command failed, or was ended at the limit.
    """
    started = time.monotonic()
    child = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watcher = Watcher(child.pid, flush)
    timer = threading.Timer(limit_seconds or threading.TIMEOUT_MAX, child.kill)
    timer.daemon = True
    timer.start()
    outputs = ["", ""]
    assert child.stdout is not None
    assert child.stderr is not None
    readers = [
        threading.Thread(target=lambda i=i, s=s: outputs.__setitem__(i, s.read()), daemon=True)
        for i, s in enumerate((child.stdout, child.stderr))
    ]
    for reader in readers:
        reader.start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    io = _io_of(child.pid)
    _, status, usage = os.wait4(child.pid, 0)
    timer.cancel()
    child.returncode = os.waitstatus_to_exitcode(status)
    if flush is not None:
        subprocess.run(["sync", "-f", str(flush)], check=True)
    wall = time.monotonic() - started
    for reader in readers:
        reader.join()
    watcher.stop()
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{outputs[0][-2000:]}\n{outputs[1][-4000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    disk = max(watcher.peak_disk_bytes, _disk(flush) if flush is not None else 0)
    return Run(wall, cpu, watcher.peak_bytes, io["write_bytes"], io["read_bytes"], disk, outputs[0])


def _io_of(pid: int) -> dict[str, int]:
    """The kernel's account of an ended process and of all its children that it waited for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _disk(folder: Path) -> int:
    """Bytes on disk below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


class Watcher:
    """Samples the resident sets of a process tree, and the size of a folder, until stopped."""

    def __init__(self, root: int, folder: Path | None = None) -> None:
        self.root = root
        self.folder = folder
        self.peak_bytes = self.peak_disk_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            if self._done.wait(SAMPLE_SECONDS):
                return
            if number % 50 == 0 and self.folder is not None:
                self.peak_disk_bytes = max(self.peak_disk_bytes, _disk(self.folder))
            self.peak_bytes = max(self.peak_bytes, _rss(self.root))


def _rss(root: int) -> int:
    """Resident sets of a process and all below it."""
    total, todo = 0, [(root, "")]
    while todo:
        pid, above = todo.pop()
        try:
            told = Path(f"/proc/{pid}/statm").read_text()
            below = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in _tasks(pid)]
        except OSError:
            continue
        # a child that has not become its program yet (vfork) is in its parent's memory
        if told != above:
            total += int(told.split()[1]) * _PAGE_BYTES
        todo += [(int(word), told) for words in below for word in words.split()]
    return total


def _tasks(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")


def make_cold(paths: Sequence[Path]) -> float:
    """Flush and drop the files' pages; returns the share that is still resident (0 is cold)."""
    for path in paths:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_share(paths)


def make_warm(paths: Sequence[Path]) -> float:
    """Read every file once; returns the resident share (1 is warm)."""
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while stream.read(_BLOCK_BYTES):
                pass
    return resident_share(paths)


def touch_memory(nbytes: int) -> None:
    """Write to so much free memory, or nearly all of it, and free it again.

    The host of a virtual machine takes free pages back in seconds, and gives them again at half a gigabyte a
    second: a tool that fills the page cache would wait for the host.
    """
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, min(nbytes, free_bytes * 9 // 10), flags=private) as held:
        for at in range(0, len(held), _PAGE_BYTES):
            held[at] = 1


def resident_share(paths: Sequence[Path]) -> float:
    """Share of the files' pages that the page cache holds (`mincore`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    held = total = 0
    for path in paths:
        size = path.stat().st_size
        pages = -(-size // _PAGE_BYTES)
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, mmap.MAP_PRIVATE) as mapped:
            vector = ctypes.create_string_buffer(pages)
            view = (ctypes.c_char * size).from_buffer(mapped)
            if libc.mincore(ctypes.addressof(view), size, vector) == 0:
                held += sum(1 for page in vector.raw if page & 1)
            del view
        total += pages
    return held / max(1, total)
