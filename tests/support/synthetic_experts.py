"""Mixtures of experts made without torch: what each expert-parallel rank holds, cut and spread as ZeRO does.

Beside `tests.support.synthetic`, whose tensors these are: rank r's tensor of an expert `name` has the
elements of a parameter called `name@r`, and tensor rank t's part of either those of `…#t` (t > 0).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tests.support.synthetic import (
    STATES,
    Made,
    Shapes,
    Shard,
    fragment_address,
    full_bytes,
    model_root,
    ordered,
    stage_enum,
)

Change = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Dense groups first, then expert groups; `layers`: experts of each MoE layer, all ranks together."""

    dense: list[Shapes]
    experts: list[Shapes]
    dp: int
    ep: int
    in_blocks: bool = False
    align: int = 2
    layers: list[int] = field(default_factory=lambda: [4])
    version: str = "0.19.8"
    tp: int = 1
    """Tensor ranks, all of whose parts follow one another along dimension 0."""

    @property
    def groups(self) -> list[Shapes]:
        """All groups, as param_shapes lists them."""
        return self.dense + self.experts

    def place(self, group: int, d: int) -> tuple[int, int, int]:
        """(expert-parallel rank, partition, partitions) of data-parallel rank `d` in a group."""
        if group < len(self.dense):
            return 0, d, self.dp
        share = self.dp // self.ep
        return (d // share, d % share, share) if self.in_blocks else (d % self.ep, d // self.ep, share)


def named(mixture: Mixture, group: int, name: str, rank: int, t: int = 0) -> str:
    """What the elements of rank's tensor are called."""
    return (f"{name}@{rank}" if group >= len(mixture.dense) else name) + f"#{t}" * (t > 0)


def expected(mixture: Mixture) -> dict[tuple[str, str], bytes]:
    """(parameter, state) → the ranks' tensors one after another."""
    made = {}
    for g, shapes in enumerate(mixture.groups):
        ranks = range(mixture.ep if g >= len(mixture.dense) else 1)
        for name, shape in shapes.items():
            for state in STATES:
                parts = [(r, t) for r in ranks for t in range(mixture.tp)]
                of_ranks = (full_bytes(state, named(mixture, g, name, r, t), shape) for r, t in parts)
                made[name, state] = b"".join(of_ranks)
    return made


def write_mixture(
    folder: Path,
    mixture: Mixture,
    *,
    change: Change | None = None,
    change_model: Callable[[dict[str, Any]], None] | None = None,
) -> Made:
    """A save of stage 2 with its expert files; `change(rank, inner)` may spoil an optimizer dictionary."""
    folder.mkdir(parents=True, exist_ok=True)
    for d, t in ((d, t) for d in range(mixture.dp) for t in range(mixture.tp)):
        shard = Shard()
        inner = _optimizer(shard, mixture, d, t)
        if change is not None:
            change(d, inner)
        root = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": mixture.version}
        shard.save(folder / f"bf16_zero_pp_rank_{d}_mp_rank_{t:02d}_optim_states.pt", root)
    model = model_root(mixture.groups, mixture.dp, 2, 7)
    model |= {"ds_version": mixture.version, "num_experts": mixture.layers, "ds_autoep_layers": None}
    model["ds_config"] |= {"use_data_before_expert_parallelism": True} if mixture.in_blocks else {}
    if mixture.tp > 1:
        model["checkpoint_parallel_dimensions"] |= {"tp_degree": mixture.tp}
        lists = ("tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns")
        said = {"universal_checkpoint_version": 0.4, **{key: [] for key in lists}}
        model |= {"mp_world_size": mixture.tp, "universal_checkpoint_info": said}
    if change_model is not None:
        change_model(model)
    for rank in (f"mp_rank_{t:02d}_model_states.pt" for t in range(mixture.tp)):
        Shard().save(folder / rank, model)
        for layer, count in enumerate(mixture.layers):
            for e in range(count):
                Shard().save(folder / f"layer_{layer}_expert_{e}_{rank}", {"a": 1})
    return Made(folder, expected(mixture))


def _optimizer(shard: Shard, mixture: Mixture, d: int, t: int) -> dict[str, Any]:
    inner: dict[str, Any] = {
        "clip_grad": 1.0,
        "group_paddings": [],
        "partition_count": [],
        "zero_stage": stage_enum(2),
        "ds_version": mixture.version,
        "single_partition_of_fp32_groups": [],
        "param_slice_mappings": [],
    }
    state: dict[int, Any] = {}
    param_groups: list[dict[str, Any]] = []
    for g, shapes in enumerate(mixture.groups):
        rank, part, parts = mixture.place(g, d)
        total = sum(prod(shape) for shape in shapes.values())
        share = -(-total // (parts * mixture.align)) * mixture.align
        begin, end = part * share, (part + 1) * share
        padding = max(0, end - max(begin, total))
        flat = {
            s: b"".join(full_bytes(s, named(mixture, g, n, rank, t), shape) for n, shape in shapes.items())
            + b"\xee" * 4 * (parts * share - total)
            for s in STATES
        }
        inner["group_paddings"].append(padding)
        inner["partition_count"].append(parts)
        fp32 = flat["fp32"][4 * begin : 4 * (end - padding)]
        inner["single_partition_of_fp32_groups"].append(shard.tensor(fp32))
        inner["param_slice_mappings"].append(ordered(_mapping(shapes, begin, end)))
        state[g] = {"step": shard.tensor(struct.pack("<f", 7), ())}
        state[g] |= {key: shard.tensor(flat[key][4 * begin : 4 * end]) for key in STATES[1:]}
        group: dict[str, Any] = {"lr": 0.1, "params": [g]}
        if g >= len(mixture.dense):
            group |= {"moe": True, "name": f"ep_size_{mixture.ep}"}
        param_groups.append(group)
    inner["base_optimizer_state"] = {"state": state, "param_groups": param_groups}
    return inner


def _mapping(shapes: Shapes, begin: int, end: int) -> dict[str, Any]:
    found, at = {}, 0
    for name, shape in shapes.items():
        low, high = max(at, begin), min(at + prod(shape), end)
        if low < high:
            found[name] = fragment_address(high - low, low - begin)
        at += prod(shape)
    return found
