"""`python -m bench.disks` (root): conversion against `cp -r` on a fast, a slow and a distant disk.

Each disk is an ext4 on a loop device (direct I/O) over memory. Before two of them stands a FUSE server that
gives them the rate of a slow disk, or the latency of one behind a network; flushes pass through it. All
mounts lie in a mount namespace of this process, so that nothing is left however it ends. Writes
docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import stat
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mfusepy

from bench import loop, recipe
from bench.convert import CACHES, Series, compare
from bench.pictures import replace_part
from bench.report import machine
from tests.support.real import REPOSITORY, Recipe

SAVE = Recipe(stage=2, world_size=2, hidden=1024, layers=12, heads=16, vocab=16384)
TOOLS = ("cp", "ckptd")
MIB = 1 << 20
LIMIT = 1.0
REQUESTS_AT_ONCE = 64
_INSIDE = "CKPTD_BENCH_HAS_ITS_OWN_MOUNTS"


@dataclass(frozen=True, slots=True)
class Disk:
    """A kind of storage: `bytes_per_second` 0 is memory itself; `latency_seconds` is of each request."""

    name: str
    what: str
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0


DISKS = (
    Disk("fast", "memory"),
    Disk("slow", "200 MB/s", 200e6),
    Disk("distant", "5 ms a request, 64 at once, 1 GB/s", 1e9, 0.005),
)


class Paced(mfusepy.Operations):  # type: ignore[misc]
    """A FUSE folder with the file `disk`: an image whose bytes pass at a rate, each request with latency."""

    use_ns = True
    lock = None  # the library would take it for a handler

    def __init__(self, image: Path, bytes_per_second: float, latency_seconds: float) -> None:
        self._fd = os.open(image, os.O_RDWR)
        self._bytes_per_second, self._latency_seconds = bytes_per_second, latency_seconds
        self._mutex = threading.Lock()
        self._free_at = 0.0

    def init_with_config(self, conn: Any, _config: Any) -> None:
        """Take many requests at once, and say that it is mounted."""
        conn.max_background = conn.congestion_threshold = REQUESTS_AT_ONCE
        print("ready", flush=True)

    def _pass(self, nbytes: int) -> None:
        """Wait until the disk has served a request."""
        now = time.monotonic()
        with self._mutex:
            self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_second
            until = self._free_at + self._latency_seconds
        time.sleep(until - now)

    def getattr(self, path: str, _fh: int | None = None) -> dict[str, Any]:
        """Return size and kind."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        if path != "/disk":
            raise mfusepy.FuseOSError(errno.ENOENT)
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": os.fstat(self._fd).st_size}

    def open(self, _path: str, _flags: int) -> int:
        """Accept an open."""
        return 0

    def read(self, _path: str, size: int, offset: int, _fh: int) -> bytes:
        """Read from the image."""
        self._pass(size)
        return os.pread(self._fd, size, offset)

    def write(self, _path: str, data: bytes, offset: int, _fh: int) -> int:
        """Write to the image."""
        self._pass(len(data))
        return os.pwrite(self._fd, data, offset)

    def fsync(self, _path: str, _datasync: int, _fh: int) -> int:
        """Take the time of a request: the image is memory."""
        self._pass(0)
        return 0


def serve(mountpoint: str, image: str, bytes_per_second: str, latency_seconds: str, place: str) -> None:
    """Serve until unmounted, before all that compete for the CPUs: a disk needs none.

    When the other end of stdin is gone, `place` and `mountpoint` are unmounted: a server that were the last
    process of their namespace would wait for itself.
    """

    def clear() -> None:
        os.read(0, 1)
        for mounted in (place, mountpoint):
            while os.path.ismount(mounted) and subprocess.run(["umount", mounted], check=False).returncode:
                time.sleep(0.1)

    threading.Thread(target=clear, daemon=True).start()
    os.nice(-20)
    with contextlib.suppress(OSError):  # where priorities count within a session alone
        Path("/proc/self/autogroup").write_text("-20")
    disk = Paced(Path(image), float(bytes_per_second), float(latency_seconds))
    mfusepy.FUSE(disk, mountpoint, foreground=True, max_threads=REQUESTS_AT_ONCE)


