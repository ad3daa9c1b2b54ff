"""Checkpoints of any size as sparse files: real pickles and zip framing, storages that are holes.

It exists because planning, extent cloning and the handling of files cost the same whether the storages hold
bytes or not, and no test machine holds a terabyte. `torch.load(mmap=True)` reads them and every CRC32 is
true. With `Fill` the storages are written, so that small ones can be converted by the stock converter too.
"""

from __future__ import annotations

import os
import random
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from ckptd.formats.torchfile.repickle import repickle
from ckptd.formats.torchfile.values import ITEM_BYTES, Size, Storage, Tensor
from tests.support.synthetic import Shapes, fragment_address, model_root, ordered, stage_enum

PATTERNS = {
    "tp_replicated_parameter_patterns": [r".*ln\d\.", r"final\.", r".*(proj|down)\.bias", r"embed\.pos"],
    "parameter_with_row_parallelism_patterns": [r".*(proj|down)\.weight"],
    "vocabulary_parameter_patterns": [r"embed\.tok"],
}
"""How the parameters of `gpt` are cut over tensor ranks: along rows, columns, or not at all."""
Fill = Callable[[int], bytes]
STATES = ("exp_avg", "exp_avg_sq")
_POLYNOMIAL = 0xEDB88320
_SATURATED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Model:
    """What is saved: parameters by name, ZeRO stage, data-parallel ranks, tensor ranks, pipeline stages.

    With tensor ranks the names are those of `gpt` (`PATTERNS` say how they are cut), and stage is at most 2.
    """

    name: str
    shapes: Shapes
    stage: int
    dp: int
    tp: int = 1
    pp: int = 1
    has_crcs: bool = True
    """False: as with `torch.serialization.set_crc32_options(False)`."""

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(map(prod, self.shapes.values()))


def gpt(hidden: int, layers: int, vocab: int) -> Shapes:
    """Parameters of a GPT with biases, twelve per layer."""
    shapes: Shapes = {"embed.tok.weight": (vocab, hidden), "embed.pos.weight": (2048, hidden)}
    for i in range(layers):
        for name, shape in (
            ("ln1", (hidden,)),
            ("attn.qkv", (3 * hidden, hidden)),
            ("attn.proj", (hidden, hidden)),
            ("ln2", (hidden,)),
            ("mlp.up", (4 * hidden, hidden)),
            ("mlp.down", (hidden, 4 * hidden)),
        ):
            shapes[f"layers.{i}.{name}.weight"] = shape
            shapes[f"layers.{i}.{name}.bias"] = shape[:1]
    return {**shapes, "final.weight": (hidden,), "final.bias": (hidden,)}


