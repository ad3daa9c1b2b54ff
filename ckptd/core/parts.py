"""A node's part of a save: the shards that its ranks wrote; others lie on other nodes' disks (H27, H29).

"Complete for this node" is never more than that: a part is shipped as a node manifest, which grows by
revisions until the union over nodes covers the proven grid. Nothing here decides on a COMMIT or a deletion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.layouts import NamedShard, Role, parse_shard_name
from ckptd.core.topology import cells_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.layouts import Grid
    from ckptd.core.save import SealedSave
    from ckptd.core.told import Told
    from ckptd.core.topology import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A job over several nodes, as one of them sees it: what is not here may be on another's disk."""

    usual: frozenset[Cell] = frozenset()
    """Whose shards this node held of its last save."""
    told: tuple[Told, ...] = ()
    """What manifests of the tag prove, of whichever save; for a node without model states."""


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
