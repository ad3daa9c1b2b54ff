"""Saves with whole model states, written by torch, and safetensors files read back without the library."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from tests.support.synthetic import Made, Shapes, write_stage3, write_stage12

GROUPS: list[Shapes] = [{f"blocks.{i}.w": (4, 30) for i in range(12)}, {"norm": (33,), "bias": (1,)}]


@dataclass(frozen=True, slots=True)
class Read:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_file(path: Path) -> dict[str, Read]:
    """Every tensor, after checking what the format demands: no gap, no overlap, an aligned start."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert (8 + length) % 8 == 0
    body, at = raw[8 + length :], 0
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == at
        at = end
        found[name] = Read(entry["dtype"], tuple(entry["shape"]), body[begin:end])
    assert at == len(body)
    return found


def read_folder(folder: Path) -> dict[str, Read]:
    """All tensors of an export, by its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_file(folder / "model.safetensors")
    listed = json.loads(index.read_text())
    found: dict[str, Read] = {}
    for file in sorted(set(listed["weight_map"].values())):
        held = read_file(folder / file)
        assert set(held) == {n for n, f in listed["weight_map"].items() if f == file}
        found |= held
    assert listed["metadata"] == {"total_size": sum(len(r.data) for r in found.values())}
    return found


def data_of(tensor: torch.Tensor) -> bytes:
    """The elements, row-major."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def as_read(tensor: torch.Tensor) -> Read:
    """What an export of a tensor should be."""
    names = {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int64: "I64",
        torch.bool: "BOOL",
        torch.float64: "F64",
    }
    return Read(names[tensor.dtype], tuple(tensor.shape), data_of(tensor))


def expected_masters(made: Made, groups: list[Shapes], dtype: torch.dtype) -> dict[str, Read]:
    """The trained parameters of a synthetic save, cast by torch."""
    found = {}
    for shapes in groups:
        for name, shape in shapes.items():
            flat = torch.frombuffer(bytearray(made.expected[name, "fp32"] or b"\0" * 4), dtype=torch.float32)
            found[name] = as_read(flat[: prod(shape)].reshape(shape).to(dtype))
    return found


def model_states(
    groups: list[Shapes], dp: int, stage: int, module: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A model-states dictionary as DeepSpeed 0.19.8 saves it; `more` replaces keys."""
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items()) for shapes in groups],
        "frozen_param_shapes": None if stage < 2 else OrderedDict(),
        "frozen_param_fragments": None if stage < 2 else OrderedDict(),
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
        **more,
    }


def trained_views(made: Made, groups: list[Shapes]) -> dict[str, torch.Tensor]:
    """The 16-bit parameters of stage ≤ 2: views of one flat buffer."""
    masters = {
        name: torch.frombuffer(bytearray(made.expected[name, "fp32"]), dtype=torch.float32).reshape(shape)
        for shapes in groups
        for name, shape in shapes.items()
    }
    flat = torch.cat([m.reshape(-1) for m in masters.values()]).to(torch.bfloat16)
    views, at = {}, 0
    for name, master in masters.items():
        views[name] = flat[at : at + master.numel()].view(master.shape)
        at += master.numel()
    return views


def stage_2(folder: Path, module: dict[str, Any], *, dp: int = 3, stage: int = 2, **more: Any) -> Made:
    """A save of stage ≤ 2 whose `module` holds the trained parameters and `module`."""
    made = write_stage12(folder, GROUPS, dp, stage=stage)
    whole = {**trained_views(made, GROUPS), **module}
    torch.save(model_states(GROUPS, dp, stage, whole, **more), folder / "mp_rank_00_model_states.pt")
    return made


def stage_3(
    folder: Path, module: dict[str, Any], frozen: dict[str, torch.Tensor], dp: int, **more: Any
) -> Made:
    """A save of stage 3: placeholders in `module`, frozen parameters in fragments of every rank."""
    made = write_stage3(folder, GROUPS, dp)
    names = [*(n for shapes in GROUPS for n in shapes), *frozen]
    whole = {**{n: torch.empty(0, dtype=torch.bfloat16) for n in names}, **module}
    for d in range(dp):
        fragments = OrderedDict()
        for name, tensor in frozen.items():
            share = -(-tensor.numel() // dp)
            padded = torch.full((share * dp,), 9.0, dtype=tensor.dtype)
            padded[: tensor.numel()] = tensor.reshape(-1)
            fragments[name] = padded[d * share : (d + 1) * share].clone()
        held = {
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()),
            "frozen_param_fragments": fragments,
            **more,
        }
        root = model_states(GROUPS, dp, 3, whole, **held)
        torch.save(root, folder / f"zero_pp_rank_{d}_mp_rank_00_model_states.pt")
    return made


def large_save(folder: Path, numel: int, tensors: int) -> None:
    """One rank of stage 2 with masters alone: `tensors` parameters of `numel` random elements each."""
    folder.mkdir(parents=True)
    from deepspeed.utils.tensor_fragment import fragment_address

    shapes: Shapes = {f"blocks.{i}.w": (numel // 1000, 1000) for i in range(tensors)}
    master = torch.randn(numel * tensors, generator=torch.Generator().manual_seed(1))
    inner = {
        "zero_stage": 2,
        "partition_count": [1],
        "base_optimizer_state": {
            "state": {0: {"step": torch.tensor(7.0)}},
            "param_groups": [{"params": [0]}],
        },
        "single_partition_of_fp32_groups": [master],
        "param_slice_mappings": [
            {n: fragment_address(numel=numel, start=i * numel) for i, n in enumerate(shapes)}
        ],
        "ds_version": "0.19.8",
    }
    torch.save(
        {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"},
        folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    torch.save(model_states([shapes], 1, 2, {}), folder / "mp_rank_00_model_states.pt")
