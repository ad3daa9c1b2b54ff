"""Group outputs into tasks: neighbours, and outputs of the same source bytes, near the sources.

Pure: a plan's index in, groups of lines out. What is larger than a part of an upload is cut where the
destination joins parts; elsewhere an output is one worker's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import IO, TYPE_CHECKING

from ckptd.conversion.parts import Literal, Part, Range, decode, ranges_of
from ckptd.conversion.plan import MAX_LINE_BYTES, Header, PlanReader, trailer_of
from ckptd.conversion.reader import pieces
from ckptd.errors import DamagedError
from ckptd.storage.stores.s3.parts import LEAST_PART_BYTES, PartLayout, held_parts, layout_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ckptd.conversion.plan import Trailer
    from ckptd.conversion.remote.uploader import HeldSources


# --- Homes: the workers that hold the sources of an output --------------------------------------------
# A home is the set of workers that see the same files on their own disk; nobody's bytes come from the remote,
# whoever reads them. An output is cut so that each worker uploads its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """A line of the plan: an output under all of its names, or (no names) a comparison."""

    offset: int
    line_bytes: int
    nbytes: int
    names: tuple[str, ...]


Home = frozenset[str]
ANYWHERE: Home = frozenset()
MAX_PARTS = 10_000
LARGE_BYTES = 32 << 20
"""Size from which outputs are begun first."""
SAVED_BYTES = 1 << 20
"""Bytes that a split by holders must save before one request becomes several."""


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` of an output in one piece, and how many bytes of each home it is made of."""

    nbytes: int
    reads: tuple[tuple[Home, int], ...] = ()


@dataclass(frozen=True, slots=True)
class HomeChoice:
    """Hold the home chosen for a piece and the bytes of the piece that only other homes hold."""

    home: Home
    foreign_bytes: int


def chosen(totals: Mapping[Home, int]) -> HomeChoice:
    """Return the home that holds most of what is read."""
    whole = sum(totals.values())
    own = {home: sum(n for other, n in totals.items() if home <= other) for home in totals if home}
    if not own:
        return HomeChoice(ANYWHERE, whole)
    home = max(own, key=lambda one: (own[one], sorted(one)))
    return HomeChoice(home, whole - own[home])


def totals_of(runs: Iterable[Run], begin: int = 0, end: int | None = None) -> dict[Home, int]:
    """Bytes by home that are read for bytes `begin` to `end` of an output; a run is read evenly."""
    found: dict[Home, int] = {}
    at = 0
    for run in runs:
        low, high = max(begin, at), at + run.nbytes if end is None else min(end, at + run.nbytes)
        at += run.nbytes
        if low < high:
            for home, nbytes in run.reads:
                found[home] = found.get(home, 0) + nbytes * (high - low) // run.nbytes
    return found


def borders_of(runs: Sequence[Run], least_bytes: int = LEAST_PART_BYTES) -> tuple[int, ...]:
    """Return cuts into stretches of `least_bytes` or more (but the last) with the fewest foreign bytes.

    Cuts are at the ends of runs alone: what is too small for a stretch goes with whom it costs least.
    """
    blocks = _blocks(runs)
    if len({home for run in blocks for home, _ in run.reads}) < 2:
        return ()
    best: list[tuple[int, int, int] | None] = [(0, 0, 0), *([None] * len(blocks))]
    for last in range(1, len(blocks) + 1):
        totals: dict[Home, int] = {}
        nbytes = largest = 0
        for first in range(last - 1, -1, -1):
            nbytes += blocks[first].nbytes
            largest = max(largest, blocks[first].nbytes)
            for home, count in blocks[first].reads:
                totals[home] = totals.get(home, 0) + count
            before = best[first]
            if before is None or (nbytes < least_bytes and last < len(blocks)):
                continue
            cost = before[0] + chosen(totals).foreign_bytes, before[1] + 1, first
            best[last] = min(best[last] or cost, cost)
            if nbytes - largest >= 2 * least_bytes:
                break  # what is longer costs no less than when it is cut once more
    return _merged(blocks, best)


