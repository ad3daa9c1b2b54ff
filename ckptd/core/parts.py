"""A node's part of a save: the shards that its ranks wrote; others lie on other nodes' disks (H27, H29).

"Complete for this node" is never more than that: a part is shipped as a node manifest, which grows by
revisions until the union over nodes covers the proven grid. Nothing here decides on a COMMIT or a deletion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.layouts import Grid, NamedShard, Role, parse_shard_name
from ckptd.core.topology import cells_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptd.core.facts import FileFacts
    from ckptd.core.save import SealedSave
    from ckptd.core.topology import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What another node's manifest of the same tag proves, for a node without model states."""

    grid: Grid
    step: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A job over several nodes, as one of them sees it: what is not here may be on another's disk."""

    usual: frozenset[Cell] = frozenset()
    """Whose shards this node held of its last save."""
    told: Told | None = None


def may_be_elsewhere(
    spread: Spread | None, present: Iterable[NamedShard], grid: Grid, *, is_in_flight: bool
) -> bool:
    """Whether what lacks of the grid is other nodes' business: this node's ranks have all written.

    A rank that saved here before is waited for while the save is in flight; which ranks live here is known
    from the second save on, so a first part may grow (H27).
    """
    here = cells_of(present)
    if spread is None or not here:
        return False
    expected = {cell for cell in spread.usual if cell.d < grid.dp and cell.mm < grid.mm_count}
    return not (is_in_flight and expected - here)


def told_grid(spread: Spread | None, shards: Mapping[str, FileFacts]) -> Grid | None:
    """The grid that another node proved, where this node's shards bear it out but cannot prove it."""
    told = spread.told if spread is not None else None
    counts = {max(f.facts.partition_count) for f in shards.values() if f.facts and f.facts.partition_count}
    if told is None or counts != {told.grid.dp}:
        return None
    return told.grid.model_copy(update={"proof": f"{told.node}: {told.grid.proof}"})


def replicas(save: SealedSave) -> frozenset[str]:
    """Paths of a part that the node of data-parallel rank 0 has too, and sends: `mp_rank_*` (ZeRO-1/2)."""
    if not save.is_part:
        return frozenset()
    owned = {f.shard.mm for f in save.files if f.role is Role.OPTIM and f.shard.d == 0}
    return frozenset(
        f.path for f in save.files if f.role is Role.MODEL and f.shard.d is None and f.shard.mm not in owned
    )


def role_of(path: str) -> Role | None:
    """What a shard is for, by its name."""
    named = parse_shard_name(path.rpartition("/")[2])
    return named.role if named else None
