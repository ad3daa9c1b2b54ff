"""Find the workers that hold the sources of an output, and cut it so that each uploads its own.

Pure. A home is the set of workers that see the same files on their own disk; nobody's bytes come from the
remote, whoever reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from ckptd.convert.parts import ranges_of
from ckptd.storage.stores.s3.parts import LEAST_PART_BYTES, PartLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ckptd.convert.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A line of the plan: an output under all of its names, or (no names) a comparison."""

    offset: int
    line_bytes: int
    nbytes: int
    names: tuple[str, ...]


Home = frozenset[str]
ANYWHERE: Home = frozenset()
MAX_PARTS = 10_000
SAVED_BYTES = 1 << 20
"""What would be one request becomes several for no less."""


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` of an output in one piece, and how many bytes of each home it is made of."""

    nbytes: int
    reads: tuple[tuple[Home, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Who reads, and how many bytes that others hold, or nobody."""

    home: Home
    foreign_bytes: int


def chosen(totals: Mapping[Home, int]) -> Choice:
    """Return the home that holds most of what is read."""
    whole = sum(totals.values())
    own = {home: sum(n for other, n in totals.items() if home <= other) for home in totals if home}
    if not own:
        return Choice(ANYWHERE, whole)
    home = max(own, key=lambda one: (own[one], sorted(one)))
    return Choice(home, whole - own[home])


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


class Layout:
    """How outputs are cut into parts, and whose they are.

    `part_bytes`: by an output's size that of its parts, where the destination joins them; `parts_of`: what an
    item is made of; `holders`: by source who holds it; `begun`: cuts of uploads that were begun, by name.
    """

    def __init__(
        self,
        part_bytes: Callable[[int], int] | None,
        parts_of: Callable[[Item], Iterable[Part]] = lambda _: (),
        holders: Mapping[int, Home] | None = None,
        begun: Mapping[str, PartLayout] | None = None,
    ) -> None:
        self._part_bytes = part_bytes
        self._parts_of = parts_of
        self._holders = holders or {}
        self._begun = begun or {}
        self._last: tuple[int, list[Run]] | None = None

    def cuts(self, item: Item, name: str, *, is_alone: bool) -> PartLayout | None:
        """Return the parts that an output is sent in; None: it is one worker's, whole.

        `is_alone`: nothing else reads what it reads.
        """
        if name in self._begun:
            return self._begun[name]
        if self._part_bytes is None or not name:
            return None
        even = PartLayout(item.nbytes, self._part_bytes(item.nbytes))
        borders = self._borders(item, even) if is_alone and self._holders else ()
        return replace(even, borders=borders) if borders or even.parts > 1 else None

    def _borders(self, item: Item, even: PartLayout) -> tuple[int, ...]:
        runs = self._runs(item)
        borders = borders_of(runs) if item.nbytes > LEAST_PART_BYTES else ()
        if even.parts == 1 and borders:
            ends = (0, *borders, item.nbytes)
            cut = sum(chosen(totals_of(runs, begin, end)).foreign_bytes for begin, end in pairwise(ends))
            if chosen(totals_of(runs)).foreign_bytes - cut < SAVED_BYTES:
                return ()
        return borders if replace(even, borders=borders).parts <= MAX_PARTS else ()

    def home_of_part(self, item: Item, offset: int, nbytes: int) -> Home:
        """Who is to send that piece of an output."""
        if not self._holders:
            return ANYWHERE
        return chosen(totals_of(self._runs(item), offset, offset + nbytes)).home

    def home(self, items: Iterable[Item]) -> Home:
        """Who is to send these whole."""
        if not self._holders:
            return ANYWHERE
        totals: dict[Home, int] = {}
        for item in items:
            for home, nbytes in totals_of(self._runs(item)).items():
                totals[home] = totals.get(home, 0) + nbytes
        return chosen(totals).home

    def _runs(self, item: Item) -> list[Run]:
        if self._last is None or self._last[0] != item.offset:
            self._last = item.offset, [self._run(part) for part in self._parts_of(item)]
        return self._last[1]

    def _run(self, part: Part) -> Run:
        reads: dict[Home, int] = {}
        for r in ranges_of(part):
            home = self._holders.get(r.source, ANYWHERE)
            reads[home] = reads.get(home, 0) + r.nbytes
        return Run(part.nbytes, tuple(reads.items()))
