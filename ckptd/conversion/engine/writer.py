"""Write output files from copying threads: limits, counts, folders on demand, a window of dirty pages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckptd.base import extents, files
from ckptd.conversion.engine.sandbox import peak_rss_bytes
from ckptd.conversion.parts import Cast, Part, Range
from ckptd.conversion.reader import pieces
from ckptd.errors import SourceChanged

MIB = 1 << 20
PROGRESS_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """Hold the limits of writing: window and batch bound the dirty pages of a thread; the reserve stays
    free."""

    window_bytes: int
    batch_bytes: int
    threads: int
    stripe_threads: int
    """Threads that write one large file together; 1: a file is one thread's."""
    clone: bool
    reserve_bytes: int
    file_mode: int
    folder_mode: int
    gid: int

    @staticmethod
    def within(
        budget_bytes: int,
        *,
        threads: int,
        clone: bool,
        reserve_bytes: int,
        modes: tuple[int, int, int],
    ) -> WriteLimits:
        """Divide a memory budget: 48 MiB for two Python processes, the rest for dirty pages."""
        share = max(8 * MIB, (budget_bytes - 48 * MIB) // (2 * threads))
        window = min(64 * MIB, share)
        return WriteLimits(
            window_bytes=window,
            batch_bytes=window,
            threads=threads,
            stripe_threads=1,
            clone=clone,
            reserve_bytes=reserve_bytes,
            file_mode=modes[0],
            folder_mode=modes[1],
            gid=modes[2],
        )


class Counters:
    """Count the work done, for the threads and the progress line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.files = self.bytes = self.cloned = self.copied = self.resumed = 0

    def add(
        self, *, files: int = 0, nbytes: int = 0, cloned: int = 0, copied: int = 0, resumed: int = 0
    ) -> None:
        """Add to the counts; bytes are of output files."""
        with self._lock:
            self.files += files
            self.bytes += nbytes
            self.cloned += cloned
            self.copied += copied
            self.resumed += resumed


class Ticker:
    """Print counters and phase as lines of JSON while its block runs, four a second and one at the end."""

    def __init__(self, counters: Counters, phase: Callable[[], str]) -> None:
        self._counters = counters
        self._phase = phase
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._print()

    def _run(self) -> None:
        while not self._done.wait(PROGRESS_SECONDS):
            self._print()

    def _print(self) -> None:
        c = self._counters
        line = {
            "phase": self._phase(),
            "files": c.files,
            "bytes": c.bytes,
            "cloned": c.cloned,
            "copied": c.copied,
            "resumed": c.resumed,
            "at": time.monotonic(),
            "rss": peak_rss_bytes(),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class OutputFolders:
    """Folders below the output folder, made on demand."""

    def __init__(self, out_fd: int, settings: WriteLimits) -> None:
        self._out_fd = out_fd
        self._settings = settings
        self._lock = threading.Lock()
        self._made: set[str] = set()

    def ensure(self, path: str) -> None:
        """Make the parent folder of an output; no part of it is a link then."""
        parents = files.check_relative(path)[:-1]
        with self._lock:
            for depth in range(1, len(parents) + 1):
                parent = "/".join(parents[:depth])
                if parent in self._made:
                    continue
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, self._settings.folder_mode, dir_fd=self._out_fd)
                with files.opened_dir(parent, self._out_fd) as fd:
                    own(fd, self._settings.gid, self._settings.folder_mode)
                self._made.add(parent)

    def made(self) -> list[str]:
        """Folders that hold outputs, for the last fsync."""
        return sorted(self._made)


def own(fd: int, gid: int, mode: int) -> None:
    """Give a file or folder the checkpoint's group, never a wider mode (P15)."""
    if os.fstat(fd).st_gid != gid:
        try:
            os.fchown(fd, -1, gid)
        except OSError:
            mode &= ~0o070
    os.fchmod(fd, mode)


class Dirty:
    """The dirty pages of one file being written front to back: never more than a window of them (P12).

    `begin`: where in the file writing begins. While one half of the window is on its way to disk, the other
    is filled.
    """

    def __init__(self, fd: int, window_bytes: int, begin: int = 0) -> None:
        self._fd = fd
        self._half_bytes = max(1, window_bytes // 2)
        self._begin = begin
        self._bytes = 0
        self._under_way: tuple[int, int] | None = None

    def room(self) -> int:
        """Return the number of bytes that may be written before `wrote` is called."""
        return self._half_bytes - self._bytes

    def wrote(self, at: int, length: int) -> None:
        """`length` bytes were written, the last of them before `at`."""
        self._bytes += length
        if self._bytes < self._half_bytes:
            return
        if self._under_way is not None:
            begin, nbytes = self._under_way
            extents.flush_range(self._fd, begin, nbytes)
            extents.drop_pages(self._fd, begin, nbytes)
        self._under_way = (self._begin, at - self._begin)
        extents.start_flush(self._fd, *self._under_way)
        self._begin, self._bytes = at, 0


# --- Large outputs past the page cache: one copy in memory, half the CPU ----------------------
# Source bytes are read into an aligned buffer at the place that they have in the output, and whole buffers
# are written with O_DIRECT; the ragged end is written normally. `begin` tells if a file system has no
# O_DIRECT. Also for sources that come from disk: while reads take longer than 2 ms (`wbt_lat_usec`), the
# kernel holds back the writing of cached pages, down to one request at a time, but not direct writes.
# Those sources are read with O_DIRECT, too: 2 MiB are one request then, of which the page cache makes many.

BUFFER_BYTES = 4 << 20
MIN_FILE_BYTES = 1 << 20
_BLOCK_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20


def direct_buffer(size_bytes: int) -> memoryview:
    """Allocate memory for direct reads and writes: in huge pages, where the kernel has any.

    4 MiB out of huge pages are one request to the disk; out of pages of 4 KiB they are eight or so.
    """
    size_bytes = max(_BLOCK_BYTES, size_bytes // _BLOCK_BYTES * _BLOCK_BYTES)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has rules of its own for huge pages
    held = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=private)
    with contextlib.suppress(OSError):
        held.madvise(mmap.MADV_HUGEPAGE)
    begin = -_address_of(held) % _HUGE_PAGE_BYTES
    return memoryview(held)[begin : begin + size_bytes]


def _address_of(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class DirectReader:
    """Reads ranges of files past the page cache, each from its begin to its end."""

    def __init__(self, buffer_bytes: int) -> None:
        self._view = direct_buffer(buffer_bytes)
        self._fd = -1
        self._next = self._end = 0
        self._held_at = self._held = 0

    def begin(self, fd: int, offset: int, nbytes: int) -> None:
        """Start a range of `fd`, which was opened with O_DIRECT."""
        self._fd, self._next, self._end = fd, offset, offset + nbytes
        self._held = 0

    def read_into(self, into: memoryview) -> int:
        """Fill `into` from its begin with what follows, and return how many bytes that were; 0: at the end.

        Raises:
            OSError: as the kernel says.
        """
        skipped = self._next - self._held_at
        if not 0 <= skipped < self._held:
            self._fetch()
            skipped = self._next - self._held_at
        found = self._view[skipped : min(self._held, skipped + len(into))]
        if found:
            ctypes.memmove(_address_of(into), _address_of(found), len(found))  # lets other threads run
            self._next += len(found)
        return len(found)

    def _fetch(self) -> None:
        """Fill the buffer with whole blocks, from that of the next byte."""
        self._held_at = self._next // _BLOCK_BYTES * _BLOCK_BYTES
        length = min(len(self._view), -(-(self._end - self._held_at) // _BLOCK_BYTES) * _BLOCK_BYTES)
        view = self._view[:length]
        try:
            self._held = os.preadv(self._fd, [view], self._held_at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _through_cache(self._fd)  # as another thread may have done
            self._held = os.preadv(self._fd, [view], self._held_at)


def _through_cache(fd: int) -> bool:
    """Take O_DIRECT from a descriptor; False where it had none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


class BufferedWriter:
    """Fills files front to back; one buffer, used for file after file. Large ones pass the page cache by."""

    def __init__(self, buffer_bytes: int) -> None:
        self._view = direct_buffer(buffer_bytes)
        self._size = len(self._view)
        self._fd = -1
        self._at = self._filled = 0

    def begin(self, fd: int, nbytes: int) -> bool:
        """Start a new file of `nbytes`; False for a large one that must be written through the page cache.

        Raises:
            OSError: no space.
        """
        if nbytes >= MIN_FILE_BYTES:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            except OSError:
                return False
            extents.allocate(fd, nbytes)
        self._fd, self._at, self._filled = fd, 0, 0
        return True

    def room(self) -> int:
        """Bytes until the buffer is written."""
        return self._size - self._filled

    def take(self, source: int | DirectReader, offset: int, nbytes: int) -> None:
        """Append at most `room()` bytes of a source; a reader gives those that follow, whatever `offset` is.

        Raises:
            SourceChanged: it ends early.
        """
        end = self._filled + nbytes
        while self._filled < end:
            into = self._view[self._filled : end]
            if isinstance(source, DirectReader):
                count = source.read_into(into)
            else:
                count = os.preadv(source, [into], offset)
            if count == 0:
                raise SourceChanged(f"a source ended {end - self._filled} bytes early")
            self._filled += count
            offset += count
        if self._filled == self._size:
            self._write(self._size)

    def put(self, data: bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            count = min(len(view), self.room())
            self._view[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == self._size:
                self._write(self._size)

    def finish(self) -> None:
        """Write what is left: whole blocks past the page cache, the ragged end through it."""
        end, whole = self._filled, self._filled // _BLOCK_BYTES * _BLOCK_BYTES
        if not fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT:
            self._write(end)
            return
        tail = bytes(self._view[whole:end])
        self._write(whole)
        _through_cache(self._fd)
        if tail:
            extents.write_at(self._fd, tail, self._at)

    def _write(self, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            try:
                done += os.pwrite(self._fd, self._view[done:nbytes], self._at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not _through_cache(self._fd):
                    raise
        self._at += nbytes
        self._filled = 0


# --- Large outputs by several threads: parts in stripes, each flushed by its thread ----------------------
# Universal checkpoints are thousands of files, so there a thread per file is enough; weights are a few
# files of gigabytes, of tensors between bytes and gigabytes. Stripes also bound the dirty pages. They are for
# what is rounded, cloned, or a whole file of the source; what is copied is written past the page cache.

STRIPE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stripe:
    """Parts one after another from byte `at` of the output, about `STRIPE_BYTES` of them."""

    at: int
    nbytes: int
    parts: tuple[Part, ...]


def stripes(parts: Iterable[Part], *, divide_ranges: bool) -> Iterator[Stripe]:
    """Parts as stripes; ranges that will be cloned are left whole, for that costs nothing."""
    begin = at = 0
    held: list[Part] = []
    for part in parts:
        is_cut = divide_ranges if isinstance(part, Range) else isinstance(part, Cast)
        for piece in pieces(part, STRIPE_BYTES) if is_cut else (part,):
            held.append(piece)
            at += piece.nbytes
            if at - begin >= STRIPE_BYTES:
                yield Stripe(begin, at - begin, tuple(held))
                begin, held = at, []
    if held:
        yield Stripe(begin, at - begin, tuple(held))
