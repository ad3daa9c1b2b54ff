"""Group outputs into tasks: neighbours in the sources, and all outputs that read the same source bytes.

Pure: a plan's index in, groups of lines out. What is larger than a part of an upload is cut
where the destination joins parts; elsewhere an output is one worker's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING

from ckptd.convert.cluster.locality import Item
from ckptd.convert.parts import Literal, Part, Range, decode, ranges_of
from ckptd.convert.plan import MAX_LINE_BYTES, Header, PlanReader, Trailer
from ckptd.convert.reader import pieces
from ckptd.errors import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptd.convert.cluster.locality import Home, Layout
    from ckptd.storage.stores.s3.parts import PartLayout

SHARED_BYTES = 1 << 20
"""Ranges below this are rather read twice than tied together."""
MOST_RANGES = 200_000
MOST_FILES = 256
MOST_LINE_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
"""What is made of a part that begins in the middle of an arranged piece is made from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A plan without its parts, and which items read the same bytes."""

    header: Header
    identities: list[tuple[int, ...]]
    trailer: Trailer
    items: list[Item]
    together: list[int]
    """By item: the first one that reads large ranges of the same bytes; itself where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput:
    """Name an output of a task: an item under one name, whole or (first, count) of its parts."""

    item: Item
    name: str
    parts: tuple[int, int] | None = None
    cuts: PartLayout | None = None
    """Where its upload is cut."""


@dataclass(slots=True)
class _Batch:
    """A task that is not full yet."""

    wanted: list[TaskOutput] = field(default_factory=list)
    nbytes: int = 0
    line_bytes: int = 0


def index_of(stream: IO[bytes]) -> Index:
    """Read a plan once.

    Raises:
        DamagedError: it ends early.
    """
    reader = PlanReader(stream)
    items: list[Item] = []
    links: dict[str, tuple[str, ...]] = {}
    shared = _Shared(sum(s.bytes for s in reader.header.sources))
    at = stream.tell()
    while line := stream.readline(MAX_LINE_BYTES):
        raw = json.loads(line)
        if "end" in raw:
            named = [
                Item(
                    offset=i.offset,
                    line_bytes=i.line_bytes,
                    nbytes=i.nbytes,
                    names=i.names + links.get(i.names[0], ()) if i.names else (),
                )
                for i in items
            ]
            together = shared.together(len(items))
            trailer = Trailer(*raw["end"])
            if sum(len(item.names) for item in named) != trailer.files:
                raise DamagedError("the plan lacks files", hint="convert again; nothing was published")
            return Index(
                header=reader.header,
                identities=reader.identities,
                trailer=trailer,
                items=named,
                together=together,
            )
        if "l" in raw:
            links[raw["t"]] = (*links.get(raw["t"], ()), raw["l"])
        else:
            parts = parts_of(line)
            shared.add(len(items), parts)
            nbytes = sum(part.nbytes for part in parts)
            names = (raw["f"],) if "f" in raw else ()
            items.append(Item(offset=at, line_bytes=len(line), nbytes=nbytes, names=names))
        at += len(line)
    raise DamagedError("the plan ends early", hint="convert again; nothing was published")


def without_links(index: Index) -> Index:
    """For a destination where a second name costs nothing: each output under its first name alone."""
    return replace(index, items=[replace(item, names=item.names[:1]) for item in index.items])


def parts_of(line: bytes | str) -> tuple[Part, ...]:
    """All parts of an output or a comparison."""
    raw = json.loads(line)
    sides = raw["p"] if "c" in raw else [raw["p"]]
    return tuple(decode(part) for side in sides for part in side)


def clipped(parts: Iterable[Part], begin: int, end: int) -> tuple[tuple[Part, ...], int]:
    """Parts that make bytes `begin` to `end` of an output, and how many bytes they make before `begin`.

    Ranges are cut exactly; what is arranged is made from the beginning of a small piece.
    """
    found: list[Part] = []
    skip = at = 0
    for piece in (piece for part in parts for piece in pieces(part, PIECE_BYTES)):
        first, last = at, at + piece.nbytes
        at = last
        if last <= begin or first >= end:
            continue
        if isinstance(piece, Range):
            low, high = max(begin, first), min(end, last)
            piece = Range(piece.source, piece.offset + low - first, high - low)  # noqa: PLW2901
        elif isinstance(piece, Literal) and last > end:
            piece = Literal(piece.data[: end - first])  # noqa: PLW2901
            skip = max(skip, begin - first)
        else:
            skip = max(skip, begin - first)
        found.append(piece)
    return tuple(found), skip