@contextlib.contextmanager
def mounted(disk: Disk, work: Path, size_bytes: int) -> Iterator[Path]:
    """Make an ext4 of `size_bytes` on the disk below `work`, in a mount namespace of this process's own.

    Raises:
        CalledProcessError: it could not be made or mounted.
    """
    with contextlib.ExitStack() as stack:

        def mount(name: str, *words: str) -> Path:
            place = work / name
            place.mkdir(parents=True, exist_ok=True)
            if words:
                subprocess.run(["mount", *words, str(place)], check=True)
                stack.callback(subprocess.run, ["umount", str(place)], check=True)
            return place

        image = mount("image", "-t", "tmpfs", "-o", f"size={size_bytes + 64 * MIB}", "bench") / "disk"
        with image.open("wb") as out:
            out.truncate(size_bytes)
        if disk.bytes_per_second:
            place = mount("paced")
            words = [place, image, disk.bytes_per_second, disk.latency_seconds, work / disk.name]
            code = "import sys; from bench.disks import serve; serve(*sys.argv[1:])"
            command = [sys.executable, "-c", code, *map(str, words)]
            server = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert server.stdin is not None
            assert server.stdout is not None
            stack.callback(server.wait)
            stack.callback(server.stdin.close)
            stack.callback(subprocess.run, ["umount", str(place)], check=True)
            if server.stdout.readline() != b"ready\n":
                raise subprocess.CalledProcessError(server.wait(), command)
            image = place / "disk"
        place = stack.enter_context(loop.attached(image, work / disk.name, "ext4"))
        yield place


def render(found: dict[Disk, list[Series]], size_bytes: int) -> str:
    """Return the measured part of the page."""
    lines = [
        f"Machine: {machine()}; load {os.getloadavg()[2]:.1f} over the last quarter of an hour.",
        "",
        f"**ZeRO stage 2, 2 ranks, bf16: {size_bytes / 1e9:.2f} GB**, median (least – greatest):",
        "",
        "| disk | cache | rounds | `cp -r` s | `ckptd convert` s | ckptd ÷ cp | CPU s of cp, ckptd |",
        "|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for disk, series in found.items():
        for cache in CACHES:
            cp, ours = (next(s for s in series if (s.tool, s.cache) == (tool, cache)) for tool in TOOLS)
            pairs = zip(ours.runs, cp.runs, strict=True)
            ratios = [a.wall_seconds / b.wall_seconds for a, b in pairs]
            ratio = statistics.median(ratios)
            lines.append(
                f"| {disk.name}: {disk.what} | {cache} | {len(ratios)} | {_seconds(cp)} | {_seconds(ours)} "
                f"| {ratio:.2f} ({min(ratios):.2f} – {max(ratios):.2f}) "
                f"| {cp.median('cpu_seconds'):.1f}, {ours.median('cpu_seconds'):.1f} |"
            )
            word = "reached" if ratio <= LIMIT else "NOT reached"
            verdicts.append(f"* {disk.name} disk, {cache}, at most {LIMIT} × `cp -r`: {ratio:.2f} ({word})")
    return "\n".join([*lines, "", *verdicts, ""])


def _seconds(series: Series) -> str:
    low, high = series.spread("wall_seconds")
    return f"{series.median('wall_seconds'):.2f} ({low:.2f} – {high:.2f})"


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--disk", choices=[disk.name for disk in DISKS], help="only this one; no report")
    parser.add_argument("--tiny", action="store_true", help="a small save, no report: tries the benchmark")
    given = parser.parse_args()
    if not loop.available("ext4"):
        print("bench.disks needs root and mkfs.ext4 (make system-packages): nothing measured")
        return
    if _INSIDE not in os.environ:
        command = ["unshare", "--mount", sys.executable, "-m", "bench.disks", *sys.argv[1:]]
        os.execvpe(command[0], command, os.environ | {_INSIDE: "1"})
    source = recipe.checkpoint(recipe.TINY[2] if given.tiny else SAVE)
    size_bytes = sum(p.stat().st_size for p in source.iterdir())
    found: dict[Disk, list[Series]] = {}
    for disk in DISKS:
        if given.disk in (None, disk.name):
            with mounted(disk, recipe.CACHE / "disks", (512 + 2 * size_bytes // MIB) * MIB) as place:
                copied = place / "save" / source.name
                shutil.copytree(source, copied)
                found[disk] = compare(copied, given.runs, list(TOOLS))
    text = render(found, size_bytes)
    if given.tiny or given.disk:
        print(text)
    else:
        replace_part(text, "disks")


if __name__ == "__main__":
    main()
