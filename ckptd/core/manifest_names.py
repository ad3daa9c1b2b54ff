"""What the name of a node manifest tells without its being read: enough to know whether reading is worth it.

With a thousand nodes a generation holds a thousand manifests. A node that waits need not read them: names say
how many optimizer shards are listed, and of what save. They only ever veto or let wait; what a COMMIT rests
on is read (docs/adr/0105).
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

from ckptd.core.identity import Model
from ckptd.core.layouts import NamedShard, Role, ShardKey
from ckptd.core.names import decode_name
from ckptd.core.topology import cells_of, topology_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptd.core.manifest import NodeManifest
    from ckptd.core.save import SaveMark

_HINT = re.compile(r"d(\d+)\.n(\d+)of(\d+)\.m([0-9a-f]{8})\.t(-?\d+)_(-?\d+)")
_MOST_DIGITS = 18
_HAVE, _WANT = attrgetter("have"), attrgetter("want")
_ROUNDING_SECONDS = 1


class ManifestName(Model):
    """A manifest that was not read."""

    node: str
    low: int
    """The lowest rank whose shard it lists: of several model-parallel ranks, as the run numbers them."""
    have: int
    """Optimizer shards that it lists."""
    want: int
    """Optimizer shards of the grid that it proves."""
    mark: str
    """Digest of step, grid and DeepSpeed's version."""
    first_seconds: int
    last_seconds: int
    """The save window, unix time."""


def hint_of(manifest: NodeManifest) -> str:
    """What stands between node and digest in the name of a ZeRO form's manifest; "" for derived forms."""
    if manifest.form != "zero":
        return ""
    have = sum(file.role is Role.OPTIM for file in manifest.files)
    want = manifest.grid.dp * manifest.grid.mm_count
    first, last = (at // 10**9 for at in (manifest.save_window.first, manifest.save_window.last))
    grid, low = manifest.grid, _lowest(manifest, want)
    mark = _mark(manifest.step, (grid.dp, grid.mm_count, grid.zero_stage), manifest.writer.ds_version)
    return f"d{low}.n{have}of{want}.m{mark}.t{first}_{last}~"


def _lowest(manifest: NodeManifest, want: int) -> int:
    """Older releases wrote the lowest data-parallel rank, which several nodes of a pipeline have: names look
    as they did, and tell of one model-parallel rank the same (docs/adr/0133)."""
    cells, topology = cells_of(manifest.files), topology_of(manifest.grid)
    if topology is None or manifest.grid.mm_count == 1:
        return min((cell.d for cell in cells), default=want)
    first = topology.first_of_run(cells)
    return want if first is None else first


def _mark(step: int, grid: tuple[int, int, int], ds_version: str | None) -> str:
    words = f"{step} {' '.join(map(str, grid))} {ds_version}"
    return hashlib.sha256(words.encode()).hexdigest()[:8]


@lru_cache(maxsize=8192)
def name_in(key: str) -> ManifestName | None:
    """What a key tells; None: of a derived form, or of a version that did not say it."""
    parts = key.rpartition("/")[2].split("~")
    found = _HINT.fullmatch(parts[1]) if len(parts) == 3 else None
    if found is None or any(len(digits) > _MOST_DIGITS for digits in found.groups()):
        return None
    low, have, want, mark, first, last = found.groups()
    return ManifestName(
        node=decode_name(parts[0]),
        low=int(low),
        have=int(have),
        want=int(want),
        mark=mark,
        first_seconds=int(first),
        last_seconds=int(last),
    )


def node_in(key: str) -> str:
    """Whose manifest a key names."""
    return decode_name(key.rpartition("/")[2].partition("~")[0])


def may_cover(names: Sequence[ManifestName]) -> bool:
    """Whether all optimizer shards may be listed; a grid without any is for a reader to judge."""
    # each of a thousand nodes asks this of a thousand names, and nearly always they are too few
    if sum(map(_HAVE, names)) < min(map(_WANT, names), default=1):
        return False
    most: dict[tuple[str, int], dict[str, int]] = {}
    for name in names:
        have = most.setdefault((name.mark, name.want), {})
        have[name.node] = max(have.get(name.node, 0), name.have)
    return any(sum(have.values()) >= want for (_, want), have in most.items())


def named_conflict(
    ours: SaveMark, names: Iterable[ManifestName], *, save_spread_seconds: float
) -> str | None:
    """Why `ours` is of another save than one of those; None: nothing that a name says speaks against it."""
    mark = _mark(ours.step, ours.grid, ours.ds_version)
    first, last = (at // 10**9 for at in (ours.window.first, ours.window.last))
    for name in names:
        if name.mark != mark:
            return f"{name.node} shipped another save, as the name of its manifest says"
        apart = max(first - name.last_seconds, name.first_seconds - last)
        if apart > save_spread_seconds + _ROUNDING_SECONDS:
            return f"{name.node} shipped another save: written {apart} s apart"
    return None


def absent_by_names(names: Iterable[ManifestName], read: Iterable[NodeManifest]) -> tuple[NamedShard, ...]:
    """Optimizer shards that no manifest lists, as far as names tell: a node's ranks follow each other.

    `read`: manifests that were read, at least one. None where a name does not tell: words about the wrong
    node are worse than no words.
    """
    read = tuple(read)
    grid, topology = read[0].grid, topology_of(read[0].grid)
    held = {cell for manifest in read for cell in cells_of(manifest.files)}
    for name in names:
        until = name.low + name.have
        if topology is None or (name.have and until > grid.dp * grid.mm_count):
            return ()
        held |= {topology.cell_of(rank) for rank in range(name.low, until)}
    return tuple(
        NamedShard(role=Role.OPTIM, shard=ShardKey(d=d, mm=mm))
        for mm in range(grid.mm_count)
        for d in range(grid.dp)
        if (d, mm) not in held
    )
