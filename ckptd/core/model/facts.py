"""Hold the result of inspecting one file: data only, made in a restricted child, cached by identity.

`FileFacts` is the single interface between reading pickles (torchfile, zero) and deciding (lifecycle);
every field that is not known is None, never guessed (docs/design.md §3).
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING

from ckptd.base.identity import Model
from ckptd.core.model.layouts import Role, ShardKey
from ckptd.core.model.metric_names import finite, logged_name
from ckptd.core.model.save import Best

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REVISION = 1
"""Revision of what an inspection finds of a shard; what an older one found is inspected again."""


class Archive(StrEnum):
    """How a file's bytes are framed."""

    ZIP = "zip"
    """A `torch.save` archive, central directory valid, every record inside the file."""
    LEGACY = "legacy"
    """A `torch.save` stream from before torch 1.6, without a directory or CRCs."""
    TORN = "torn"
    EMPTY = "empty"
    OTHER = "other"
    """Not a torch archive and not expected to be one (side files)."""


class ShardFacts(Model):
    """Hold what the pickle of one shard says about its save (docs/formats.md §2)."""

    ds_version: str | None = None
    zero_stage: int | None = None
    dtype: str | None = None
    """bf16, fp16 or fp32, as the ds_config in the shard says."""
    optimizer: str | None = None
    """Name of the optimizer in ds_config, or the class that its states suggest."""
    partition_count: tuple[int, ...] = ()
    """Per group at stages 1 and 2, one value at stage 3."""
    dp_world_size: int | None = None
    mp_world_size: int | None = None
    tp: int | None = None
    pp: int | None = None
    sp: int | None = None
    ep: int | None = None
    global_steps: int | None = None
    optimizer_step: int | None = None
    layers: tuple[int, ...] = ()
    """Pipeline layer numbers named in param_shapes; empty when not a pipeline."""
    num_experts: tuple[int, ...] = ()
    """Experts per MoE layer; empty when there are none."""
    autoep: bool = False
    """The experts are AutoEP's, whose universal form is of no expert-parallel size."""
    round_robin_gradients: bool = False
    """The universal form must be loaded with this option switched off (ADR 0087)."""
    run_id: str | None = None
    parameters: int | None = None
    """Number of elements of all parameters in param_shapes."""
    groups: int | None = None
    """Entries of param_shapes: the optimizer's groups at stages 1 and 2, sub-groups at stage 3."""
    frozen_parameters: int = 0
    buffers: int = 0
    has_universal_info: bool = False
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    held: tuple[int, ...] = ()
    """Elements of each fp32 (sub-)group in an optimizer shard; empty when not known."""
    owed: tuple[int, ...] = ()
    """Elements that the parameters need of each: of one rank in model states of stage 3, in optimizer shards
    of stages 1 and 2 by their own mappings."""
    emptied: tuple[str, ...] = ()
    """Optimizer states whose tensor holds no element: swapped out, where fp32 is too."""
    item_bytes: int = 4
    is_offloaded: bool = False
    """ds_config swaps the optimizer's states to NVMe."""
    is_node_local: bool = False
    """Each node writes to its own disk, and swapped tensors are named by local rank."""
    revision: int = 0


class TrainerFacts(Model):
    """Hold what `trainer_state.json` of Hugging Face's Trainer says."""

    global_step: int | None = None
    best_metric: float | None = None
    best_checkpoint: str | None = None
    """Last component of best_model_checkpoint: the path itself is as the trainer saw it (H37)."""
    metrics: tuple[tuple[str, float], ...] = ()
    """(name, value) of what `log_history` holds for `global_step`."""


class FileFacts(Model):
    """One file as inspected."""

    path: str
    """Relative to the checkpoint folder, `/`-separated."""
    bytes: int
    archive: Archive
    reason: str | None = None
    """Why the archive is torn, or why the shard's pickle could not be read."""
    fingerprint: str = ""
    """SHA-256 hex (docs/design.md §3 *Fingerprint*); empty for torn and empty files."""
    tensor_fingerprint: str | None = None
    has_crc: bool = False
    role: Role = Role.SIDE
    shard: ShardKey = ShardKey()
    facts: ShardFacts | None = None
    """None for side files, and for shards whose pickle could not be read."""
    trainer: TrainerFacts | None = None
    """Read from `trainer_state.json` alone."""


# --- Metrics by step from a file that the trainer writes (`metrics_file`) --------------------------------
# They let keep_best rank checkpoints of plain DeepSpeed, which records no metric of its own. The file may
# be cut anywhere and hold anything: lines without a value are skipped.

LONGEST_LINE_BYTES = 64 << 10
LARGEST_DOCUMENT_BYTES = 1 << 20
"""One that is parsed whole costs a multiple of its size (P12)."""
_STEP_NAMES = ("step", "global_step", "_step")

Values = dict[int, tuple[float, ...]]
"""Step → what was written for it, in order: a run that was rewound writes a step again."""


def parse_metrics(data: bytes, metric: str, *, is_tail: bool = False) -> Values | None:
    """Values of `metric` by step; None where the bytes have none of the accepted shapes.

    `is_tail`: the beginning of the file is missing, so the first line may be half a line.
    """
    if not is_tail and len(data) <= LARGEST_DOCUMENT_BYTES:
        whole = _loaded(data)
        if isinstance(whole, dict | list):
            return _collected(_rows(whole, metric), metric)
    lines = data.split(b"\n")[is_tail:]
    rows = [
        row for line in lines if len(line) <= LONGEST_LINE_BYTES and isinstance(row := _loaded(line), dict)
    ]
    return _collected(rows, metric) if rows or not data.strip() else None


def value_of(values: Values, metric: str, step: int, *, earlier_saves: int) -> Best | None:
    """The value of a save; `earlier_saves`: how often its step was saved before (a run that was rewound).

    What was written for those is theirs: a step written no oftener than it was saved has no value yet.
    """
    written = values.get(step, ())
    if len(written) <= earlier_saves:
        return None
    return Best(metric=metric, value=written[-1])


def _loaded(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _rows(whole: dict[str, object] | list[object], metric: str) -> Iterator[dict[str, object]]:
    """A list of rows, a row alone, {"log_history": rows}, or {step: value} and {step: {name: value}}."""
    if isinstance(whole, dict) and isinstance(history := whole.get("log_history"), list):
        whole = history
    if isinstance(whole, list):
        yield from (row for row in whole if isinstance(row, dict))
    elif _step_of(whole) is not None:
        yield whole
    else:
        for key, value in whole.items():
            if key.isascii() and key.isdigit() and len(key) < 20:
                yield {**(value if isinstance(value, dict) else {metric: value}), "step": int(key)}


def _collected(rows: Iterable[dict[str, object]], metric: str) -> Values:
    """Collect a metric by step; values of evaluations, where there are any, replace those of training.

    A training loss is not comparable with an evaluation loss.
    """
    named: dict[int, list[float]] = {}
    evaluated: dict[int, list[float]] = {}
    for row in rows:
        step = _step_of(row)
        for found, name in ((named, metric), (evaluated, logged_name(metric))):
            value = finite(row.get(name))
            if step is not None and value is not None:
                found.setdefault(step, []).append(value)
    return {step: tuple(values) for step, values in (evaluated or named).items()}


def _step_of(row: dict[str, object]) -> int | None:
    step = next((row[name] for name in _STEP_NAMES if name in row), None)
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None
