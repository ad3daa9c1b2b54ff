"""Extract facts about its save from an unpickled shard: stage, grid, dtype, step (docs/formats.md §2).

This runs in restricted children. A field that is not known is None, never guessed.
"""

from __future__ import annotations

import math
import os
import re
import struct
from typing import Any

from ckptd.core.model.shard_facts import REVISION, ShardFacts
from ckptd.errors import NeedsWholeFiles
from ckptd.formats.torchfile.skeleton import SMALL_BYTES, WHOLE, MirrorFd
from ckptd.formats.torchfile.values import Inert, Tensor

EXPERT_GROUP = re.compile(r"ep_size_([1-9][0-9]{0,6})")
"""Name of an optimizer's group of experts that so many ranks share."""
_SUGGESTED = (
    ({"exp_avg", "exp_avg_sq"}, "Adam"),
    ({"exp_avg"}, "Lion"),
    ({"momentum_buffer"}, "SGD"),
    ({"sum"}, "Adagrad"),
)
_SCALARS = {
    "float32": "<f",
    "float64": "<d",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "uint8": "<B",
    "int8": "<b",
}


def as_int(value: Any) -> int | None:
    """Return an int of at most 64 bits, an int-like enum member (`ZeroStageEnum(2)`), else None."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


def shown(value: Any) -> str:
    """Return a value of a pickle for a message: one short line, whatever it is."""
    if isinstance(value, str):
        return ascii(value[:80])[1:-1]
    if isinstance(value, tuple) and len(value) <= 8:
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, float):
        return repr(value)
    return str(value) if value is None or as_int(value) is not None else f"a {type(value).__name__}"


def as_dict(value: Any) -> dict[Any, Any]:
    """Return the value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def states_of(base: Any) -> dict[Any, Any]:
    """Return an optimizer's states by group, which a state dictionary has as a dictionary or as a list."""
    states = as_dict(base).get("state")
    return dict(enumerate(states)) if isinstance(states, list) else as_dict(states)


def scalar(value: Any, fd: int) -> float | int | None:
    """A Python number, or the one element of a tensor in the file open at `fd`; None when it is neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, Tensor) and value.numel == 1 and value.dtype in _SCALARS:
        if isinstance(fd, MirrorFd) and value.storage.nbytes > SMALL_BYTES:
            raise NeedsWholeFiles(
                "a step lies in a large tensor, which is not read from a remote", hint=WHOLE
            )
        raw = os.pread(fd, value.item_bytes, value.byte_offset)
        if len(raw) == value.item_bytes:
            return struct.unpack(_SCALARS[value.dtype], raw)[0]  # type: ignore[no-any-return]
    return None


def shard_facts(root: Any, fd: int) -> ShardFacts:
    """Facts of one unpickled shard; `fd` is open on its file (steps are read from it)."""
    top = as_dict(root)
    config = as_dict(top.get("ds_config"))
    facts = ShardFacts(
        revision=REVISION,
        ds_version=_text(top.get("ds_version")),
        dtype=_dtype(config),
        optimizer=_text(as_dict(config.get("optimizer")).get("type")),
        zero_stage=as_int(as_dict(config.get("zero_optimization")).get("stage")),
        train_batch_size=as_int(config.get("train_batch_size")),
        micro_batch_size=as_int(config.get("train_micro_batch_size_per_gpu")),
        round_robin_gradients=as_dict(config.get("zero_optimization")).get("round_robin_gradients") is True,
        has_universal_info=isinstance(top.get("universal_checkpoint_info"), dict),
        is_offloaded=_is_offloaded(config),
        is_node_local=as_dict(config.get("checkpoint")).get("use_node_local_storage") is True,
    )
    if isinstance(top.get("optimizer_state_dict"), dict):
        _optimizer_facts(facts, top["optimizer_state_dict"], fd)
    if "param_shapes" in top or "module" in top:
        _model_facts(facts, top, has_config=bool(config))
    elif "pytorch-lightning_version" in top:
        facts.global_steps = as_int(top.get("global_step"))
    return facts


def _is_offloaded(config: dict[Any, Any]) -> bool:
    """Tell whether the optimizer's states are swapped to NVMe."""
    offload = as_dict(as_dict(config.get("zero_optimization")).get("offload_optimizer"))
    return shown(offload.get("device")) == "nvme"


