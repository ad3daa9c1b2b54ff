"""Locate parameters in stages 1 and 2 and BF16_Optimizer: by `param_slice_mappings` (formats.md §2.1, §4).

A rank holds one flat slice per optimizer group; the mapping says where each parameter's piece starts
in it. A parameter is the concatenation of its pieces in ascending rank, whatever the order of addresses
inside a rank (round_robin_gradients shuffles those).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.torchfile.values import Inert
from ckptd.formats.zero.experts import NO_EXPERTS, Experts
from ckptd.formats.zero.facts import as_dict, as_int, numel, shown, states_of
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

if TYPE_CHECKING:
    from collections.abc import Iterator

Shapes = list[dict[str, tuple[int, ...]]]
MOMENTUM = "momentum_buffer"
SHARDED_KEYS = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


def cut(opened: OpenedShard, *, masters_only: bool = False) -> OptimShard:
    """Keep of an opened optimizer shard only offsets and mappings.

    With `masters_only` the fp32 partitions alone, which is all that weights need: whatever state the
    optimizer keeps beside them is not looked at.

    Raises:
        RefusedError: missing mappings; unless `masters_only` elastic checkpoints, or state of another form.
    """
    source, inner = opened.source, as_dict(opened.root.get("optimizer_state_dict"))
    base = inner.get("base_optimizer_state")
    if isinstance(base, list) and not masters_only:
        raise RefusedError(
            f"{source.path} is an elastic checkpoint, which has no universal form",
            hint="save with elastic_checkpoint false; the ZeRO form is safe all the same",
        )
    fp32_groups, mappings = inner.get("single_partition_of_fp32_groups"), inner.get("param_slice_mappings")
    if not isinstance(fp32_groups, list) or not isinstance(mappings, list):
        raise RefusedError(f"{source.path} lacks its fp32 partitions or its param_slice_mappings")
    if not isinstance(base, dict) and not masters_only:
        raise RefusedError(f"{source.path} lacks its optimizer state")
    if len(fp32_groups) != len(mappings):
        raise RefusedError(f"{source.path} has {len(fp32_groups)} fp32 groups and {len(mappings)} mappings")
    if not masters_only:
        refuse_unknown_layout(as_dict(base), source)
    states = {} if masters_only else states_of(base)
    muon = set() if masters_only else _muon_groups(opened, base)
    paddings = _paddings(inner.get("group_paddings"), len(mappings))
    aligned = inner.get("param_alignment_paddings")
    groups: list[ShardGroup] = []
    for g, (tensor, mapping) in enumerate(zip(fp32_groups, mappings, strict=True)):
        fp32 = flat(tensor, source, f"fp32 partition of group {g}")
        alignment = sum(_integers(aligned[g])) if isinstance(aligned, list) and g < len(aligned) else 0
        room = paddings[g] + alignment
        state = dict(as_dict(states.get(g)))
        momentum = state.pop(MOMENTUM, None) if g in muon and len(state) == 1 else None
        buffers, scalars = split_state(state, fp32, source, f"group {g}", room)
        group = ShardGroup(buffers, scalars, _mapping(mapping, source, g), paddings[g], alignment)
        if momentum is not None:
            group.whole[MOMENTUM] = flat(momentum, source, f"Muon's momentum of group {g}")
        groups.append(group)
    return OptimShard(source, groups)


def _muon_groups(opened: OpenedShard, base: Any) -> set[int]:
    """Return the groups that Muon trains and whose momentum is kept of whole matrices.

    With the optimizer in CPU memory the momentum is cut like everything else.

    Raises:
        RefusedError: addresses that do not tell the order of its matrices.
    """
    groups = as_dict(base).get("param_groups")
    config = as_dict(as_dict(opened.root.get("ds_config")).get("zero_optimization"))
    offload = as_dict(config.get("offload_optimizer")).get("device")
    listed = enumerate(groups if isinstance(groups, list) else [])
    found = {g for g, group in listed if as_dict(group).get("use_muon") is True}
    if offload not in (None, "none"):
        return set()
    if found and opened.facts.round_robin_gradients and max(opened.facts.partition_count, default=1) > 1:
        raise RefusedError(
            f"{opened.source.path} is of Muon with round_robin_gradients, which is not converted",
            hint="--form weights-fp32 exports the weights; the ZeRO form is safe all the same",
        )
    return found


def _integers(values: Any) -> list[int]:
    return [as_int(v) or 0 for v in values] if isinstance(values, list | tuple) else []


def _paddings(value: Any, count: int) -> list[int]:
    found = _integers(value)
    return found + [0] * (count - len(found))


def _mapping(value: Any, source: SourceShard, group: int) -> list[tuple[str, int, int]]:
    fragments: list[tuple[str, int, int]] = []
    for name, address in as_dict(value).items():
        start = length = None
        if isinstance(address, Inert):
            start, length = as_int(address.field("start")), as_int(address.field("numel"))
        if not isinstance(name, str) or start is None or length is None or start < 0 or length < 0:
            raise RefusedError(
                f"{source.path}: group {group} has an unreadable slice mapping for {shown(name)}"
            )
        fragments.append((name, start, length))
    return fragments


def state_names(shards: list[OptimShard]) -> list[str]:
    """Names of all states, "fp32" first, in the order of the first shard that has them."""
    groups = [group for shard in shards for group in shard.groups]
    return list(dict.fromkeys(name for group in groups for name in (*group.states, *group.whole)))


def parameters(
    shards: list[OptimShard], shapes: Shapes, only: str | None = None, experts: Experts = NO_EXPERTS
) -> Iterator[Parameter]:
    """Parameters in the order of `shapes`; `shards` in ascending rank; `only`: just that state's ranges.

    A parameter of an expert group has the tensors of all expert-parallel ranks, one after another.

    Raises:
        DamagedError: pieces that overlap, leave their buffer, miss elements, or leave unknown gaps.
        RefusedError: groups that differ between the ranks.
    """
    count = len(shards[0].groups)
    if any(len(shard.groups) != count for shard in shards) or len(shapes) != count:
        raise RefusedError("the shards do not agree on the number of optimizer groups")
    for g, group_shapes in enumerate(shapes):
        names = [n for n in _same_states(shards, g) if only in (None, n)]
        for shard in shards:
            check_coverage(shard, g)
        if g in experts.groups and any(shard.groups[g].whole for shard in shards):
            raise RefusedError(
                f"experts that Muon trains (group {g}) are not converted",
                hint="the ZeRO form is safe all the same",
            )
        places = [_whole_places(shard, g, group_shapes) for shard in shards]
        owners = experts.owners(g, len(shards))
        held = [_by_parameter(shards, ranks, g, group_shapes) for ranks in owners]
        for name, shape in group_shapes.items():
            fragments = [of.pop(name, []) for of in held]
            made = _parameter(name, shape, fragments, shards, g, names, places)
            yield replace(made, experts=experts.ep) if g in experts.groups else made


def _same_states(shards: list[OptimShard], g: int) -> list[str]:
    """State names of a group; all ranks that hold elements must have the same."""
    holding = _holding(shards, g)
    names = [*holding[0].groups[g].states, *holding[0].groups[g].whole]
    for shard in holding:
        group, first = shard.groups[g], holding[0].groups[g]
        if {*group.states, *group.whole} != set(names) or any(
            group.buffer(n).dtype != first.buffer(n).dtype for n in names
        ):
            raise RefusedError(
                f"{shard.source.path} has other optimizer states than {holding[0].source.path} in group {g}"
            )
    return names


def _holding(shards: list[OptimShard], g: int) -> list[OptimShard]:
    """Return the ranks that hold elements of a group, or the first: an empty rank need not have any state."""
    return [s for s in shards if s.groups[g].states["fp32"].numel] or shards[:1]


def check_coverage(shard: OptimShard, g: int) -> None:
    """Every element of a rank's group is used once or is known padding (docs/design.md §4).

    Raises:
        DamagedError: otherwise.
    """
    group, path = shard.groups[g], shard.source.path
    at = used = 0
    for start, length, name in sorted((s, n, name) for name, s, n in group.mapping):
        if length and start < at:
            raise DamagedError(f"{path}: {name} overlaps another parameter in group {g}")
        at = max(at, start + length)
        used += length
    for key, buffer in group.states.items():
        gap = buffer.numel - used
        if at > buffer.numel:
            raise DamagedError(
                f"{path}: the mappings of group {g} leave the {key} buffer of {buffer.numel} elements"
            )
        if gap > group.padding + group.alignment_padding:
            raise DamagedError(
                f"{path}: {gap} elements of {key} in group {g} belong to no parameter "
                f"and only {group.padding + group.alignment_padding} are padding"
            )


def _whole_places(shard: OptimShard, g: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Name → first element in the buffers that have whole parameters; empty where there are none.

    Raises:
        DamagedError: a buffer has other elements than the parameters with a piece on this rank.
    """
    group = shard.groups[g]
    places: dict[str, int] = {}
    at = 0
    for _, name in sorted((start, name) for name, start, length in group.mapping if length):
        places[name] = at
        at += numel(shapes.get(name, ())) or 0
    for key, buffer in group.whole.items():
        if buffer.numel != at:
            raise DamagedError(
                f"{shard.source.path}: {key} of group {g} holds {buffer.numel} elements, "
                f"its matrices have {at}"
            )
    return places if group.whole else {}


