"""ZeRO shards made without torch: every element is a known number, so conversions are checked byte by byte.

Real checkpoints are in `tests.support.real`; these reach the shapes, ranks and defects that training never
makes.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ckptd.formats.torchfile.repickle import WRITABLE, repickle
from ckptd.formats.torchfile.values import ITEM_BYTES, Global, Inert, InertDict, Size, Storage, Tensor

STATES = ("fp32", "exp_avg", "exp_avg_sq")
Shapes = dict[str, tuple[int, ...]]
ORDERED = Global("collections", "OrderedDict")


def drop_crcs(path: Path) -> None:
    """As torch writes with `set_crc32_options(False)`: no record has a CRC32 in the zip's directory."""
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    while at >= 0:
        struct.pack_into("<L", data, at + 16, 0)
        at = data.find(b"PK\x01\x02", at + 1)
    path.write_bytes(bytes(data))


def write_archive(path: Path, records: dict[str, bytes], prefix: str = "archive") -> None:
    """A zip as `torch.save` writes it, with true CRCs; unaligned, which readers must accept."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for name, data in records.items():
            out.writestr(zipfile.ZipInfo(f"{prefix}/{name}"), data)


class Shard:
    """Collects tensors of one file, then writes it; `writable`: names that its pickle may hold."""

    writable = WRITABLE

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}
        self.alive: list[Tensor] = []

    def tensor(self, data: bytes, shape: tuple[int, ...] | None = None, dtype: str = "float32") -> Tensor:
        """A tensor of these little-endian bytes; 1-D unless `shape` is given."""
        numel = len(data) // ITEM_BYTES[dtype]
        shape = (numel,) if shape is None else shape
        stride = tuple(prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape)))
        made = Tensor(Storage(dtype, "", 0, len(data), numel), dtype, 0, shape, stride)
        self.payloads[id(made)] = data
        self.alive.append(made)
        return made

    def save(self, path: Path, root: Any) -> None:
        """Write the archive."""
        pickled = repickle(root, path.name, writable=self.writable)
        records = {"data.pkl": pickled.data, "byteorder": b"little", "version": b"3\n"}
        for i, tensor in enumerate(pickled.tensors):
            records[f"data/{i}"] = self.payloads[id(tensor)]
        write_archive(path, records, path.stem)


def element(state: str, name: str, index: int) -> int:
    """The 32 bits of one element: unique per state, parameter and index."""
    return (STATES.index(state) << 30) | (sum(name.encode()) % 509) << 20 | index


def full_bytes(state: str, name: str, shape: tuple[int, ...]) -> bytes:
    """The flattened full parameter."""
    first, count = element(state, name, 0), prod(shape)
    return struct.pack(f"<{count}I", *range(first, first + count))


@dataclass(slots=True)
class Made:
    """A synthetic save: its folder and what each (parameter, state) must become."""

    folder: Path
    expected: dict[tuple[str, str], bytes] = field(default_factory=dict)


def ordered(items: dict[str, Any]) -> InertDict:
    """An OrderedDict as the pickles have them."""
    made = InertDict(ORDERED)
    made.update(items)
    return made


def fragment_address(numel: int, start: int) -> Inert:
    """DeepSpeed's mapping entry."""
    origin = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Inert(origin, (), {"numel": numel, "start": start}, made_by_new=True)