def llama(hidden: int, layers: int, vocab: int, inner: int, shared_heads: int) -> Shapes:
    """Parameters of a Llama, nine per layer; `shared_heads`: width of keys and values."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (shared_heads, hidden)),
            ("self_attn.v_proj", (shared_heads, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def random_fill(seed: int) -> Fill:
    """Storages of random bytes."""
    return random.Random(seed).randbytes


class SparseShard:
    """One file: collects tensors, then lays out pickle, records and directory as torch does."""

    def __init__(self, *, has_crcs: bool = True) -> None:
        self.alive: list[Tensor] = []
        self.has_crcs = has_crcs

    def tensor(self, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        """A contiguous tensor of its own storage."""
        numel = prod(shape)
        stride = tuple(prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape)))
        made = Tensor(Storage(dtype, "", 0, numel * ITEM_BYTES[dtype], numel), dtype, 0, shape, stride)
        self.alive.append(made)
        return made

    def save(self, path: Path, root: Any, fill: Fill | None = None) -> None:
        """Write the archive; scalar storages are the float32 1.0, others holes or what `fill` gives."""
        pickled = repickle(root, path.name)
        records: list[tuple[str, bytes | int]] = [
            ("data.pkl", pickled.data),
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", b"little"),
        ]
        for i, tensor in enumerate(pickled.tensors):
            nbytes = tensor.storage.nbytes
            data: bytes | int = nbytes if fill is None else fill(nbytes)
            records.append((f"data/{i}", struct.pack("<f", 1.0) if tensor.shape == () else data))
        records += [("version", b"3\n"), (".data/serialization_id", b"0" * 40)]
        with path.open("wb") as out:
            _write(out.fileno(), path.stem, records, has_crcs=self.has_crcs)


def _write(fd: int, prefix: str, records: list[tuple[str, bytes | int]], *, has_crcs: bool) -> None:
    """Local headers with 64-byte aligned payloads, then the zip64 directory; an int is a hole."""
    at, central = 0, b""
    entries: list[bytes] = []
    for name, data in records:
        label = f"{prefix}/{name}".encode()
        size = data if isinstance(data, int) else len(data)
        crc = 0
        if has_crcs:
            crc = crc_of_zeros(data) if isinstance(data, int) else zlib.crc32(data)
        wide = size >= _SATURATED
        shown = min(size, _SATURATED)
        extra = struct.pack("<2H2Q", 1, 16, size, size) if wide else b""
        padding = -(at + 30 + len(label) + len(extra) + 4) % 64
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        sizes = (crc, shown, shown, len(label), len(extra))
        header = struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 0x808, 0, 0, 0, *sizes) + label + extra
        entries.append(_entry(label, crc, size, at))
        os.pwrite(fd, header, at)
        at += len(header)
        if not isinstance(data, int):
            os.pwrite(fd, data, at)
        at += size
    central = b"".join(entries)
    count = len(entries)
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(central), at)
    end += struct.pack("<4sLQL", b"PK\x06\x07", 0, at + len(central), 1)
    end += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, _SATURATED, _SATURATED, 0)
    os.pwrite(fd, central + end, at)


def _entry(label: bytes, crc: int, size: int, at: int) -> bytes:
    wide = [v for v in (size, size, at) if v >= _SATURATED]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    shown = min(size, _SATURATED)
    fields = (crc, shown, shown, len(label), len(extra), 0, 0, 0, 0, min(at, _SATURATED))
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", 0, 0, 0x808, 0, 0, 0, *fields) + label + extra


@cache
def crc_of_zeros(count: int) -> int:
    """CRC32 of `count` zero bytes, by squaring the polynomial's shift (as zlib combines CRCs)."""
    shift, power = 0x80000000, _times(0x40000000, 0x40000000)  # x^0; x^2
    power = _times(_times(power, power), _times(power, power))  # x^8: one byte
    left = count
    while left:
        if left & 1:
            shift = _times(shift, power)
        power = _times(power, power)
        left >>= 1
    return _times(shift, 0xFFFFFFFF) ^ 0xFFFFFFFF


def _times(a: int, b: int) -> int:
    """Product of two reflected polynomials modulo CRC32's."""
    product, mask = 0, 0x80000000
    while mask:
        if a & mask:
            product ^= b
        mask >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def write(folder: Path, model: Model, fill: Fill | None = None) -> Path:
    """Make the checkpoint of `model` in `folder`; returns it."""
    folder.mkdir(parents=True)
    if model.stage >= 3:
        _write_stage3(folder, model, fill)
    else:
        _write_stage12(folder, model, fill)
    return folder


def _optim(shard: SparseShard, kept: int, share: int) -> tuple[dict[str, Any], Tensor]:
    """Base optimizer state of one group, and the fp32 partition of `kept` elements."""
    fp32 = shard.tensor((kept,))
    state: dict[str, Any] = {"step": shard.tensor(())}
    state |= {key: shard.tensor((share,)) for key in STATES}
    return {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]}, fp32


def _save_optim(
    folder: Path,
    rank: tuple[int, int],
    shard: SparseShard,
    inner: dict[str, Any],
    stage: int,
    fill: Fill | None,
) -> None:
    inner = {"zero_stage": stage_enum(stage), "ds_version": "0.19.8", **inner}
    root = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}
    d, mm = rank
    shard.save(folder / f"bf16_zero_pp_rank_{d}_mp_rank_{mm:02d}_optim_states.pt", root, fill)