def _by_parameter(
    shards: list[OptimShard], ranks: range, g: int, shapes: dict[str, tuple[int, ...]]
) -> dict[str, list[tuple[int, int, int]]]:
    """Name → [(position of the shard, start, numel)] in ascending rank, of these ranks."""
    fragments: dict[str, list[tuple[int, int, int]]] = {}
    for position in ranks:
        shard = shards[position]
        for name, start, length in shard.groups[g].mapping:
            if name not in shapes:
                raise DamagedError(f"{shard.source.path} maps {name}, which param_shapes does not know")
            if length:
                fragments.setdefault(name, []).append((position, start, length))
    return fragments


def _parameter(
    name: str,
    shape: tuple[int, ...],
    held: list[list[tuple[int, int, int]]],
    shards: list[OptimShard],
    g: int,
    names: list[str],
    places: list[dict[str, int]],
) -> Parameter:
    """`held`: fragments by expert-parallel rank, each of them a whole tensor; one list without experts."""
    wanted = numel(shape)
    for rank, of_rank in enumerate(held):
        found = sum(length for _, _, length in of_rank)
        if wanted != found:
            where = f" of expert-parallel rank {rank}" if len(held) > 1 else ""
            raise DamagedError(f"{name} has {wanted} elements, the shards{where} hold {found} of them")
    fragments = [fragment for of_rank in held for fragment in of_rank]
    first = shards[fragments[0][0]] if fragments else _holding(shards, g)[0]
    states: list[StateRanges] = []
    for key in names:
        pieces: list[Piece] = []
        reference: Flat = first.groups[g].buffer(key)
        item = reference.item_bytes
        held_here = fragments
        if (
            key in first.groups[g].whole
        ):  # every rank with a piece of it has all of it: the first one's counts
            held_here = [(position, places[position][name], wanted or 0) for position, _, _ in fragments[:1]]
        for position, start, length in held_here:
            buffer: Flat = shards[position].groups[g].buffer(key)
            pieces.append(Piece(buffer.source, buffer.offset + start * item, length * item))
        states.append(StateRanges(key, reference.dtype, item, tuple(pieces)))
    scalars = first.groups[g].scalars
    return Parameter(name, tuple(shape), tuple(states), scalars, first.source.index)