def _blocks(runs: Iterable[Run]) -> list[Run]:
    """Neighbours that read of the same home alone, as one."""
    blocks: list[Run] = []
    for run in runs:
        if (
            blocks
            and len(run.reads) == len(blocks[-1].reads) == 1
            and run.reads[0][0] == blocks[-1].reads[0][0]
        ):
            home, nbytes = blocks[-1].reads[0]
            reads = ((home, nbytes + run.reads[0][1]),)
            blocks[-1] = Run(blocks[-1].nbytes + run.nbytes, reads)
        else:
            blocks.append(run)
    return blocks


def _merged(blocks: Sequence[Run], best: Sequence[tuple[int, int, int] | None]) -> tuple[int, ...]:
    """Return the borders that `best` leads to, less those between stretches of one home."""
    ends = [0, *accumulate(run.nbytes for run in blocks)]
    found: list[int] = []
    last, after = len(blocks), None
    while last:
        step = best[last]
        assert step is not None
        home = chosen(totals_of(blocks[step[2] : last])).home
        if after is not None and home != after:
            found.append(ends[last])
        last, after = step[2], home
    return tuple(reversed(found))


class CutLayout:
    """Describe how outputs are cut into parts, and who holds each source.

    `part_bytes`: by an output's size that of its parts, where the destination joins them; `parts_of`: what an
    item is made of; `holders`: by source who holds it; `begun`: cuts of uploads that were begun, by name;
    `held`: the sources, where the destination's server copies parts from them.
    """

    def __init__(
        self,
        part_bytes: Callable[[int], int] | None,
        parts_of: Callable[[PlanLine], Iterable[Part]] = lambda _: (),
        holders: Mapping[int, Home] | None = None,
        begun: Mapping[str, PartLayout] | None = None,
        held: HeldSources | None = None,
    ) -> None:
        self._held = held
        self._part_bytes = part_bytes
        self._parts_of = parts_of
        self._holders = holders or {}
        self._begun = begun or {}
        self._last: tuple[int, list[Run]] | None = None

    def cuts(self, item: PlanLine, name: str, *, is_alone: bool) -> PartLayout | None:
        """Return the parts that an output is sent in; None: it is one worker's, whole.

        `is_alone`: nothing else reads what it reads.
        """
        if name in self._begun:
            return self._begun[name]
        if self._part_bytes is None or not name:
            return None
        even = PartLayout(item.nbytes, self._part_bytes(item.nbytes))
        copied = self._copied(item, even.part_bytes)
        if copied is not None:
            return copied
        borders = self._borders(item, even) if is_alone and self._holders else ()
        return replace(even, borders=borders) if borders or even.parts > 1 else None

    def _copied(self, item: PlanLine, part_bytes: int) -> PartLayout | None:
        """Return the parts of which the server copies some; None: it can copy none."""
        if self._held is None or item.nbytes < LEAST_PART_BYTES:
            return None
        held = held_parts(self._held.ranges_of(self._parts_of(item)), item.nbytes)
        layout = layout_with(held, item.nbytes, part_bytes)
        return layout if held and layout.parts <= MAX_PARTS else None

    def _borders(self, item: PlanLine, even: PartLayout) -> tuple[int, ...]:
        runs = self._runs(item)
        borders = borders_of(runs) if item.nbytes > LEAST_PART_BYTES else ()
        if even.parts == 1 and borders:
            ends = (0, *borders, item.nbytes)
            cut = sum(chosen(totals_of(runs, begin, end)).foreign_bytes for begin, end in pairwise(ends))
            if chosen(totals_of(runs)).foreign_bytes - cut < SAVED_BYTES:
                return ()
        return borders if replace(even, borders=borders).parts <= MAX_PARTS else ()

    def home_of_part(self, item: PlanLine, offset: int, nbytes: int) -> Home:
        """Return the home that should upload a piece of an output."""
        if not self._holders:
            return ANYWHERE
        return chosen(totals_of(self._runs(item), offset, offset + nbytes)).home

    def home(self, items: Iterable[PlanLine]) -> Home:
        """Return the home that should upload these outputs whole."""
        if not self._holders:
            return ANYWHERE
        totals: dict[Home, int] = {}
        for item in items:
            for home, nbytes in totals_of(self._runs(item)).items():
                totals[home] = totals.get(home, 0) + nbytes
        return chosen(totals).home

    def _runs(self, item: PlanLine) -> list[Run]:
        if self._last is None or self._last[0] != item.offset:
            self._last = item.offset, [self._run(part) for part in self._parts_of(item)]
        return self._last[1]

    def _run(self, part: Part) -> Run:
        reads: dict[Home, int] = {}
        for r in ranges_of(part):
            home = self._holders.get(r.source, ANYWHERE)
            reads[home] = reads.get(home, 0) + r.nbytes
        return Run(part.nbytes, tuple(reads.items()))


