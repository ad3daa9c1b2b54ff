"""DeepSpeed's file names: which shard a name is, and which names a proven grid demands (docs/formats.md §1).

Names only *raise* an expectation, they never prove one: the grid comes from metadata inside the shards (H13).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ckptd.core.identity import Model


class Role(StrEnum):
    """What a file of a checkpoint is for."""

    OPTIM = "optim"
    MODEL = "model"
    LAYER = "layer"
    EXPERT = "expert"
    UNIVERSAL = "universal"
    WEIGHTS = "weights"
    SIDE = "side"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKey:
    """Which shard: d = ZeRO data-parallel rank, mm = model-parallel rank, layer, expert (global id).

    `None` where the name says nothing of it: `mp_rank_00_model_states.pt` has no d.
    """

    d: int | None = None
    mm: int | None = None
    layer: int | None = None
    expert: int | None = None


class NamedShard(Model):
    """A file name read as a shard."""

    role: Role
    shard: ShardKey


_PATTERNS: tuple[tuple[re.Pattern[str], Role], ...] = (
    (
        re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(?P<d>\d+)_mp_rank_(?P<mm>\d+)_?optim_states\.pt$"),
        Role.OPTIM,
    ),
    (re.compile(r"^zero_pp_rank_(?P<d>\d+)_mp_rank_(?P<mm>\d+)_model_states\.pt$"), Role.MODEL),
    (re.compile(r"^mp_rank_(?P<mm>\d+)_model_states\.pt$"), Role.MODEL),
    (
        re.compile(
            r"^(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mm>\d+)_model_states\.pt$"
        ),
        Role.EXPERT,
    ),
    (re.compile(r"^layer_(?P<layer>\d+)(?:-model_(?P<mm>\d+))?-model_states\.pt$"), Role.LAYER),
    (re.compile(r"^expp_rank_(?P<expert>\d+)_mp_rank_(?P<mm>\d+)_optim_states\.pt$"), Role.EXPERT),
)


def parse_shard_name(name: str) -> NamedShard | None:
    """Read a base name as a DeepSpeed shard; None when it is none.

    >>> parse_shard_name("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").shard.d
    3
    """
    for pattern, role in _PATTERNS:
        match = pattern.match(name)
        if match:
            numbers = {k: int(v) for k, v in match.groupdict().items() if v is not None}
            return NamedShard(role=role, shard=ShardKey(**numbers))
    return None


class Grid(Model):
    """The grid of a save, as metadata proves it: dp × mm_count optimizer shards (docs/formats.md §1.1).

    `mm_count` = tensor × pipeline ranks; `layers` = pipeline layers; `experts` = experts per MoE layer.
    """

    dp: int
    mm_count: int
    tp: int | None = None
    pp: int | None = None
    sp: int | None = None
    ep: int | None = None
    zero_stage: int
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    proof: str = ""

    @property
    def is_model_only(self) -> bool:
        """No rank saved anything: weights alone, committed and kept, never resumed from (ADR 0050)."""
        return self.dp == 0


MODEL_ONLY = Grid(dp=0, mm_count=0, zero_stage=0, proof="only a model (save_only_model)")


def absent_ranks(grid: Grid, present: frozenset[NamedShard]) -> tuple[NamedShard, ...]:
    """The optimizer shards, and those of model states, that `grid` demands and `present` lacks."""
    of_ranks = [(Role.OPTIM, True)] + (
        [(Role.MODEL, True)] if grid.zero_stage >= 3 else [(Role.MODEL, False)]
    )
    wanted = [
        NamedShard(role=role, shard=ShardKey(d=d, mm=mm) if is_ranked else ShardKey(mm=mm))
        for role, is_ranked in of_ranks
        for mm in range(grid.mm_count)
        for d in (range(grid.dp) if is_ranked else (0,))
    ]
    return tuple(shard for shard in wanted if shard not in present)


def missing_shards(grid: Grid, present: frozenset[NamedShard]) -> tuple[str, ...]:
    """Name the shards that `grid` demands and `present` lacks, in file-name words, sorted by rank."""
    missing = [
        f"optimizer shard of rank {d} (zero_pp_rank_{d}_mp_rank_{mm:02d}_optim_states.pt)"
        for mm in range(grid.mm_count)
        for d in range(grid.dp)
        if NamedShard(role=Role.OPTIM, shard=ShardKey(d=d, mm=mm)) not in present
    ]
    if grid.zero_stage >= 3:
        missing += [
            f"model shard of rank {d} (zero_pp_rank_{d}_mp_rank_{mm:02d}_model_states.pt)"
            for mm in range(grid.mm_count)
            for d in range(grid.dp)
            if NamedShard(role=Role.MODEL, shard=ShardKey(d=d, mm=mm)) not in present
        ]
    else:
        missing += [
            f"model states mp_rank_{mm:02d}_model_states.pt"
            for mm in range(grid.mm_count)
            if NamedShard(role=Role.MODEL, shard=ShardKey(mm=mm)) not in present
        ]
    layers_present = {n.shard.layer for n in present if n.role is Role.LAYER}
    missing += [f"layer file layer_{n:02d}" for n in grid.layers if n not in layers_present]
    if any(grid.experts):
        held = {(n.shard.layer, n.shard.expert) for n in present if n.role is Role.EXPERT}
        for moe_layer, count in enumerate(grid.experts):
            missing += [
                f"expert {e} of MoE layer {moe_layer}"
                for e in range(count)
                if (moe_layer, e) not in held and (None, e) not in held
            ]
    return tuple(missing)
