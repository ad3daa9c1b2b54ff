"""Which rank of a run wrote which shard, as DeepSpeed's own topology numbers them (docs/adr/0133).

A shard's name tells two numbers, D and MM; its data-parallel rank alone tells no node, since pipeline stages
and tensor ranks have the same. Where the layout is not known, or manifests speak against it, nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckptd.core.layouts import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ckptd.core.layouts import Grid, NamedShard
    from ckptd.core.manifest import ManifestFile, NodeManifest
    from ckptd.core.save import SealedFile


class Cell(NamedTuple):
    """A place in the grid of a save: ZeRO data-parallel rank, model-parallel rank (D and MM of its name)."""

    d: int
    mm: int


def cells_of(files: Iterable[SealedFile | ManifestFile | NamedShard]) -> frozenset[Cell]:
    """Those whose optimizer shards are among the files."""
    return frozenset(
        Cell(f.shard.d, f.shard.mm or 0) for f in files if f.role is Role.OPTIM and f.shard.d is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """PipeModelDataParallelTopology: pipeline stage outermost, then data, tensor-parallel rank innermost."""

    dp: int
    tp: int
    pp: int

    def cell_of(self, rank: int) -> Cell:
        """What a rank of the run writes."""
        rest, tensor = divmod(rank, self.tp)
        stage, d = divmod(rest, self.dp)
        return Cell(d, stage * self.tp + tensor)

    def rank_of(self, cell: Cell) -> int:
        """Who of the run writes it.

        >>> Topology(dp=4, tp=1, pp=2).rank_of(Cell(1, 1)), Topology(dp=4, tp=2, pp=1).rank_of(Cell(1, 1))
        (5, 3)
        """
        stage, tensor = divmod(cell.mm, self.tp)
        return (stage * self.dp + cell.d) * self.tp + tensor

    def first_of_run(self, cells: Collection[Cell]) -> int | None:
        """The lowest of the ranks that write these; None: they do not follow each other, as a node's do."""
        ranks = sorted(map(self.rank_of, cells))
        return ranks[0] if ranks and ranks[-1] - ranks[0] + 1 == len(ranks) else None


def topology_of(grid: Grid, layers: Iterable[ManifestFile] = ()) -> Topology | None:
    """As the grid records it; before DeepSpeed 0.19.5 a pipeline's layer files tell its tensor parallelism,
    and what has no layers is no pipeline.

    None: it is not known, or sequence-parallel ranks stand between (their order is Megatron's).
    """
    if grid.mm_count == 1:
        return Topology(dp=grid.dp, tp=1, pp=1)
    is_recorded = grid.tp is not None and grid.pp is not None
    named = [file.shard.mm or 0 for file in layers]
    told = max(named) + 1 if named else None if grid.layers else grid.mm_count
    tp = grid.tp if is_recorded else told
    if not tp or grid.mm_count % tp or (grid.sp or 1) > 1:
        return None
    pp = grid.mm_count // tp
    return Topology(dp=grid.dp, tp=tp, pp=pp) if grid.pp in (None, pp) and grid.tp in (None, tp) else None


def proven_topology(grid: Grid, manifests: Sequence[NodeManifest]) -> Topology | None:
    """The same of a whole save; None also where a node held ranks that do not follow each other.

    With one rank a node nothing can speak against DeepSpeed's order.
    """
    layers = [file for m in manifests for file in m.files if file.role is Role.LAYER]
    found = topology_of(grid, layers)
    if found is None:
        return None
    parts = [cells for m in manifests if (cells := cells_of(m.files))]
    return found if all(found.first_of_run(cells) is not None for cells in parts) else None