SHARED_BYTES = 1 << 20
"""Ranges below this are rather read twice than tied together."""
MOST_RANGES = 200_000
MOST_FILES = 256
MOST_LINE_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
"""An arranged piece is made from its beginning, also where a part begins in its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A plan without its parts, and which items read the same bytes."""

    header: Header
    identities: list[tuple[int, ...]]
    trailer: Trailer
    items: list[PlanLine]
    together: list[int]
    """Item → the first item that reads large ranges of the same bytes; itself where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput:
    """Name an output of a task: an item under one name, whole or (first, count) of its parts."""

    item: PlanLine
    name: str
    parts: tuple[int, int] | None = None
    cuts: PartLayout | None = None
    """Borders of the parts of its upload."""


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
    items: list[PlanLine] = []
    links: dict[str, tuple[str, ...]] = {}
    shared = _Shared(sum(s.bytes for s in reader.header.sources))
    at = stream.tell()
    while line := stream.readline(MAX_LINE_BYTES):
        raw = json.loads(line)
        if "end" in raw:
            named = [
                PlanLine(
                    offset=i.offset,
                    line_bytes=i.line_bytes,
                    nbytes=i.nbytes,
                    names=i.names + links.get(i.names[0], ()) if i.names else (),
                )
                for i in items
            ]
            together = shared.together(len(items))
            trailer = trailer_of(raw)
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
            items.append(PlanLine(offset=at, line_bytes=len(line), nbytes=nbytes, names=names))
        at += len(line)
    raise DamagedError("the plan ends early", hint="convert again; nothing was published")


def without_links(index: Index) -> Index:
    """Drop second names of outputs, for a destination that makes them without bytes."""
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
    index: Index, done: set[str], layout: CutLayout, *, task_bytes: int, missing: dict[str, list[int]]
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


def _wanted(item: PlanLine, done: set[str]) -> list[TaskOutput]:
    if not item.names:
        return [TaskOutput(item=item, name="")]
    return [TaskOutput(item=item, name=name) for name in item.names if name not in done]


def _by_parts(
    ones: list[TaskOutput], layout: CutLayout, task_bytes: int, numbers: list[int]
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


def _groups(index: Index) -> list[list[PlanLine]]:
    """Return items that belong together: large ones first, else where the first of them is in the plan.

    An upload of many parts is joined and may be read back when all are there, by one worker: others must
    have work then.
    """
    members: dict[int, list[PlanLine]] = {}
    for number, first in enumerate(index.together):
        members.setdefault(first, []).append(index.items[number])
    largest = {
        first: max((item.nbytes for item in items if item.names), default=0)
        for first, items in members.items()
    }
    order = sorted(members, key=lambda first: -largest[first] if largest[first] >= LARGE_BYTES else 0)
    return [members[first] for first in order]


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