def _write_stage12(folder: Path, model: Model, fill: Fill | None) -> None:
    for mm in range(model.tp * model.pp):
        shapes = _held(model, mm // model.tp)
        share = -(-sum(map(prod, shapes.values())) // (2 * model.dp)) * 2
        for d in range(model.dp):
            _write_flat(folder, model, shapes, (d, mm), share, fill)
        shard = SparseShard(has_crcs=model.has_crcs)
        held = shapes if model.pp * model.tp == 1 else {}
        # random bytes are no masters rounded, so then they are of a type that is not compared with them
        dtype = "bfloat16" if fill is None else "int16"
        module = {name: shard.tensor(shape, dtype) for name, shape in held.items()}
        root = model_root([shapes], model.dp, model.stage, 7, module)
        if model.pp * model.tp > 1:
            vocabulary = {"original_vocab_size": model.shapes["embed.tok.weight"][0]}
            root["universal_checkpoint_info"] = {
                "universal_checkpoint_version": 0.2,
                **PATTERNS,
                **vocabulary,
            }
            root["mp_world_size"] = model.tp * model.pp
            root["checkpoint_parallel_dimensions"] = {"pp_degree": model.pp, "tp_degree": model.tp}
        shard.save(folder / f"mp_rank_{mm:02d}_model_states.pt", root, fill)


def _held(model: Model, stage: int) -> Shapes:
    """The shards of one pipeline stage's parameters on any of its tensor ranks."""
    count = len(model.shapes)
    held: Shapes = {}
    for number, (name, shape) in enumerate(model.shapes.items()):
        if number * model.pp // count == stage:
            cut = 0
            if any(re.match(p, name) for p in PATTERNS["tp_replicated_parameter_patterns"]):
                cut = len(shape)
            elif any(re.match(p, name) for p in PATTERNS["parameter_with_row_parallelism_patterns"]):
                cut = 1
            held[name] = tuple(n // model.tp if i == cut else n for i, n in enumerate(shape))
    return held


def _write_flat(
    folder: Path, model: Model, shapes: Shapes, rank: tuple[int, int], share: int, fill: Fill | None
) -> None:
    """One rank's slice of all parameters one after another."""
    begin, end = rank[0] * share, (rank[0] + 1) * share
    total, found = 0, {}
    for name, shape in shapes.items():
        low, high = max(total, begin), min(total + prod(shape), end)
        total += prod(shape)
        if low < high:
            found[name] = fragment_address(high - low, low - begin)
    padding = max(0, end - max(begin, total))
    shard = SparseShard(has_crcs=model.has_crcs)
    base, fp32 = _optim(shard, share - padding, share)
    inner = {
        "clip_grad": 1.0,
        "group_paddings": [padding],
        "partition_count": [model.dp],
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [fp32],
        "param_slice_mappings": [ordered(found)],
    }
    _save_optim(folder, rank, shard, inner, model.stage, fill)


def _write_stage3(folder: Path, model: Model, fill: Fill | None) -> None:
    share = sum(-(-prod(shape) // model.dp) for shape in model.shapes.values())
    for d in range(model.dp):
        shard = SparseShard(has_crcs=model.has_crcs)
        base, fp32 = _optim(shard, share, share)
        inner = {"partition_count": model.dp, "optimizer_state_dict": base, "fp32_flat_groups": [fp32]}
        _save_optim(folder, (d, 0), shard, inner, 3, fill)
        shard = SparseShard(has_crcs=model.has_crcs)
        module = {name: shard.tensor((0,), "bfloat16") for name in model.shapes}
        root = model_root([model.shapes], model.dp, 3, 7, module)
        root["param_shapes"] = [ordered({n: Size(s) for n, s in model.shapes.items()})]
        shard.save(folder / f"zero_pp_rank_{d}_mp_rank_00_model_states.pt", root, fill)