def stage_enum(stage: int) -> Inert:
    """DeepSpeed's ZeroStageEnum."""
    return Inert(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def model_root(
    groups: list[Shapes], dp: int, stage: int, step: int, module: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A model-states dictionary."""
    return {
        "module": ordered(module or {}),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [ordered({n: Size(s) for n, s in shapes.items()}) for shapes in groups],
        "global_steps": step,
        "dp_world_size": dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }


def write_stage12(
    folder: Path,
    groups: list[Shapes],
    dp: int,
    *,
    stage: int = 2,
    align: int = 2,
    step: int = 7,
    bf16_optimizer: bool = False,
    change: Callable[[int, dict[str, Any]], None] | None = None,
    change_model: Callable[[dict[str, Any]], None] | None = None,
) -> Made:
    """Shards of stage 1 or 2; `change(rank, inner)` may spoil a rank's optimizer dictionary."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Made(folder)
    layouts = [_flatten(made, shapes, dp * align) for shapes in groups]
    for d in range(dp):
        shard = Shard()
        inner: dict[str, Any] = {
            "clip_grad": 1.0,
            "group_paddings": [],
            "partition_count": [dp] * len(groups),
        }
        state: dict[int, Any] = {}
        fp32: list[Tensor] = []
        mappings: list[InertDict] = []
        for g, (flat, places, total) in enumerate(layouts):
            share = len(flat["fp32"]) // 4 // dp
            begin, end = d * share, (d + 1) * share
            padding = max(0, end - max(begin, total))
            inner["group_paddings"].append(padding)
            keep = share if bf16_optimizer else share - padding
            fp32.append(shard.tensor(flat["fp32"][4 * begin : 4 * (begin + keep)]))
            state[g] = {"step": shard.tensor(struct.pack("<f", step), ())}
            for key in STATES[1:]:
                state[g][key] = shard.tensor(flat[key][4 * begin : 4 * end])
            mappings.append(ordered(_fragments(places, begin, end)))
        inner["base_optimizer_state"] = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
        inner["single_partition_of_fp32_groups"] = fp32
        inner["param_slice_mappings"] = mappings
        inner["ds_version"] = "0.19.8"
        if not bf16_optimizer:
            inner["zero_stage"] = stage_enum(stage)
        if change is not None:
            change(d, inner)
        root = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}
        shard.save(folder / f"bf16_zero_pp_rank_{d}_mp_rank_00_optim_states.pt", root)
    model = model_root(groups, dp, stage, step)
    if change_model is not None:
        change_model(model)
    Shard().save(folder / "mp_rank_00_model_states.pt", model)
    return made


def _flatten(
    made: Made, shapes: Shapes, unit: int
) -> tuple[dict[str, bytes], list[tuple[str, int, int]], int]:
    """Flat buffers padded to `unit`, the places of the parameters, and the length without padding."""
    flat = dict.fromkeys(STATES, b"")
    places: list[tuple[str, int, int]] = []
    at = 0
    for name, shape in shapes.items():
        places.append((name, at, at + prod(shape)))
        at += prod(shape)
        for state in STATES:
            made.expected[name, state] = full_bytes(state, name, shape)
            flat[state] += made.expected[name, state]
    padding = (-at) % unit
    return {s: data + b"\xee" * 4 * padding for s, data in flat.items()}, places, at


def _fragments(places: list[tuple[str, int, int]], begin: int, end: int) -> dict[str, Inert]:
    found = {}
    for name, first, last in places:
        low, high = max(first, begin), min(last, end)
        if low < high:
            found[name] = fragment_address(high - low, low - begin)
    return found


def write_stage3(
    folder: Path,
    groups: list[Shapes],
    dp: int,
    *,
    step: int = 7,
    change: Callable[[int, dict[str, Any]], None] | None = None,
) -> Made:
    """Shards of stage 3: each parameter padded to `ceil(numel / dp)` per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Made(folder)
    for shapes in groups:
        for name, shape in shapes.items():
            for key in STATES:
                made.expected[name, key] = full_bytes(key, name, shape)
    for d in range(dp):
        shard = Shard()
        state: dict[int, Any] = {}
        fp32: list[Tensor] = []
        for s, shapes in enumerate(groups):
            buffers = {k: b"".join(_share(made.expected[n, k], d, dp) for n in shapes) for k in STATES}
            fp32.append(shard.tensor(buffers["fp32"]))
            state[s] = {"step": shard.tensor(struct.pack("<f", step), ())}
            state[s] |= {key: shard.tensor(buffers[key]) for key in STATES[1:]}
        inner: dict[str, Any] = {
            "zero_stage": stage_enum(3),
            "partition_count": dp,
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "fp32_flat_groups": fp32,
        }
        if change is not None:
            change(d, inner)
        root = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}
        shard.save(folder / f"bf16_zero_pp_rank_{d}_mp_rank_00_optim_states.pt", root)
        Shard().save(folder / f"zero_pp_rank_{d}_mp_rank_00_model_states.pt", model_root(groups, dp, 3, step))
    return made


def _share(data: bytes, d: int, dp: int) -> bytes:
    share = -(-(len(data) // 4) // dp)
    piece = data[4 * d * share : 4 * (d + 1) * share]
    return piece + b"\xee" * (4 * share - len(piece))
