"""Select the wanted part of a committed copy, and judge a copy by itself: pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptd.base.names import DESCRIPTION
from ckptd.core.model.layouts import Role, is_in_roots
from ckptd.core.model.manifest import ManifestFile, cells_of, proven_topology
from ckptd.core.model.other_layouts import layout_of
from ckptd.core.model.records import ZERO
from ckptd.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ckptd.core.model.manifest import Cell, NodeManifest
    from ckptd.recover.select.inventory import LocalCheckpoint, RemoteInventory
    from ckptd.storage.remote.messages import CommitView


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A committed copy of one form on one remote, with what of it is wanted on this node."""

    remote: RemoteInventory
    view: CommitView
    manifests: tuple[NodeManifest, ...]
    files: tuple[ManifestFile, ...]
    """Files without extras; their paths are distinct."""
    extras: tuple[ManifestFile, ...] = ()
    late: tuple[ManifestFile, ...] = ()
    """Files of all nodes that came after its COMMIT."""
    is_all_for_each: bool = False
    """Every node of several wants all of it: which ranks run where is not known (docs/adr/0104)."""

    @property
    def all_for_each(self) -> str | None:
        """Say why every node is given all shards, where that is so; None: each node gets its own."""
        words = f"all shards of {self.view.commit.tag} are wanted on each node"
        why = (
            "nodes that saved unlike numbers of ranks, or not in order, do not tell which ranks run where now"
        )
        return f"{words}: {why}" if self.is_all_for_each else None

    @property
    def bytes(self) -> int:
        """Return the bytes of `files`."""
        return sum(file.bytes for file in self.files)

    @property
    def empty_folders(self) -> tuple[str, ...]:
        """Return the folders of the save with nothing in them, of all nodes."""
        found = {path for manifest in self.manifests for path in manifest.empty_folders}
        return tuple(sorted(found))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint by path, of all nodes' files without extras."""
        return {f.path: f.fingerprint for m in self.manifests for f in m.files if f.role is not Role.EXTRA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Tell how many nodes resume together, and which one this is."""

    count: int = 1
    rank: int = 0
    world_size: int | None = None
    """Ranks of the coming run; None: as many as saved it."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            msg = f"--node-rank {self.rank} is not one of --nnodes {self.count}"
            raise UsageError(msg, hint="ranks count from 0")

    def is_share(self, saved_ranks: int) -> bool:
        """Whether one node of several resumes with as many ranks as saved: another number wants all files."""
        return self.count > 1 and self.world_size in (None, saved_ranks)

    def ranks(self, saved_ranks: int) -> range | None:
        """Return the ranks that run on this node; None: not as many on each, or all files are wanted."""
        if not self.is_share(saved_ranks) or saved_ranks % self.count:
            return None
        each = saved_ranks // self.count
        return range(self.rank * each, (self.rank + 1) * each)


def is_self_contained(copy: Copy) -> bool:
    """A derived form that loads without its ZeRO form: whole at its folder's root."""
    return any(file.path == DESCRIPTION for file in copy.files)


def is_made_from(universal: Copy, fingerprints: Mapping[str, str]) -> bool:
    """Whether a derived form on a remote was made from just this save (H15)."""
    sources = [m.source for m in universal.manifests if m.source is not None]
    return bool(sources) and all(
        fingerprints.get(path) == mark for source in sources for path, mark in source.fingerprints
    )


def is_held(here: LocalCheckpoint, copy: Copy) -> bool:
    """Whether a folder holds every wanted shard of that save, whole (docs/internals/completeness.md).

    What lies beside them tells no saves apart: a note that somebody wrote over or took away would make the
    folder one that was saved again, and an older checkpoint the newest.
    """
    late = {file.path for file in copy.late}
    own = [file for file in copy.files if file.path not in late]
    roots = layout_of(copy.view.commit.tag, (file.path for file in own))[1]
    shards = [f for f in own if f.role is not Role.SIDE and is_in_roots(f.path, roots)] or own
    beside = (file.path for file in own if file.role is Role.SIDE)
    is_all_there = here.is_complete or all(path in here.facts for path in beside)
    found = {*here.listing.empty, *(head for path in here.facts for head in folders_above(path))}
    is_all_there &= found.issuperset(copy.empty_folders)
    return bool(shards) and is_all_there and all(is_here(here, file) for file in shards)


def folders_above(path: str) -> list[str]:
    """Return the folders that a path lies in."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def is_here(here: LocalCheckpoint, file: ManifestFile) -> bool:
    """Whether a folder holds that very file; of replicas of model states: its tensors."""
    facts = here.facts.get(file.path)
    if facts is None:
        return False
    if facts.fingerprint == file.fingerprint and bool(file.fingerprint or file.bytes == 0):
        return True
    # model states that every node has, with pickles of its own
    is_replica = file.role is Role.MODEL and file.shard.d is None
    return is_replica and facts.tensor_fingerprint == file.tensor_fingerprint is not None


def files_for_node(copy: Copy, nodes: Nodes) -> Copy:
    """Select the files of a copy that one node wants: the shards of its ranks, and what every rank reads.

    By ranks, not by who uploaded what: a node that was replaced uploaded under two names, and the stages of a
    pipeline have the same data-parallel ranks. Where nothing proves which ranks run here, all: what is too
    much costs time, what is another's costs the run.
    """
    grid = copy.view.commit.grid
    is_share = copy.view.commit.form == ZERO and nodes.is_share(grid.dp * grid.mm_count)
    cells = _cells_here(copy, nodes) if is_share else None
    files: dict[str, ManifestFile] = {}
    extras: dict[str, ManifestFile] = {}
    for file in (file for manifest in copy.manifests for file in manifest.files):
        if cells is None or _is_read(file, cells):
            (extras if file.role is Role.EXTRA else files).setdefault(file.path, file)
    files |= {file.path: file for file in copy.late}
    return replace(
        copy,
        files=tuple(files.values()),
        extras=tuple(extras.values()),
        is_all_for_each=is_share and cells is None,
    )


def files_for_ranks(copy: Copy, ranks: frozenset[int]) -> Copy:
    """Return the shards of some data-parallel ranks, and all that is nobody's alone.

    Raises:
        NotFoundError: a rank is not in the grid (66).
    """
    if not copy.view.commit.grid.has_shards:
        msg = f"{copy.view.commit.tag} has no shards of ranks"
        raise NotFoundError(msg, hint="leave --ranks out: every rank reads all of it")
    beyond = sorted(rank for rank in ranks if rank >= copy.view.commit.grid.dp)
    if beyond:
        commit = copy.view.commit
        msg = f"{commit.tag} has data-parallel ranks 0-{commit.grid.dp - 1}, not {beyond[0]}"
        raise NotFoundError(msg, hint="ranks are those in the names of its optimizer shards")
    return replace(copy, files=tuple(f for f in copy.files if f.shard.d is None or f.shard.d in ranks))


def _cells_here(copy: Copy, nodes: Nodes) -> frozenset[Cell] | None:
    """Return those of the ranks that run on this node.

    None: not known. Nodes that saved unlike numbers of ranks may get them dealt out otherwise now, though
    they are as many (3 and 1, then 2 and 2); so may ranks that were not in DeepSpeed's order.
    """
    grid = copy.view.commit.grid
    here, topology = nodes.ranks(grid.dp * grid.mm_count), proven_topology(grid, copy.manifests)
    if here is None or topology is None:
        return None
    found = [cells for manifest in copy.manifests if (cells := cells_of(manifest.files))]
    parts = [sorted(map(topology.rank_of, cells)) for cells in found]
    was_even = len(set(map(len, parts))) == 1 and _lie_within(parts, len(parts[0]))
    # a node that was replaced uploaded in two parts
    if not was_even and not _lie_within(parts, len(here)):
        return None
    return frozenset(map(topology.cell_of, here))


def _lie_within(parts: Iterable[Sequence[int]], each: int) -> bool:
    """Whether, with so many ranks on each node, no part is of two nodes."""
    return all(part[0] // each == part[-1] // each for part in parts)


def _is_read(file: ManifestFile, cells: Collection[Cell]) -> bool:
    """Whether ranks with these cells read it: optimizer shards each its own, model states of stage 3 beside
    those of the other model-parallel ranks, which DeepSpeed counts."""
    if file.role is Role.OPTIM:
        return (file.shard.d, file.shard.mm) in cells
    return file.shard.d is None or file.shard.d in {cell.d for cell in cells}
