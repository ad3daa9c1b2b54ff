"""Learn the grid and the step of a save from peers' manifests, on a node without model states (ADR 0104).

Evidence is used only if it contradicts none of this node's shards: otherwise the part would be sealed with
another save's step and might be committed beside it. Without evidence the node asks again later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.layouts import Grid, parse_shard_name
from ckptd.core.model.manifest import ManifestName, named_conflict
from ckptd.core.model.save import SaveMark, SaveWindow, differs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.shard_facts import ShardFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEvidence:
    """Hold what the manifests of one generation prove: the grid and the step of its save."""

    grid: Grid
    step: int
    node: str
    optimizer_step: int | None = None
    """None: an older release made the manifest, or no shard tells."""
    marks: tuple[SaveMark, ...] = ()
    """Marks of the manifests that were read."""
    named: tuple[ManifestName, ...] = ()
    """Those that were not."""
    listed: frozenset[tuple[str, int, str]] | None = None
    """(path, bytes, fingerprint) of what is committed; None: the generation is open."""


def find_evidence(
    evidence: Iterable[PeerEvidence],
    shards: Mapping[str, FileFacts],
    written: Mapping[str, int],
    *,
    save_spread_seconds: float,
) -> PeerEvidence | None:
    """Return the evidence that fits this node's own shards; None: none fits, or two disagree.

    A committed generation matches only the files it lists (this matters after journal loss); an open one also
    matches files not uploaded yet. `written`: path → mtime_ns.
    """
    fitting: dict[tuple[int, int, int, int], PeerEvidence] = {}
    for one in evidence:
        grid = one.grid
        inside = {path: fact for path, fact in shards.items() if _is_inside(path, grid)}
        if not inside or not _is_proven_by(inside, one):
            continue
        if one.listed is not None:
            if {(path, fact.bytes, fact.fingerprint) for path, fact in inside.items()} <= one.listed:
                return one
        elif _is_of(inside, written, one, save_spread_seconds):
            fitting[one.step, grid.dp, grid.mm_count, grid.zero_stage] = one
    return next(iter(fitting.values())) if len(fitting) == 1 else None


def _is_inside(path: str, grid: Grid) -> bool:
    """Shards of a larger world that saved under this tag before may lie beside it."""
    named = parse_shard_name(path.rpartition("/")[2])
    return named is not None and (named.shard.d or 0) < grid.dp and (named.shard.mm or 0) < grid.mm_count


def _is_proven_by(shards: Mapping[str, FileFacts], evidence: PeerEvidence) -> bool:
    """Tell whether the shards agree with the evidence: number of ranks, stage and optimizer step."""
    known = [fact.facts for fact in shards.values() if fact.facts is not None]
    counts = {max(facts.partition_count) for facts in known if facts.partition_count}
    stages = {facts.zero_stage for facts in known if facts.zero_stage is not None}
    steps = {facts.optimizer_step for facts in known if facts.optimizer_step is not None}
    is_step = evidence.optimizer_step is None or steps <= {evidence.optimizer_step}
    return counts == {evidence.grid.dp} and stages <= {evidence.grid.zero_stage} and is_step


def _is_of(
    shards: Mapping[str, FileFacts],
    written: Mapping[str, int],
    evidence: PeerEvidence,
    save_spread_seconds: float,
) -> bool:
    """Tell whether the generation would accept these shards, as `choose_generation` decides later."""
    known = [fact.facts for fact in shards.values() if fact.facts is not None]
    mark = SaveMark(
        run_id=None,
        step=evidence.step,
        grid=(evidence.grid.dp, evidence.grid.mm_count, evidence.grid.zero_stage),
        ds_version=_first(known, "ds_version"),
        window=SaveWindow(
            first=min(written[path] for path in shards), last=max(written[path] for path in shards)
        ),
        tensors=tuple(
            sorted((path, fact.tensor_fingerprint or fact.fingerprint) for path, fact in shards.items())
        ),
    )
    return named_conflict(mark, evidence.named, save_spread_seconds=save_spread_seconds) is None and all(
        differs(mark, other, save_spread_seconds=save_spread_seconds) is None for other in evidence.marks
    )


def _first(known: list[ShardFacts], what: str) -> str | None:
    return next((value for facts in known if (value := getattr(facts, what)) is not None), None)
