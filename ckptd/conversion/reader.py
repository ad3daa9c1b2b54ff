"""Read the sources of a plan: files proven to be the planned ones, and the bytes of a part in blocks.

Files are opened when first read and closed when too many, since a checkpoint of a thousand ranks has more
than a process may have open (1024 is the usual limit). Blocks serve where copying fails, and for `--verify`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add
from typing import TYPE_CHECKING, overload

from ckptd.base import extents, files
from ckptd.base.extents import identity_of
from ckptd.conversion.dtypes import cast, clamped, first_unequal, widen
from ckptd.conversion.parts import (
    FLOAT_BYTES,
    SOURCE_ITEM_BYTES,
    Cast,
    Literal,
    Mean,
    Part,
    Range,
    Stream,
    Widen,
    Woven,
    ranges_of,
)
from ckptd.errors import RefusedError, SourceChanged

if TYPE_CHECKING:
    from ckptd.conversion.plan import OutputCheck

# --- The interface of sources: local files, or any place that serves ranges -------------------
# Local files keep their fast paths (clones, copies in the kernel, O_DIRECT): callers that can use them ask
# for `local`. All others read blocks through `read`, wherever the bytes lie.


class Ranges(ABC):
    """The source files of a plan by number; safe for several threads."""

    @property
    def local(self) -> SourceFiles | None:
        """Return the sources as file descriptors; None where there are none."""
        return None

    @abstractmethod
    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes at `offset` of source number `source`; fewer at its end.

        Raises:
            SourceChanged: it is no longer the planned one. RemoteError: it does not answer.
        """

    @abstractmethod
    def path(self, source: int) -> str:
        """Return the relative path of source number `source`, for messages."""


# --- Local files -----------------------------------------------------------------------------------------

RESERVED_DESCRIPTORS = 640
"""Descriptors kept for outputs that wait for their flush (threads × batch), pipes, folders, the plan."""
WANTED_DESCRIPTORS = 16384


class SourceFd(int):
    """A descriptor that is closed when nobody holds it any more, whichever thread was last."""

    def __del__(self) -> None:
        """Close."""
        os.close(self)


