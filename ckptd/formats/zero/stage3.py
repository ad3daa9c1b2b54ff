"""Stage 3: fragments by arithmetic, `ceil(numel / dp)` elements per parameter and rank (formats.md §2.2).

There are no mappings: in sub-group s of every rank the parameters lie in the order of `param_shapes[s]`,
each padded inside itself to the same length on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero.experts import NO_EXPERTS, Experts
from ckptd.formats.zero.facts import as_dict, as_int, numel, shown, states_of, swapped_of
from ckptd.formats.zero.optimizers import refuse_unknown_layout
from ckptd.formats.zero.shards import (
    Flat,
    OpenedShard,
    OptimShard,
    Parameter,
    Piece,
    ShardGroup,
    SourceShard,
    StateRanges,
    flat,
    split_state,
)
from ckptd.formats.zero.stage12 import Shapes

if TYPE_CHECKING:
    from collections.abc import Iterator


Swapped = Callable[[str, str], tuple[int, int]]
"""(name of a tensor, words for it) → number and bytes of the source file that NVMe offload put it in."""


def shares(shapes: Shapes, dp: int) -> list[int]:
    """Return the elements that one rank holds of each sub-group."""
    return [sum(-(-(numel(shape) or 0) // dp) for shape in group.values()) for group in shapes]


def cut(
    opened: OpenedShard, lengths: list[int], swapped: Swapped, *, masters_only: bool = False
) -> OptimShard:
    """Keep of an opened optimizer shard only offsets; `masters_only` as in stages 1 and 2.

    `lengths`: elements of each sub-group that the parameters need; a tensor that was swapped out has none
    in the shard, so it does not tell.

    Raises:
        RefusedError: missing state, unreadable partitions. DamagedError: swapped-out state is not there.
    """
    source, inner = opened.source, as_dict(opened.root.get("optimizer_state_dict"))
    partitions = _partitions(inner.get("ds_zero_partition_groups"), source)
    fp32_groups, base = inner.get("fp32_flat_groups"), inner.get("optimizer_state_dict")
    if not isinstance(fp32_groups, list) or not (isinstance(base, dict) or masters_only):
        raise RefusedError(f"{source.path} lacks its fp32 partitions or its optimizer state")
    if not masters_only:
        refuse_unknown_layout(as_dict(base), source)
    groups: list[ShardGroup] = []
    for s, tensor in enumerate(fp32_groups):
        where, wanted = f"sub-group {s}", lengths[s] if s < len(lengths) else 0
        fp32, kept = flat(tensor, source, f"fp32 partition of {where}"), as_dict(states_of(base).get(s))
        away = {
            name: _swapped(value, source, f"{shown(name)} of {where}", wanted, swapped)
            for name, value in swapped_of(tensor, kept).items()
            if name == "fp32" or not masters_only
        }
        rest = {key: value for key, value in kept.items() if str(key) not in away and not masters_only}
        buffers, scalars = split_state(rest, away.get("fp32", fp32), source, where)
        groups.append(ShardGroup(buffers | away, scalars, ranks=partitions.get(s, ())))
    if not masters_only:
        _refuse_dropped(opened, groups)
    return OptimShard(source, groups)


def _partitions(value: Any, source: SourceShard) -> dict[int, tuple[int, ...]]:
    """Return the ranks that each sub-group is cut over, where AutoEP has some cut over fewer than all.

    Raises:
        RefusedError: this shard is not the part of it that it says.
    """
    found: dict[int, tuple[int, ...]] = {}
    for entry in map(as_dict, value if isinstance(value, list) else []):
        s, part, count = (as_int(entry.get(k)) for k in ("sub_group", "partition_rank", "partition_count"))
        listed = entry.get("partition_ranks")
        ranks = [as_int(rank) for rank in listed] if isinstance(listed, list) else []
        known = tuple(rank for rank in ranks if rank is not None)
        if s is None or part is None or len(ranks) != count or len(known) != count:
            raise RefusedError(f"{source.path} has an unreadable entry of ds_zero_partition_groups")
        if not 0 <= part < count or known[part] != source.d or s in found:
            raise RefusedError(f"{source.path} says that it is part {part} of sub-group {s} of ranks {known}")
        found[s] = known
    return found


def _refuse_dropped(opened: OpenedShard, groups: list[ShardGroup]) -> None:
    """Refuse a shard without the states that `offload_optimizer.ratio` below 1 keeps on the GPU.

    DeepSpeed saves none of them (formats.md §1); left out, their moments would begin anew unnoticed. Without
    that setting a sub-group that never had a gradient has none.

    Raises:
        RefusedError: a sub-group with elements has no state.
    """
    config = as_dict(as_dict(opened.root.get("ds_config")).get("zero_optimization"))
    ratio = as_dict(config.get("offload_optimizer")).get("ratio")
    held = [s for s, group in enumerate(groups) if group.states["fp32"].numel]
    bare = [s for s in held if len(groups[s].states) == 1]
    if bare and isinstance(ratio, int | float) and ratio < 1:
        raise RefusedError(
            f"{opened.source.path} has no optimizer state of {len(bare)} of its {len(held)} sub-groups: "
            f"offload_optimizer.ratio {ratio} keeps it on the GPU, and DeepSpeed saves none of that",
            hint="--form weights exports the model; train with ratio 1.0 to save the optimizer whole; the "
            "ZeRO form is safe as DeepSpeed wrote it, and its own load lacks that state too",
        )


def _swapped(tensor: Tensor, source: SourceShard, what: str, wanted: int, swapped: Swapped) -> Flat:
    """A swapped tensor as a buffer of as many of the wanted elements as its file (which is padded) holds."""
    index, nbytes = swapped(tensor.ds_id, f"{source.path}: {what}")
    return Flat(index, 0, min(wanted, nbytes // tensor.item_bytes), tensor.dtype, tensor.item_bytes)


def check_coverage(shards: list[OptimShard], shapes: Shapes) -> None:
    """Every buffer of every rank has exactly the length that the shapes demand.

    Raises:
        DamagedError, RefusedError: otherwise.
    """
    counts = {len(group.ranks) or len(shards) for shard in shards for group in shard.groups}
    lengths = {count: shares(shapes, count) for count in counts}
    for shard in shards:
        if len(shard.groups) != len(shapes):
            raise DamagedError(
                f"{shard.source.path} has {len(shard.groups)} sub-groups, param_shapes has {len(shapes)}"
            )
        for s in range(len(shapes)):
            wanted = lengths[len(shard.groups[s].ranks) or len(shards)][s]
            if set(shard.groups[s].states) != set(shards[0].groups[s].states):
                raise RefusedError(
                    f"{shard.source.path} has other optimizer states than rank 0 in sub-group {s}"
                )
            for key, buffer in shard.groups[s].states.items():
                if buffer.dtype != shards[0].groups[s].states[key].dtype:
                    raise RefusedError(f"{shard.source.path} stores {key} in another type than rank 0")
                if buffer.numel != wanted:
                    raise DamagedError(
                        f"{shard.source.path}: {key} of sub-group {s} holds {buffer.numel} elements, "
                        f"the parameters need {wanted}"
                    )


def owners(shards: list[OptimShard], s: int) -> list[tuple[int, ...]]:
    """Return the ranks that share each tensor of a sub-group, in the order of the lowest; one for most.

    Raises:
        RefusedError: they do not divide all ranks among them.
    """
    every = tuple(range(len(shards)))
    found = list(dict.fromkeys(shard.groups[s].ranks or every for shard in shards))
    are_alike = len({len(ranks) for ranks in found}) == 1
    if not are_alike or sorted(rank for ranks in found for rank in ranks) != list(every):
        raise RefusedError(
            f"{shards[0].source.path}: sub-group {s} is cut over ranks {found} of {len(every)}"
        )
    return found


def parameters(
    shards: list[OptimShard], shapes: Shapes, only: str | None = None, experts: Experts = NO_EXPERTS
) -> Iterator[Parameter]:
    """Parameters in the order of `shapes`; `shards` in ascending rank; `only`: just that state's ranges.

    A parameter of an expert group has the tensors of all expert-parallel ranks, one after another.

    Raises:
        DamagedError, RefusedError: see `check_coverage`, `owners`.
    """
    check_coverage(shards, shapes)
    for s, group_shapes in enumerate(shapes):
        offset, sharing = 0, owners(shards, s)
        for name, shape in group_shapes.items():
            share = -(-(numel(shape) or 0) // len(sharing[0]))
            made = _parameter(name, shape, shards, s, offset, share, only, sharing)
            yield replace(made, experts=experts.ep) if s in experts.groups else made
            offset += share


def _parameter(
    name: str,
    shape: tuple[int, ...],
    shards: list[OptimShard],
    s: int,
    offset: int,
    share: int,
    only: str | None,
    sharing: list[tuple[int, ...]],
) -> Parameter:
    total = numel(shape) or 0
    states: list[StateRanges] = []
    for key, reference in shards[0].groups[s].states.items():
        if only not in (None, key):
            continue
        pieces: list[Piece] = []
        for part, rank in (place for ranks in sharing for place in enumerate(ranks)):
            length = max(0, min(share, total - part * share))
            if length:
                buffer = shards[rank].groups[s].states[key]
                begin = buffer.offset + offset * buffer.item_bytes
                pieces.append(Piece(buffer.source, begin, length * buffer.item_bytes))
        states.append(StateRanges(key, reference.dtype, reference.item_bytes, tuple(pieces)))
    first = shards[0]
    return Parameter(name, tuple(shape), tuple(states), first.groups[s].scalars, first.source.index)
