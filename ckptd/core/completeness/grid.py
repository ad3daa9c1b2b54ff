"""Prove the grid of a save by metadata inside its shards, else by names of shards known before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.completeness.peer_evidence import PeerEvidence
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import Grid, NamedShard, Role, parse_shard_name
from ckptd.core.model.shard_facts import ShardFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.core.model.manifest import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Hold what one node knows of a job over several: shards that are not here may be on another's disk."""

    usual: frozenset[Cell] = frozenset()
    """Ranks whose shards this node held of its last save."""
    evidence: tuple[PeerEvidence, ...] = ()
    """Grids and steps that manifests of the tag prove, of any save; for a node without model states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything beside the folder that a verdict needs.

    `quiet_seconds`: since when no identity changed, by our monotonic clock; by default nobody writes there;
    `is_in_flight`: changed less than max(60 s, 3 × settle) ago or held open for writing;
    `widest_save_seconds`: widest window seen in this job.
    """

    settle_seconds: float = 0.0
    quiet_seconds: float = math.inf
    is_in_flight: bool = False
    save_spread_seconds: float
    widest_save_seconds: float = 0.0
    accepted: frozenset[tuple[tuple[str, str], ...]] = frozenset()
    """Fingerprint sets of saves that a person accepted."""
    known_grids: frozenset[tuple[int, int, int]] = frozenset()
    """(dp, mm_count, stage) proven earlier in this job: names that fill one need no readable pickle."""
    run_id: str | None = None
    spread: Spread | None = None
    """The job runs on several nodes; None: all of a save lies here."""
    evidence: PeerEvidence | None = None
    """The evidence that counts, of all that `spread` offers."""
    saw_end: bool = False
    """The file that ends a save was seen to appear in the folder, or the folder itself (markers.end_mark)."""
    is_to_send: bool = True
    """False: what the folder is called does not matter; a save that no remote takes may still be whole."""


def named(path: str) -> NamedShard:
    found = parse_shard_name(path.rpartition("/")[2])
    assert found is not None
    return found


def known(shards: Mapping[str, FileFacts]) -> list[tuple[str, ShardFacts]]:
    return [(path, fact.facts) for path, fact in shards.items() if fact.facts is not None]


def prove_grid(shards: Mapping[str, FileFacts], context: Context) -> tuple[Grid | None, str | None]:
    """Return the grid that the shards of one root prove, or why there is none yet."""
    read = known(shards)
    if len(read) < len(shards) and any(f.archive is Archive.LEGACY or f.reason for f in shards.values()):
        return _grid_from_names(shards, context)
    model = sorted(
        ((p, f) for p, f in read if named(p).role is Role.MODEL), key=lambda row: named(row[0]).shard.d or 0
    )
    optim = [(p, f) for p, f in read if named(p).role is Role.OPTIM]
    if not model:
        evidence = context.evidence
        if evidence is None:
            return None, "no model states yet: the grid is not proven"
        return evidence.grid.model_copy(update={"proof": f"{evidence.node}: {evidence.grid.proof}"}), None
    path, first = model[0]
    dp = _dp(model, optim)
    if dp is None:
        return None, f"{path} does not tell the data-parallel size"
    mm = _mm(first)
    # ranks beyond may be left by a larger world of another stage
    stages = [f.zero_stage for p, f in read if f.zero_stage is not None and (named(p).shard.d or 0) < dp]
    stage = max(stages) if stages else 3 if _has_stage3_names(shards) else None
    if stage is None:
        return None, "no optimizer shard yet: the ZeRO stage is not proven"
    experts = _experts(model, stage)
    return (
        Grid(
            dp=dp,
            mm_count=mm,
            tp=first.tp,
            pp=first.pp,
            sp=first.sp,
            ep=first.ep or _expert_parallel(dp, optim, experts),
            zero_stage=stage,
            layers=tuple(sorted({n for _, f in model for n in f.layers})),
            experts=experts,
            stage_experts=_stage_experts(model, mm, first.tp) if experts else (),
            experts_split=bool(experts) and _are_split(dp, first.tp, optim),
            proof=f"{path}: dp_world_size {first.dp_world_size}, mp_world_size {first.mp_world_size}",
        ),
        None,
    )


def expert_notes(shards: Mapping[str, FileFacts], grid: Grid) -> tuple[str, ...]:
    """Return the conditions of a resume from the universal form; AutoEP's experts load with any size."""
    if (grid.ep or 1) == 1 or any(facts.autoep for _, facts in known(shards)):
        return ()
    return (
        f"experts are shared by {grid.ep} ranks: the universal form resumes with ep_size {grid.ep} alone",
    )


def _experts(model: list[tuple[str, ShardFacts]], stage: int) -> tuple[int, ...]:
    """Experts per layer with a file each; at stage 3 (AutoEP alone) the optimizer shards hold them all."""
    experts = max((f.num_experts for _, f in model), key=len, default=())
    return experts if stage < 3 and any(n > 1 for n in experts) else ()