def _optimizer_facts(facts: ShardFacts, inner: dict[Any, Any], fd: int) -> None:
    stage = as_int(inner.get("zero_stage"))
    facts.zero_stage = 1 if inner.get("zero_stage") is None else stage
    facts.ds_version = facts.ds_version or _text(inner.get("ds_version"))
    facts.partition_count = _integers(inner.get("partition_count"))
    base = inner.get("optimizer_state_dict") if facts.zero_stage == 3 else inner.get("base_optimizer_state")
    facts.ep = _expert_parallel(as_dict(base).get("param_groups"))
    states = states_of(base)
    _element_facts(facts, inner, states)
    first = as_dict(next(iter(states.values()), None))
    step = scalar(first.get("step"), fd)
    if step is None and isinstance(base, dict):
        groups = base.get("param_groups")
        head = as_dict(groups[0]) if isinstance(groups, list) and groups else {}
        step = scalar(head.get("step"), fd)
    facts.optimizer_step = int(step) if step is not None and math.isfinite(step) else None
    if facts.optimizer is None:
        facts.optimizer = next((name for keys, name in _SUGGESTED if keys <= set(first)), None)
    facts.has_universal_info |= isinstance(inner.get("universal_checkpoint_info"), dict)


def _expert_parallel(groups: Any) -> int | None:
    """Return how many ranks share experts, as the optimizer's groups are called; None: not one number."""
    listed = [as_dict(group) for group in groups] if isinstance(groups, list) else []
    names = {shown(group.get("name")) for group in listed if group.get("moe") is True}
    matches = {match[1] for name in names if (match := EXPERT_GROUP.fullmatch(name))}
    return int(matches.pop()) if len(matches) == 1 else None


