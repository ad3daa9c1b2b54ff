"""Tensor- and pipeline-parallel saves in DeepSpeed's own format, written with torch and DeepSpeed's classes.

`python -m tests.support.tp_saves FOLDER` writes one folder per entry of `SAVES`: what Megatron-style
trainers record
and CPU training cannot make (uneven widths, averaged parameters, affine maps, padded vocabularies, TP × PP ×
DP). Both converters read them; elements are random, so a wrong place is a wrong value.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.affine import (
    ParamAffineMap,
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

STATES = ("fp32", "exp_avg", "exp_avg_sq")
Cutter = Callable[[torch.Tensor, int], list[torch.Tensor]]
"""A full state → one shard per tensor rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A full parameter's shape and how it is cut; `averaged`: every rank has elements of its own."""

    shape: tuple[int, ...]
    cut: Cutter
    averaged: bool = False
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TpSave:
    """One save: parameters in order, what universal_checkpoint_info says of them, and the grid."""

    params: dict[str, Param]
    info: dict[str, Any]
    tp: int
    dp: int
    pp: int = 1
    zero_stage: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


def replicated(full: torch.Tensor, tp: int) -> list[torch.Tensor]:
    return [full.clone() for _ in range(tp)]


def along(dim: int) -> Cutter:
    """Evenly, the first ranks one more."""
    return lambda full, tp: list(torch.tensor_split(full, tp, dim=dim))


def two_halves(full: torch.Tensor, tp: int) -> list[torch.Tensor]:
    halves = [half.chunk(tp, 0) for half in full.chunk(2, 0)]
    return [torch.cat([half[rank] for half in halves]) for rank in range(tp)]


def fused(view: tuple[int, ...], dim: int, widths: list[list[int]]) -> Cutter:
    """Sub-parameters of a view, cut by `widths[sub][rank]`; the shard keeps the view's dimensions."""

    def cut(full: torch.Tensor, tp: int) -> list[torch.Tensor]:
        subs = full.reshape(view).split([sum(w) for w in widths], dim)
        cuts = [sub.split(w, dim) for sub, w in zip(subs, widths, strict=True)]
        return [torch.cat([c[rank] for c in cuts], dim) for rank in range(tp)]

    return cut


def mapped(layout: ParamAffineMap) -> Cutter:
    return lambda full, tp: [layout.extract(full, rank).clone() for rank in range(tp)]


def padded(rows: int, dim: int = 0) -> Cutter:
    """A vocabulary: zeros after the real rows, so that ranks divide it."""

    def cut(full: torch.Tensor, tp: int) -> list[torch.Tensor]:
        return along(dim)(torch.cat([full, torch.zeros(rows - len(full), full.shape[1])]), tp)

    return cut


