"""Locate parameters under `round_robin_gradients`, which DeepSpeed's own mappings get wrong.

With that option the flat buffer is laid out in a shuffled order, which `param_shapes` has, but
`param_slice_mappings` adds addresses up in the order before the shuffle (DeepSpeed 0.19.8,
`_link_all_hp_params`; right only where parameters are padded for alignment). The stock converter goes by the
mappings, so its output has parameters under other names; ckptd restores the truth (ADR 0087).
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from ckptd.errors import RefusedError
from ckptd.formats.zero.facts import as_dict, numel

if TYPE_CHECKING:
    from ckptd.formats.zero.save import ModelRank, Save


NOTE = (
    "trained with round_robin_gradients: resume with it switched off, because with it on DeepSpeed's "
    "universal loader puts parameters into wrong places (adr/0087)"
)
STRICT_NOTE = (
    "trained with round_robin_gradients: as the stock converter writes it, parameters have each other's "
    "values; it resumes on the same ranks with the option on, and nowhere else (adr/0087)"
)


def is_shuffled(save: Save) -> bool:
    """Tell whether the mappings of the shards are of another order than their buffers."""
    config = as_dict(as_dict(save.rank0_optim.root.get("ds_config")).get("zero_optimization"))
    return save.stage < 3 and save.dp > 1 and config.get("round_robin_gradients") is True


def restore_addresses(save: Save) -> None:
    """Replace the mappings of every shard, when the save was trained with `round_robin_gradients`.

    Raises:
        RefusedError: the parameters do not fit the buffers in that order, or some are experts.
    """
    if not is_shuffled(save):
        return
    if save.experts.groups:
        raise RefusedError(
            "experts that were trained with round_robin_gradients are not converted",
            hint="the ZeRO form is safe all the same; train with the option switched off",
        )
    for row in save.model_ranks:
        for model_rank in row:
            for g in range(len(model_rank.shapes)):
                if not any(shard.groups[g].alignment_padding for shard in model_rank.shards):
                    _restore(model_rank, g)


def _restore(model_rank: ModelRank, g: int) -> None:
    """Parameters one after another through the slices of all ranks, in ascending rank."""
    lengths = [shard.groups[g].states["fp32"].numel for shard in model_rank.shards]
    ends = list(accumulate(lengths))
    mappings: list[list[tuple[str, int, int]]] = [[] for _ in lengths]
    at = 0
    for name, shape in model_rank.shapes[g].items():
        end = at + (numel(shape) or 0)
        for mapping, length, last in zip(mappings, lengths, ends, strict=True):
            first = last - length
            low, high = max(at, first), min(end, last)
            if low < high:
                mapping.append((name, low - first, high - low))
        at = end
    if at > ends[-1]:
        raise RefusedError(f"the parameters of group {g} need {at} elements, its slices hold {ends[-1]}")
    for shard, mapping in zip(model_rank.shards, mappings, strict=True):
        shard.groups[g].mapping = mapping