def tasks_of(
    index: Index, done: set[str], layout: Layout, *, task_bytes: int, missing: dict[str, list[int]]
) -> Iterator[tuple[Home, list[TaskOutput]]]:
    """Group the outputs into tasks, each with its home workers; names in `done` are left out.

    `layout` says which outputs are sent in parts; `missing`: of uploads that an earlier attempt began, the
    parts that lack.
    """
    batches: dict[Home, _Batch] = {}
    for group in _groups(index):
        alone: list[TaskOutput] = []
        tied: list[TaskOutput] = []
        for one in (w for item in group for w in _wanted(item, done)):
            cuts = layout.cuts(one.item, one.name, is_alone=len(group) == 1)
            if cuts is None:
                tied.append(one)
            elif one.name in missing:
                yield from _by_parts([replace(one, cuts=cuts)], layout, task_bytes, missing[one.name])
            elif len(group) == 1:
                alone.append(replace(one, cuts=cuts))
            else:
                tied.append(replace(one, cuts=cuts, parts=(1, cuts.parts)))
        if alone and alone[0].cuts is not None:
            yield from _by_parts(alone, layout, task_bytes, list(range(1, alone[0].cuts.parts + 1)))
        if tied:
            home = layout.home(one.item for one in tied)
            batch = batches.setdefault(home, _Batch())
            batch.wanted += tied
            batch.nbytes += sum(one.item.nbytes for one in tied)
            batch.line_bytes += sum(one.item.line_bytes for one in tied)
            is_large = batch.nbytes >= task_bytes or batch.line_bytes >= MOST_LINE_BYTES
            if is_large or len(batch.wanted) >= MOST_FILES:
                yield home, batches.pop(home).wanted
    for home, batch in batches.items():
        yield home, batch.wanted


def _wanted(item: Item, done: set[str]) -> list[TaskOutput]:
    if not item.names:
        return [TaskOutput(item=item, name="")]
    return [TaskOutput(item=item, name=name) for name in item.names if name not in done]


def _by_parts(
    ones: list[TaskOutput], layout: Layout, task_bytes: int, numbers: list[int]
) -> Iterator[tuple[Home, list[TaskOutput]]]:
    """Runs of parts of one item, under all its names together: they read the same."""
    item, cuts = ones[0].item, ones[0].cuts
    assert cuts is not None
    while numbers:
        first, run = numbers[0], 1
        offset, nbytes = cuts.range_of(first)
        home = layout.home_of_part(item, offset, nbytes)
        for number in numbers[1:]:
            offset, more = cuts.range_of(number)
            nbytes += more
            is_next = number == first + run and nbytes <= task_bytes
            if not is_next or layout.home_of_part(item, offset, more) != home:
                break
            run += 1
        yield home, [replace(one, parts=(first, run)) for one in ones]
        numbers = numbers[run:]


def _groups(index: Index) -> Iterator[list[Item]]:
    """Items in the order of the plan; those that belong together where the first of them is."""
    members: dict[int, list[Item]] = {}
    for number, first in enumerate(index.together):
        members.setdefault(first, []).append(index.items[number])
    yield from members.values()


class _Shared:
    """Finds items whose large ranges overlap."""

    def __init__(self, source_bytes: int) -> None:
        self._least_bytes = max(SHARED_BYTES, source_bytes // MOST_RANGES)
        self._ranges: list[tuple[int, int, int, int]] = []

    def add(self, number: int, parts: Iterable[Part]) -> None:
        for part in parts:
            for r in ranges_of(part):
                if r.nbytes >= self._least_bytes:
                    self._ranges.append((r.source, r.offset, r.offset + r.nbytes, number))

    def together(self, count: int) -> list[int]:
        first = list(range(count))

        def root(number: int) -> int:
            while first[number] != number:
                first[number] = first[first[number]]
                number = first[number]
            return number

        self._ranges.sort()
        source, reach, holder = -1, 0, 0
        for here, begin, end, number in self._ranges:
            if here != source:
                source, reach, holder = here, 0, number
            if min(reach, end) - begin >= self._least_bytes // 2:
                one, other = sorted((root(holder), root(number)))
                first[other] = one
            if end > reach:
                reach, holder = end, number
        self._ranges.clear()
        return [root(number) for number in range(count)]
