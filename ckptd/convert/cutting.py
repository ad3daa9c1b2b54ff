"""Parts cut into pieces that can be made by themselves: uploads send a file from many places at once.

What is made of a large part beginning in its middle would else be made from its beginning, again and again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def pieces(part: Part, nbytes: int) -> Iterator[Part]:
    """The part as parts of at most `nbytes` each, about; a row of woven parts stays whole."""
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
            yield Woven(rows, tuple(_rows(stream, first, rows) for stream in part.streams), part.strands)
    else:
        item, made = FLOAT_BYTES[part.source], FLOAT_BYTES[part.target]
        for inner in part.inner:
            for piece in pieces(inner, nbytes // made * item):
                assert isinstance(piece, Range | Woven | Mean)
                yield Cast((piece,), piece.nbytes // item, part.source, part.target)


def _steps(count: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, max(1, step)):
        yield first, min(max(1, step), count - first)


def _rows(stream: Stream, first: int, rows: int) -> Stream:
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
