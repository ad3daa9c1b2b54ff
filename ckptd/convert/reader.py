"""Read the bytes of a part in blocks: for writing where copying fails, and for `--verify`.

Reads by offset from open descriptors or from `Ranges`, holds a block or two, knows nothing of outputs.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import add

from ckptd.convert.dtypes import cast, clamped, widen
from ckptd.convert.parts import (
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
)
from ckptd.convert.sources import Ranges
from ckptd.errors import SourceChanged

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
    """Some rows of a stream; its last row may be shorter than the others."""
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
