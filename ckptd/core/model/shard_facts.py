"""Hold what a shard's header says of its save: written in restricted children, kept in the journal.

A plain dataclass, since those children load no pydantic. A field that is not known is None, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

REVISION = 3
"""Revision of what an inspection finds of a shard; what an older one found is inspected again."""


@dataclass(slots=True, kw_only=True)
class ShardFacts:
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
    """Ranks that share experts: of optimizer shards as their groups of experts are called."""
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
    swapped: tuple[tuple[str, int], ...] = ()
    """Tensors that NVMe offload copies beside the shard: name, and elements that lie in the shard as well."""
    item_bytes: int = 4
    is_offloaded: bool = False
    """ds_config swaps the optimizer's states to NVMe."""
    is_node_local: bool = False
    """Each node writes to its own disk, and swapped tensors are named by local rank."""
    revision: int = 0
    """`REVISION` of the inspection that found this; 0: of a release that noted none."""
