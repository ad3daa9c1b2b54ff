"""Define the kinds of bytes that an output file is made of, and their encoding in a plan (docs/design.md §4).

Most of a universal checkpoint is `Range`: source bytes as they are, which a file system may clone. The
others are read in blocks by `ckptd.conversion.reader`: rows woven from tensor-parallel shards, means of
averaged parameters, element types widened, or cast for exported weights.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes of ours."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Length in the output."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` bytes at `offset` of source file number `source`."""

    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Widen:
    """`count` elements of type `dtype` at `offset` of a source, written as float32."""

    source: int
    offset: int
    count: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Length in the output."""
        return 4 * self.count


@dataclass(frozen=True, slots=True)
class Stream:
    """Source ranges one after another, read in rows of `stride` bytes (the last may be shorter)."""

    ranges: tuple[Range, ...]
    stride: int


@dataclass(frozen=True, slots=True)
class Woven:
    """`rows` rows; each is, strand by strand, `width` bytes at `start` in that row of a stream.

    `strands` holds (number of the stream, start, width), in bytes.
    """

    rows: int
    streams: tuple[Stream, ...]
    strands: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        """Length in the output."""
        return self.rows * sum(width for _, _, width in self.strands)


@dataclass(frozen=True, slots=True)
class Mean:
    """`count` float32 elements: the sum of all copies, in their order, divided by how many they are."""

    copies: tuple[tuple[Range, ...], ...]
    count: int

    @property
    def nbytes(self) -> int:
        """Length in the output."""
        return 4 * self.count


@dataclass(frozen=True, slots=True)
class Cast:
    """`count` elements, made by `inner` one after another as type `source`, written as `target`."""

    inner: tuple[Range | Woven | Mean, ...]
    count: int
    source: str
    target: str

    @property
    def nbytes(self) -> int:
        """Length in the output."""
        return FLOAT_BYTES[self.target] * self.count


Part = Literal | Range | Widen | Woven | Mean | Cast
FLOAT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Element types that can be cast."""
SOURCE_ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Element types that can be widened to float32."""


def ranges_of(part: Part) -> Iterator[Range]:
    """Return every source range that a part reads."""
    if isinstance(part, Range):
        yield part
    elif isinstance(part, Widen):
        yield Range(part.source, part.offset, part.count * SOURCE_ITEM_BYTES[part.dtype])
    elif isinstance(part, Woven):
        for stream in part.streams:
            yield from stream.ranges
    elif isinstance(part, Mean):
        for copy in part.copies:
            yield from copy
    elif isinstance(part, Cast):
        for inner in part.inner:
            yield from ranges_of(inner)


def encode(part: Part) -> list[Any]:
    """Return a part as a JSON value."""
    if isinstance(part, Literal):
        return ["b", base64.b64encode(part.data).decode()]
    if isinstance(part, Range):
        return ["r", part.source, part.offset, part.nbytes]
    if isinstance(part, Widen):
        return ["w", part.source, part.offset, part.count, part.dtype]
    if isinstance(part, Mean):
        return ["m", part.count, *([_flat(copy) for copy in part.copies])]
    if isinstance(part, Cast):
        return ["c", part.count, part.source, part.target, *(encode(inner) for inner in part.inner)]
    streams = [[stream.stride, _flat(stream.ranges)] for stream in part.streams]
    return ["v", part.rows, streams, [list(strand) for strand in part.strands]]


def decode(raw: list[Any]) -> Part:
    """Return the part that `encode` wrote.

    Raises:
        RefusedError: a kind that this version does not know.
    """
    kind = raw[0]
    if kind == "r":
        return Range(int(raw[1]), int(raw[2]), int(raw[3]))
    if kind == "b":
        return Literal(base64.b64decode(raw[1], validate=True))
    if kind == "w":
        return Widen(int(raw[1]), int(raw[2]), int(raw[3]), str(raw[4]))
    if kind == "m":
        return Mean(tuple(_ranges(copy) for copy in raw[2:]), int(raw[1]))
    if kind == "c":
        inner = tuple(decode(one) for one in raw[4:])
        if all(isinstance(one, Range | Woven | Mean) for one in inner):
            kept = tuple(one for one in inner if isinstance(one, Range | Woven | Mean))
            return Cast(kept, int(raw[1]), str(raw[2]), str(raw[3]))
    if kind == "v":
        streams = tuple(Stream(_ranges(flat), int(stride)) for stride, flat in raw[2])
        strands = tuple((int(s), int(start), int(width)) for s, start, width in raw[3])
        return Woven(int(raw[1]), streams, strands)
    raise RefusedError(f"the plan holds a part of kind {kind!r}, which this version of ckptd does not know")


def _flat(ranges: tuple[Range, ...]) -> list[int]:
    return [n for r in ranges for n in (r.source, r.offset, r.nbytes)]


def _ranges(flat: list[int]) -> tuple[Range, ...]:
    return tuple(Range(*map(int, flat[i : i + 3])) for i in range(0, len(flat), 3))