def _element_facts(facts: ShardFacts, inner: dict[Any, Any], states: dict[Any, Any]) -> None:
    """Count the elements that a shard holds, and at stages 1 and 2 those that its own mappings need.

    At stage 3 the model states tell what is needed. Of AutoEP's partitions nothing is told.
    """
    groups = inner.get("fp32_flat_groups" if facts.zero_stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(groups, list) or inner.get("ds_zero_partition_groups"):
        return
    tensors = [group for group in groups if isinstance(group, Tensor)]
    if len(tensors) < len(groups):
        return
    facts.held = tuple(tensor.numel for tensor in tensors)
    facts.item_bytes = min((tensor.item_bytes for tensor in tensors), default=4)
    found = (key for state in states.values() for key, value in as_dict(state).items() if _is_empty(value))
    facts.emptied = tuple(sorted({key for key in found if isinstance(key, str) and len(key) <= 256}))
    if facts.zero_stage == 3:
        of_groups = (swapped_of(tensor, as_dict(states.get(g))) for g, tensor in enumerate(tensors))
        away = [tensor for group in of_groups for tensor in group.values() if len(tensor.ds_id) <= 256]
        facts.swapped = tuple((tensor.ds_id, tensor.numel) for tensor in away)
    mappings = inner.get("param_slice_mappings")
    if facts.zero_stage != 3 and isinstance(mappings, list) and len(mappings) == len(groups):
        facts.owed = tuple(_mapped(mapping) for mapping in mappings)


def swapped_of(fp32: Tensor, state: dict[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a stage 3 sub-group that NVMe offload keeps in files: "fp32" and its states.

    DeepSpeed names such a state after it and its master, `exp_avg-0_28`. The shard may hold the elements as
    well, where pipelined swapping left them in its buffers; a load reads the files. Empty: none is swapped.
    """
    named = {
        str(key): value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ds_id == f"{key}-{fp32.ds_id}"
    }
    is_swapped = fp32.ds_id and (named or (fp32.numel == 0 and not state))
    return {"fp32": fp32, **named} if is_swapped else {}


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel == 0


def _mapped(mapping: Any) -> int:
    """Return the end of the last slice that a mapping names."""
    ends = [0]
    for address in as_dict(mapping).values():
        if isinstance(address, Inert):
            start, length = as_int(address.field("start")), as_int(address.field("numel"))
            ends += [start + length] if start is not None and length is not None else []
    return max(ends)


def _model_facts(facts: ShardFacts, top: dict[Any, Any], *, has_config: bool) -> None:
    facts.dp_world_size = as_int(top.get("dp_world_size"))
    facts.mp_world_size = as_int(top.get("mp_world_size"))
    facts.global_steps = as_int(top.get("global_steps"))
    grid = as_dict(top.get("checkpoint_parallel_dimensions"))
    facts.tp, facts.pp = as_int(grid.get("tp_degree")), as_int(grid.get("pp_degree"))
    facts.sp, facts.ep = as_int(grid.get("sp_degree")), as_int(grid.get("ep_degree"))
    if facts.mp_world_size == 1 and facts.pp in (None, 1) and (facts.tp or 1) > 1:
        # Ulysses: 0.19.8 writes its degree as tp_degree; to ZeRO these ranks are data parallel (§2.6).
        facts.tp, facts.sp = 1, facts.tp
    facts.num_experts = _integers(top.get("num_experts"))
    facts.autoep = bool(top.get("ds_autoep_layers") or top.get("autoep_layers"))
    names = top.get("buffer_names")
    facts.buffers = len(names) if isinstance(names, list) else 0
    facts.frozen_parameters = len(as_dict(top.get("frozen_param_shapes")))
    shapes = top.get("param_shapes")
    if facts.zero_stage == 0 and _is_sharded(top):
        # BF16_Optimizer, which shards without ZeRO too (pipelines; any bf16 up to 0.17): its shards say 1
        facts.zero_stage = 1
    if isinstance(shapes, list):
        groups = [as_dict(group) for group in shapes]
        facts.groups = len(groups)
        facts.parameters = sum(numel(shape) or 0 for group in groups for shape in group.values())
        dp = facts.dp_world_size
        if facts.zero_stage == 3 and dp and not facts.autoep:
            facts.owed = tuple(sum(-(-(numel(n) or 0) // dp) for n in group.values()) for group in groups)
        if top.get("module") is None:
            heads = {n.partition(".")[0] for group in groups for n in group if isinstance(n, str)}
            facts.layers = tuple(sorted(int(head) for head in heads if head.isdecimal() and len(head) < 10))
    elif facts.zero_stage is None and has_config:
        # without ds_config (native MoE before 0.19.5) these model states do not tell the stage
        facts.zero_stage = 0


def _is_sharded(top: dict[Any, Any]) -> bool:
    """Tell whether the optimizer whose model states these are writes shards of its own."""
    optimizer = as_dict(top.get("optimizer"))
    return isinstance(top.get("param_shapes"), list) or "single_partition_of_fp32_groups" in optimizer


def numel(shape: Any) -> int | None:
    """Elements of a shape (a `torch.Size` or a plain tuple); None when it is no shape."""
    if not isinstance(shape, tuple | list) or len(shape) > 64:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= 1 << 48 for n in shape):
        return None
    return math.prod(shape)


def _dtype(config: dict[Any, Any]) -> str | None:
    if not config:
        return None
    if as_dict(config.get("bf16") or config.get("bfloat16")).get("enabled") is True:
        return "bf16"
    return "fp16" if as_dict(config.get("fp16")).get("enabled") is True else "fp32"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= 256 else None


def _integers(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [as_int(v) for v in values[:100_000]]
    return tuple(n for n in numbers if n is not None) if all(n is not None for n in numbers) else ()