def _stage_experts(
    model: list[tuple[str, ShardFacts]], mm: int, tp: int | None
) -> tuple[tuple[int, ...], ...]:
    """Return the experts per MoE layer of each pipeline stage, whose first tensor rank tells; () for one
    model-parallel rank."""
    if mm == 1:
        return ()
    per_stage = tp or mm
    found: list[tuple[int, ...]] = [()] * max(1, mm // per_stage)
    for path, facts in model:
        stage = (named(path).shard.mm or 0) // per_stage
        if stage < len(found):
            found[stage] = max(found[stage], facts.num_experts, key=len)
    return tuple(found)


def _are_split(dp: int, tp: int | None, optim: list[tuple[str, ShardFacts]]) -> bool:
    """Tell whether the experts are cut over the tensor ranks: then each rank's data-parallel group shares
    them, else all ranks of the pipeline stage do.
    """
    if tp is None or tp == 1:
        return False
    for _, facts in optim:
        if facts.ep == 1:
            return dp * tp not in facts.partition_count
        if facts.ep is not None:
            return dp // facts.ep in facts.partition_count
    return False


def _expert_parallel(dp: int, optim: list[tuple[str, ShardFacts]], experts: tuple[int, ...]) -> int | None:
    """Return how many ranks share the experts: as the optimizer's groups are called, else by what they are
    partitioned over, fewer ranks than the others."""
    named_so = {f.ep for _, f in optim if f.ep is not None}
    if experts and len(named_so) == 1:
        return named_so.pop()
    counts = {n for _, f in optim for n in f.partition_count if n > 0}
    return dp // min(counts) if experts and counts and dp % min(counts) == 0 else None


def _dp(model: list[tuple[str, ShardFacts]], optim: list[tuple[str, ShardFacts]]) -> int | None:
    """Return the data-parallel size; only the lowest rank's model states are sure to be of this world."""
    if model[0][1].dp_world_size:
        return model[0][1].dp_world_size
    claims = [max(f.partition_count) for _, f in optim if f.partition_count]
    return max(claims) if claims else None


def _mm(facts: ShardFacts) -> int:
    degrees = (facts.tp or 1) * (facts.pp or 1)
    return max(facts.mp_world_size or 1, degrees)


def _has_stage3_names(shards: Mapping[str, FileFacts]) -> bool:
    return any(named(p).role is Role.MODEL and named(p).shard.d is not None for p in shards)


def _grid_from_names(shards: Mapping[str, FileFacts], context: Context) -> tuple[Grid | None, str | None]:
    """Return a grid by names alone, for unreadable shards: it must be one that this job proved before.

    Without an earlier proof the names must have been quiet for ten times the settle time.
    """
    names = [named(p).shard for p in shards if named(p).role is Role.OPTIM]
    unread = next((p for p, f in shards.items() if f.facts is None), "a shard")
    if not names:
        return None, f"{unread} cannot be read and no optimizer shard is there"
    dp = max((s.d or 0) for s in names) + 1
    mm = max((s.mm or 0) for s in names) + 1
    stage = 3 if _has_stage3_names(shards) else 2
    seen = (dp, mm, stage) in context.known_grids
    if not seen and context.quiet_seconds < 10 * context.settle_seconds:
        return None, f"{unread} cannot be read; waiting for ten times the settle time"
    proof = "names, a grid proven earlier" if seen else "names, quiet for ten times the settle time"
    return Grid(dp=dp, mm_count=mm, zero_stage=stage, proof=proof), None


def two_saves(shards: Mapping[str, FileFacts], grid: Grid) -> str | None:
    """Return a contradiction that two shards of one save cannot have."""
    widest = {max(facts.partition_count) for _, facts in known(shards) if facts.partition_count}
    # experts that no ranks share are partitioned over all ranks of the pipeline stage
    allowed = {grid.dp, grid.dp * (grid.tp or 1)} if any(grid.experts) else {grid.dp}
    # where nothing but experts is trained, no group is partitioned over all ranks
    only_experts = len(widest) == 1 and any(grid.experts) and grid.dp == max(widest) * (grid.ep or 1)
    for path, facts in known(shards):
        if facts.partition_count and max(facts.partition_count) not in allowed and not only_experts:
            return f"{path} is one of {max(facts.partition_count)} ranks, {grid.proof}"
    for what in ("global_steps", "optimizer_step", "ds_version", "zero_stage"):
        seen: tuple[str, object] | None = None
        for path, facts in known(shards):
            value = getattr(facts, what)
            if value is None:
                continue
            if seen is not None and seen[1] != value:
                return f"{what} {seen[1]} in {seen[0]}, {value} in {path}"
            seen = (path, value)
    return None