def megatron(tp: int, *, pp: int = 1, dp: int = 2, version: float = 0.2, zero_stage: int = 1) -> TpSave:
    """Patterns as Megatron-DeepSpeed records them."""
    last = pp - 1
    params = {
        "embed.weight": Param(shape=(13, 6), cut=padded(16 if tp < 3 else 15)),
        "norm.weight": Param(shape=(7,), cut=replicated),
        "norm.bias": Param(shape=(5,), cut=replicated, averaged=True),
        "up.weight": Param(shape=(12, 5), cut=along(0)),
        "up.bias": Param(shape=(12,), cut=along(0)),
        "down.weight": Param(shape=(7, 12), cut=along(1), stage=last),
        "tall.weight": Param(shape=(3, 120), cut=along(1), stage=last),
        "glu.weight": Param(shape=(24, 3), cut=two_halves, stage=last),
        "qkv.weight": Param(shape=(36, 4), cut=fused((36, 4), 0, [[12 // tp] * tp] * 3), stage=last),
    }
    if version < 0.4:
        shape: tuple[Any, ...] = (3, -1)
        params["legacy.weight"] = Param(shape=(6, 8), cut=fused((6, 8), 0, [[2 // tp] * tp] * 3), stage=last)
        params["legacy.weight"] = Param(
            shape=(18, 8), cut=fused((18, 8), 0, [[6 // tp] * tp] * 3), stage=last
        )
        subs = [
            {"patterns": ["qkv"], "shape": ((12, 12, 12), 4), "partition_dim": 0},
            {"patterns": [r"legacy\..*"], "shape": shape, "partition_dim": 0},
        ]
        widths: dict[str, Any] = {}
    else:
        uneven = [[5, 3], [2, 2], [1, 3]] if tp == 2 else [[3, 3, 2], [4, 0, 0], [0, 2, 2]]
        params["uneven.weight"] = Param(shape=(5, 16), cut=fused((5, 16), 1, uneven), stage=last)
        subs = [
            {"patterns": ["qkv"], "shape": ((12, 12, 12), 4), "partition_dim": 0},
            {"patterns": ["uneven"], "shape": (-1, tuple(map(sum, uneven))), "partition_dim": 1},
        ]
        widths = {"qkv": [[12 // tp] * tp] * 3, "uneven": uneven}
    info = {
        "universal_checkpoint_version": version,
        "tp_replicated_parameter_patterns": [r"norm\.weight"],
        "parameter_to_average_patterns": [r"norm\.bias"],
        "parameter_with_row_parallelism_patterns": [r"down\.", r"tall\."],
        "parameter_with_2_sub_params_cat_dim_0": [r"glu\."],
        "parameter_with_sub_params": subs,
        "sub_param_shard_widths": widths,
        "vocabulary_parameter_patterns": [r"embed\."],
        "original_vocab_size": 13,
        "pipeline_replicated_parameter_patterns": [],
    }
    return TpSave(params=params, info=info, tp=tp, dp=dp, pp=pp, zero_stage=zero_stage)


def affine(tp: int = 2, zero_stage: int = 1) -> TpSave:
    """Layouts that AutoTP describes by maps alone; one parameter keeps to its pattern."""
    maps = {
        "whole": replicated_map((4, 3), tp),
        "rows": contiguous_split_map((7, 5), [4, 3], 0),
        "columns": contiguous_split_map((7, 5), [2, 3], 1),
        "middle": contiguous_split_map((3, 4, 5), [1, 3], 1),
        "fused": sub_param_map((6, 12), [6, 4, 2], [[2, 4], [2, 2], [1, 1]], 1),
        "grouped": segmented_map((10, 4), [(6, False), (4, True)], 0, tp, [[4, 2]]),
        "grouped_columns": segmented_map((4, 10), [(6, False), (4, True)], 1, tp, [[2, 4]]),
        "gathered": block_gather_map((8, 3), {0: [0, 3], 1: [1, 2]}, 2, 0),
        "gathered_columns": block_gather_map((3, 8), {0: [0, 3], 1: [1, 2]}, 2, 1),
    }
    params = {f"{name}.weight": Param(shape=m.logical_shape, cut=mapped(m)) for name, m in maps.items()}
    params["plain.weight"] = Param(shape=(6, 3), cut=along(1))
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [r"plain\.", r"columns\."],
        "affine_map": {"version": 1, "params": {f"{n}\\.weight$": m.to_dict() for n, m in maps.items()}},
    }
    return TpSave(params=params, info=info, tp=tp, dp=2, zero_stage=zero_stage)


SAVES: dict[str, Callable[[], TpSave]] = {
    "tp2": lambda: megatron(2),
    "tp2-widths": lambda: megatron(2, version=0.4),
    "tp3-dp3-widths": lambda: megatron(3, dp=3, version=0.4),
    "tp2-pp2-dp2": lambda: megatron(2, pp=2),
    "tp1-patterns": lambda: megatron(1, dp=2),
    "affine": affine,
    "stage3-tp2": lambda: megatron(2, version=0.4, zero_stage=3),
    "stage3-affine": lambda: affine(zero_stage=3),
}


def write(save: TpSave, folder: Path) -> None:
    """All files of a save."""
    generator = torch.Generator().manual_seed(len(save.params))
    folder.mkdir(parents=True)
    shards: list[dict[str, dict[str, torch.Tensor]]] = [{} for _ in range(save.tp)]
    for name, param in save.params.items():
        full = {state: torch.randn(param.shape, generator=generator) for state in STATES}
        cuts = {state: param.cut(full[state], save.tp) for state in STATES}
        for rank in range(save.tp):
            mine = {state: cuts[state][rank].contiguous() for state in STATES}
            if param.averaged:
                mine = {s: t + torch.randn(t.shape, generator=generator) * 1e-3 for s, t in mine.items()}
            shards[rank][name] = mine
    for pp in range(save.pp):
        for tp in range(save.tp):
            held = {n: s for n, s in shards[tp].items() if save.params[n].stage == pp}
            _write_rank(save, folder, pp * save.tp + tp, held)


def _write_rank(save: TpSave, folder: Path, mm: int, held: dict[str, dict[str, torch.Tensor]]) -> None:
    names = list(held)
    groups = [names[: len(names) // 2], names[len(names) // 2 :]]
    shapes = [OrderedDict((n, held[n]["fp32"].shape) for n in group) for group in groups]
    module = OrderedDict(scale=torch.ones(2), **{name: held[name]["fp32"].bfloat16() for name in names})
    model = {
        "module": module if save.zero_stage < 3 else OrderedDict(),
        "param_shapes": shapes,
        "global_steps": 3,
        "dp_world_size": save.dp,
        "mp_world_size": save.tp * save.pp,
        "checkpoint_parallel_dimensions": {"pp_degree": save.pp, "tp_degree": save.tp},
        "ds_config": {"zero_optimization": {"stage": save.zero_stage}},
        "ds_version": "0.19.8",
        "iteration": 3,
        "universal_checkpoint_info": save.info,
        **save.extra,
    }
    if save.zero_stage < 3:
        torch.save(model, folder / f"mp_rank_{mm:02d}_model_states.pt")
    for d in range(save.dp):
        cut = _stage3_optim if save.zero_stage >= 3 else _stage12_optim
        inner = cut(save, held, groups, d)
        name = f"zero_pp_rank_{d}_mp_rank_{mm:02d}"
        state = {"optimizer_state_dict": inner, "ds_config": model["ds_config"], "ds_version": "0.19.8"}
        torch.save(state, folder / f"{name}_optim_states.pt")
        if save.zero_stage >= 3:
            torch.save(model, folder / f"{name}_model_states.pt")


def _stage12_optim(
    save: TpSave, held: dict[str, dict[str, torch.Tensor]], groups: list[list[str]], d: int
) -> dict[str, Any]:
    """Each group flat, padded to a multiple of dp × 2, cut anywhere."""
    flats: list[dict[str, torch.Tensor]] = []
    mappings: list[OrderedDict[str, Any]] = []
    paddings: list[int] = []
    for group in groups:
        total = sum(held[n]["fp32"].numel() for n in group)
        share = -(-total // (2 * save.dp)) * 2
        padding = share * save.dp - total
        whole = {
            s: torch.cat([*(held[n][s].reshape(-1) for n in group), torch.zeros(padding)]) for s in STATES
        }
        mine = {s: whole[s][d * share : (d + 1) * share].clone() for s in STATES}
        here = max(0, min(share, total - d * share))
        mine["fp32"] = mine["fp32"][:here].clone()
        paddings.append(share - here)
        mapping: OrderedDict[str, Any] = OrderedDict()
        at = 0
        for n in group:
            begin, end = max(at, d * share), min(at + held[n]["fp32"].numel(), (d + 1) * share)
            if begin < end:
                mapping[n] = fragment_address(numel=end - begin, start=begin - d * share)
            at += held[n]["fp32"].numel()
        flats.append(mine)
        mappings.append(mapping)
    state = {g: {"step": torch.tensor(3.0), **{s: f[s] for s in STATES[1:]}} for g, f in enumerate(flats)}
    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}] * len(groups)},
        "single_partition_of_fp32_groups": [f["fp32"] for f in flats],
        "zero_stage": ZeroStageEnum(save.zero_stage),
        "group_paddings": paddings,
        "partition_count": [save.dp] * len(groups),
        "ds_version": "0.19.8",
        "param_slice_mappings": mappings,
    }


def _stage3_optim(
    save: TpSave, held: dict[str, dict[str, torch.Tensor]], groups: list[list[str]], d: int
) -> dict[str, Any]:
    """Each parameter padded inside itself to the same length on all ranks."""

    def mine(name: str, state: str) -> torch.Tensor:
        flat = held[name][state].reshape(-1)
        share = -(-flat.numel() // save.dp)
        return torch.cat([flat, torch.zeros(share * save.dp - flat.numel())])[d * share : (d + 1) * share]

    flats = [{s: torch.cat([mine(n, s) for n in group]) for s in STATES} for group in groups]
    state = {g: {"step": torch.tensor(3.0), **{s: f[s] for s in STATES[1:]}} for g, f in enumerate(flats)}
    return {
        "zero_stage": ZeroStageEnum(3),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": save.dp,
        "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "fp32_flat_groups": [f["fp32"] for f in flats],
    }


if __name__ == "__main__":
    for title, build in SAVES.items():
        write(build(), Path(sys.argv[1]) / title)