class SourceFiles(Ranges, Sequence[int]):
    """Descriptors by number in the plan; safe for several threads."""

    def __init__(self, folder_fd: int, paths: list[str], identities: Sequence[tuple[int, ...]]) -> None:
        """Check all identities by name at once, so that a save under way is noticed before any copying.

        Raises:
            SourceChanged: a file is gone or was written since it was planned.
        """
        self._folder_fd = folder_fd
        self._paths = paths
        self._identities = identities
        self._lock = threading.Lock()
        self._open: dict[int, SourceFd] = {}
        self._direct: dict[int, SourceFd] = {}
        self._cold: set[int] = set()
        self._sparse: set[int] = set()
        self._limit = max(16, (descriptors() - RESERVED_DESCRIPTORS) // 2)
        for path, identity in zip(paths, identities, strict=True):
            status = files.stat_beneath(folder_fd, path)
            if status is None or identity_of(status) != identity:
                raise _changed(path)

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """Return the descriptor of source `index`: hold it while it is used.

        Raises:
            SourceChanged: the file is no longer the planned one.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if index >= len(self._paths):
            raise IndexError(index)
        found = self._open.get(index)
        return self._opened(index) if found is None else found

    @property
    def local(self) -> SourceFiles:
        """Return the local sources: these."""
        return self

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a source, through the page cache."""
        with self.named(source):
            return os.pread(self[source], nbytes, offset)

    @contextlib.contextmanager
    def named(self, source: int) -> Iterator[None]:
        """Add the source's path to an error of the system: it may be its disk that fails."""
        try:
            yield
        except OSError as error:
            words = f"{error.strerror or error}, while {self._paths[source]} was being copied"
            raise OSError(error.errno, words) from error

    def path(self, source: int) -> str:
        """Return the path below the folder."""
        return self._paths[source]

    def was_cold(self, fd: int) -> bool:
        """Tell whether most of the file was not in the page cache: what we read of it is dropped again."""
        return fd in self._cold

    def direct(self, part: Range) -> int | None:
        """Return a descriptor with O_DIRECT of a range that comes from disk; hold it while it is used.

        None where most of it is in the page cache, or the file system has no such descriptors.
        """
        fd = self[part.source]
        if not self.was_cold(fd):
            return None
        if 2 * (extents.cached_bytes(fd, part.offset, part.nbytes) or 0) > part.nbytes:
            return None
        with self._lock:
            if part.source not in self._direct:
                with contextlib.suppress(OSError):
                    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
                    self._direct[part.source] = SourceFd(os.open(f"/proc/self/fd/{fd}", flags))
            return self._direct.get(part.source)

    def drop_cold(self) -> None:
        """Drop from the page cache what lies there of files that came from disk: comparisons leave it."""
        with self._lock:
            for fd in self._cold:
                extents.drop_pages(fd)

    def extent_at(self, fd: int, offset: int, length: int) -> tuple[bool, int]:
        """Whether a hole begins at `offset`, and how far hole or data reach (all of a file without holes)."""
        return extents.extent_at(fd, offset, length) if fd in self._sparse else (False, length)

    def _opened(self, index: int) -> SourceFd:
        with self._lock:
            found = self._open.get(index)
            if found is not None:
                return found
            while len(self._open) >= self._limit:
                self._forget(next(iter(self._open)))
            path = self._paths[index]
            try:
                fd = SourceFd(files.open_beneath(self._folder_fd, path))
            except FileNotFoundError as error:  # the trainer's rotation, or a save that begins
                raise _changed(path) from error
            status = os.fstat(fd)
            if identity_of(status) != self._identities[index]:
                raise _changed(path)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            cached = extents.cached_bytes(fd)
            if cached is not None and cached < status.st_size // 2:
                self._cold.add(int(fd))
            if status.st_blocks * 512 < status.st_size:
                self._sparse.add(int(fd))
            self._open[index] = fd
            return fd

    def _forget(self, index: int) -> None:
        """Let go of the descriptor opened first; whoever uses it just now keeps it open."""
        fd = int(self._open.pop(index))
        self._direct.pop(index, None)
        if fd in self._cold:
            extents.drop_pages(fd)
            self._cold.discard(fd)
        self._sparse.discard(fd)


def descriptors() -> int:
    """Return how many files this process may have open, after raising the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _changed(path: str) -> SourceChanged:
    return SourceChanged(f"{path} was written or removed since it was read")


Readable = Ranges | Sequence[int]
"""Ranges, or descriptors by number."""
BLOCK_BYTES = 256 << 10
_NARROW_BYTES = 64
"""Strands below this width are gathered column by column, which is cheaper than row by row."""


def blocks_of(part: Part, sources: Readable) -> Iterator[bytes]:
    """Return the part's output bytes in blocks of about 1 MiB.

    Raises:
        SourceChanged: a source ends early.
    """
    if isinstance(part, Literal):
        yield part.data
    elif isinstance(part, Range):
        yield from _read((part,), sources)
    elif isinstance(part, Widen):
        item = SOURCE_ITEM_BYTES[part.dtype]
        ranges = (Range(part.source, part.offset, part.count * item),)
        for data in _read(ranges, sources, BLOCK_BYTES // 4 * item):
            yield widen(data, part.dtype)
    elif isinstance(part, Mean):
        yield from _mean(part, sources)
    elif isinstance(part, Cast):
        yield from _cast(part, sources)
    else:
        yield from _woven(part, sources)


def refuse_unequal(check: OutputCheck, sources: Ranges, breathe: Callable[[], None]) -> None:
    """Refuse masters that do not round to the model's weights, and copies that differ (formats.md §6.1).

    `breathe`: called for each block; may raise to stop.

    Raises:
        RefusedError: with the tensor, and the file and byte of the first element that differs.
    """
    breathe()
    if check.rounding is not None:
        _refuse_unrounded(check, *check.rounding, sources, breathe)
    elif not same_bytes(check.one, check.other, sources):
        raise RefusedError(
            f"the tensor-parallel ranks hold different copies of {check.what}",
            hint="the run has drifted apart, or shards are damaged; an older checkpoint may be whole",
        )


def _refuse_unrounded(
    check: OutputCheck, source: str, target: str, sources: Ranges, breathe: Callable[[], None]
) -> None:
    item, made = FLOAT_BYTES[source], FLOAT_BYTES[target]
    masters, weights = Taker(_all(check.one, sources)), Taker(_all(check.other, sources))
    for first in range(0, check.elements, BLOCK_BYTES // item):
        count = min(BLOCK_BYTES // item, check.elements - first)
        found = first_unequal(masters.take(count * item), weights.take(count * made), source, target)
        breathe()
        if found is not None:
            number = first + found
            master = _place(check.one, number * item, sources)
            weight = _place(check.other, number * made, sources)
            raise RefusedError(
                f"{check.what} is not the weight of the model: element {number}, {master}, "
                f"does not round to {weight}",
                hint="the ZeRO form is kept as it is. Shards may be damaged, or of two saves; if the trainer "
                "changed the model after its last step, compare_masters = false in the job file, or "
                "`ckptd convert --no-strict`, takes the masters",
            )


def _place(parts: Iterable[Part], begin: int, sources: Ranges) -> str:
    """Return the file and the byte in it of byte `begin` of `parts`."""
    for part in (r for one in parts for r in ranges_of(one)):
        if begin < part.nbytes:
            return f"byte {part.offset + begin} of {sources.path(part.source)}"
        begin -= part.nbytes
    return "nowhere"


def same_bytes(a: Iterable[Part], b: Iterable[Part], sources: Readable) -> bool:
    """Tell whether two lists of parts are the same bytes."""
    one, other = Taker(_all(a, sources)), Taker(_all(b, sources))
    while True:
        mine, theirs = one.take(BLOCK_BYTES), other.take(BLOCK_BYTES)
        if mine != theirs:
            return False
        if not mine:
            return True


def _all(parts: Iterable[Part], sources: Readable) -> Iterator[bytes]:
    for part in parts:
        yield from blocks_of(part, sources)


class Taker:
    """Hands out an iterator of blocks in pieces of the length asked for."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer at the end."""
        if not self._rest:
            block = next(self._blocks, b"")
            if len(block) == length:
                return block
            self._rest = memoryview(block)
        if length <= len(self._rest):
            taken, self._rest = bytes(self._rest[:length]), self._rest[length:]
            return taken
        found = bytearray(self._rest)
        self._rest = memoryview(b"")
        for block in self._blocks:
            room = length - len(found)
            found += block[:room]
            if len(found) == length:
                self._rest = memoryview(block)[room:]
                break
        return bytes(found)


def _read(ranges: Iterable[Range], sources: Readable, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Ranges one after another; no block crosses from one to the next."""
    for part in ranges:
        for first in range(0, part.nbytes, block_bytes):
            count = min(block_bytes, part.nbytes - first)
            data = _at(sources, part.source, part.offset + first, count)
            if len(data) != count:
                raise SourceChanged("a source ended early while it was read")
            yield data


def _at(sources: Readable, number: int, offset: int, count: int) -> bytes:
    if isinstance(sources, Ranges):
        return sources.read(number, offset, count)
    return os.pread(sources[number], count, offset)


def _mean(part: Mean, sources: Readable) -> Iterator[bytes]:
    """Sums in double and rounds to float32 after each addition, which is float32's own sum (§6.1)."""
    takers = [Taker(_read(copy, sources, BLOCK_BYTES // len(part.copies))) for copy in part.copies]
    for first in range(0, part.count, BLOCK_BYTES // 4):
        count = min(BLOCK_BYTES // 4, part.count - first)
        total = array("f", bytes(4 * count))
        for taker in takers:
            total = _rounded(map(add, total, array("f", taker.take(4 * count))))
        yield _rounded(value / len(takers) for value in total).tobytes()


def _cast(part: Cast, sources: Readable) -> Iterator[bytes]:
    """Block by block: every block of an inner part is of whole elements."""
    item, left = FLOAT_BYTES[part.source], part.count
    for data in _all(part.inner, sources):
        if len(data) % item or len(data) // item > left:
            raise SourceChanged("a cast does not fit the elements that it is of")
        left -= len(data) // item
        yield cast(data, part.source, part.target)
    if left:
        raise SourceChanged("a source ended early while it was read")


def _rounded(values: Iterable[float]) -> array[float]:
    return array("f", (clamped(v) for v in values))


def _woven(part: Woven, sources: Readable) -> Iterator[bytes]:
    """Row blocks: each stream is read forwards once, its strands scattered into the rows."""
    row_bytes = sum(width for _, _, width in part.strands)
    widest = max([row_bytes, *(stream.stride for stream in part.streams)])
    step = max(1, BLOCK_BYTES // max(widest, 1))
    share = max(_NARROW_BYTES, BLOCK_BYTES // len(part.streams))  # all streams together hold one block
    takers = [Taker(_read(stream.ranges, sources, share)) for stream in part.streams]
    for first in range(0, part.rows, step):
        rows = min(step, part.rows - first)
        out = bytearray(rows * row_bytes)
        data = [_rows(t, s, rows) for t, s in zip(takers, part.streams, strict=True)]
        at = 0
        for stream, start, width in part.strands:
            _scatter(out, at, row_bytes, data[stream], start, part.streams[stream].stride, width, rows)
            at += width
        yield bytes(out)


def _rows(taker: Taker, stream: Stream, rows: int) -> bytes:
    return taker.take(rows * stream.stride)


def _scatter(
    out: bytearray, at: int, row_bytes: int, data: bytes, start: int, stride: int, width: int, rows: int
) -> None:
    """`width` bytes of every row of `data` to every row of `out`."""
    if len(data) < start + (rows - 1) * stride + width:
        raise SourceChanged("a source ended early while it was read")
    if width < _NARROW_BYTES:
        for k in range(width):
            out[at + k :: row_bytes] = data[start + k : start + k + (rows - 1) * stride + 1 : stride]
        return
    view = memoryview(data)
    for row in range(rows):
        to, begin = at + row * row_bytes, start + row * stride
        out[to : to + width] = view[begin : begin + width]


# --- Cutting parts into pieces that can be made by themselves --------------------------------------------
# An upload sends a file from several offsets at once. If a large part could only be made from its
# beginning, each of them would make it anew.


def pieces(part: Part, nbytes: int) -> Iterator[Part]:
    """Return the part as parts of at most `nbytes` each, about; a row of woven parts stays whole."""
    if part.nbytes <= nbytes or isinstance(part, Literal):
        yield part
    elif isinstance(part, Range):
        yield from _sub((part,), 0, part.nbytes, nbytes)
    elif isinstance(part, Widen):
        item = SOURCE_ITEM_BYTES[part.dtype]
        for first, count in _steps(part.count, nbytes // 4):
            yield Widen(part.source, part.offset + first * item, count, part.dtype)
    elif isinstance(part, Mean):
        for first, count in _steps(part.count, nbytes // 4):
            yield Mean(tuple(tuple(_sub(copy, 4 * first, 4 * count)) for copy in part.copies), count)
    elif isinstance(part, Woven):
        row_bytes = part.nbytes // part.rows
        for first, rows in _steps(part.rows, nbytes // row_bytes):
            yield Woven(rows, tuple(_cut_rows(stream, first, rows) for stream in part.streams), part.strands)
    else:
        item, made = FLOAT_BYTES[part.source], FLOAT_BYTES[part.target]
        for inner in part.inner:
            for piece in pieces(inner, nbytes // made * item):
                assert isinstance(piece, Range | Woven | Mean)
                yield Cast((piece,), piece.nbytes // item, part.source, part.target)


def _steps(count: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, max(1, step)):
        yield first, min(max(1, step), count - first)


def _cut_rows(stream: Stream, first: int, rows: int) -> Stream:
    """Return some rows of a stream; its last row may be shorter than the others."""
    begin = first * stream.stride
    whole = sum(r.nbytes for r in stream.ranges)
    return Stream(tuple(_sub(stream.ranges, begin, min(rows * stream.stride, whole - begin))), stream.stride)


def _sub(ranges: Iterable[Range], begin: int, nbytes: int, most: int | None = None) -> Iterator[Range]:
    """`nbytes` bytes from byte `begin` of ranges one after another, none above `most`."""
    for r in ranges:
        skip = min(begin, r.nbytes)
        begin -= skip
        count = min(nbytes, r.nbytes - skip)
        nbytes -= count
        step = most or count
        for first in range(0, count, step or 1):
            yield Range(r.source, r.offset + skip + first, min(step, count - first))
