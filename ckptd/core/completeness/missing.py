"""Find the ranks' shards that a save will most likely never get, and the nodes that held them last.

The facts come from manifests and heartbeats; they are reported to people, nothing is committed or deleted by
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base.humanize import ago, ranks_in_words
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import Cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from ckptd.core.model.heartbeat import SeenNode
    from ckptd.core.model.layouts import NamedShard

INCOMPLETE_SECONDS = 60.0
"""Time from the seal of a part until missing shards are named; replicas are left to their owner as long."""
SLOW_SECONDS = 180.0
"""Time until missing shards of a live node are named: it may be about to report the save."""
MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPart:
    """Describe a part of a tag that another node uploaded and no COMMIT lists."""

    node: str
    generation: int
    last_seconds: int
    """The end of its save window, by that node's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncommittedSave:
    """Describe a generation of a tag that is not committed."""

    missing: Sequence[NamedShard]
    branch: int
    step: int
    generation: int
    mm_count: int
    age_seconds: float
    """Seconds since a part of it was sealed or uploaded."""
    parts: Sequence[MissingPart] = ()
    """Parts of its tag, in all open generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingShards:
    """Describe shards that will most likely never be uploaded."""

    text: str
    apart: tuple[str, ...] = ()
    """Nodes that uploaded their part as another save of the tag: the tag has to be saved again."""


def late(save: UncommittedSave, others: Sequence[SeenNode]) -> MissingShards | None:
    """Return the ranks that seem missing for good, and their last nodes; None: they may still be uploaded.

    A node that is alive, has that save and has not sent all it has of it is waited for, however long its
    upload takes.
    """
    lacking = {Cell(s.shard.d, s.shard.mm or 0) for s in save.missing if s.shard.d is not None}
    coming = {seen.node for seen in others if _is_coming(seen, save)}
    held = {seen: _held(seen, lacking) for seen in others}
    lost = lacking - {cell for seen, here in held.items() if seen.node in coming for cell in here}
    if save.age_seconds < SLOW_SECONDS:
        lost -= {cell for seen, here in held.items() if not seen.is_dead for cell in here}
    if save.age_seconds < INCOMPLETE_SECONDS or not save.missing or (lacking and not lost):
        return None
    if not lacking:
        text = f"no node has sent {_model_names(save.missing)}"
    else:
        text = f"missing {_words(lost, save.mm_count)} ({_where(lost, held, others, save.mm_count)})"
    here = {part.node for part in save.parts if part.generation == save.generation}
    apart = {p.node: p for p in sorted(save.parts, key=lambda p: p.generation) if p.node not in here | coming}
    return MissingShards(text=text + _other_saves(apart.values()), apart=tuple(sorted(apart)))


def _held(seen: SeenNode, lacking: Set[Cell]) -> frozenset[Cell]:
    """Return those of the ranks that a node's heartbeat lists for its newest save."""
    beat = seen.heartbeat
    if beat is None:
        return frozenset()
    if beat.shards is None:
        return frozenset(cell for cell in lacking if cell.d in beat.ranks)
    return frozenset(lacking & {Cell(*pair) for pair in beat.shards})


def _is_coming(seen: SeenNode, save: UncommittedSave) -> bool:
    """Tell whether a live node may still upload shards of that save that no manifest lists yet.

    Whose newest save is in another generation already sends nothing into this one; a rank that came later
    ends the save window later, and so does a save that was saved again.
    """
    newest = seen.heartbeat.newest if seen.heartbeat is not None else None
    if seen.is_dead or newest is None or newest.step < save.step:
        return False
    # of before a rewind; who was replaced since knows of none, and calls this very save so
    if newest.branch < save.branch and newest.step > save.step:
        return False
    sent = {part.last_seconds for part in save.parts if part.node == seen.node}
    if not sent:
        return True
    return newest.step == save.step and newest.last_seconds is not None and newest.last_seconds not in sent


def _other_saves(apart: Iterable[MissingPart]) -> str:
    """Word the two newest other saves, each with some of its nodes."""
    by_generation: dict[int, list[str]] = {}
    for part in apart:
        by_generation.setdefault(part.generation, []).append(part.node)
    words = ""
    for generation, nodes in sorted(by_generation.items())[-2:]:
        several = "nodes" if len(nodes) > 1 else "node"
        who = f"{several} {_some(sorted(nodes))}"
        words += f"; {who} uploaded another save of this tag, as generation {generation}"
    return words


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _model_names(missing: Iterable[NamedShard]) -> str:
    return _some([f"mp_rank_{s.shard.mm or 0:02d}_model_states.pt" for s in missing if s.role is Role.MODEL])


def _words(cells: Set[Cell], mm_count: int) -> str:
    """Runs of data-parallel ranks, and of which `mp_rank_*` where a save has several."""
    of_mm: dict[int, set[int]] = {}
    for cell in cells:
        of_mm.setdefault(cell.mm, set()).add(cell.d)
    alike: dict[frozenset[int], list[int]] = {}
    for mm, ds in sorted(of_mm.items()):
        alike.setdefault(frozenset(ds), []).append(mm)
    return " and ".join(
        f"{'rank' if len(ds) == 1 else 'ranks'} {ranks_in_words(ds)}"
        + (f" of mp_rank {ranks_in_words(mms)}" if mm_count > 1 else "")
        for ds, mms in alike.items()
    )


def _where(
    lost: Set[Cell], held: dict[SeenNode, frozenset[Cell]], others: Sequence[SeenNode], mm_count: int
) -> str:
    """Word which nodes held the ranks last; for ranks without a known node, the nodes not heard of."""
    places = [
        (seen, lost & here) for seen, here in sorted(held.items(), key=lambda row: row[0].node) if lost & here
    ]
    several = len(places) > 1
    said = [
        f"{_words(here, mm_count)} " * several + f"last seen on {last_seen(seen)}" for seen, here in places
    ]
    unknown = lost - {cell for _, here in places for cell in here}
    if unknown:
        silent = [last_seen(seen) for seen in others if seen.is_dead]
        more = f"; not heard of: {', '.join(silent)}" if silent else ""
        which = f"{_words(unknown, mm_count)}: " if places else ""
        said.append(f"{which}no node is known to hold them{more}")
    return "; ".join(said)


def last_seen(seen: SeenNode) -> str:
    """`gpu-3, 14 min ago`, and how that is known."""
    if seen.seconds_ago is None:
        return f"{seen.node}, nobody knows when"
    by_clock = "" if seen.is_store_time else " by the nodes' own clocks"
    return f"{seen.node}, {ago(seen.seconds_ago)} ago{by_clock}"
