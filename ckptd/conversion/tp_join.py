"""Geometry and fragments together: a joined parameter's state as parts of source files.

`ckptd.formats.zero.patterns` says in elements how tensor ranks join, `ckptd.formats.zero.shards` where
each rank's shard lies in bytes; here one is laid over the other.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from ckptd.conversion.parts import Mean, Part, Range, Stream, Woven
from ckptd.conversion.plan import OutputCheck
from ckptd.errors import RefusedError
from ckptd.formats.zero.blocks import BlockCopy, Step, Strand, Weave
from ckptd.formats.zero.experts import stacked
from ckptd.formats.zero.patterns import Patterns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.formats.zero.patterns import JoinedParameter
    from ckptd.formats.zero.save import Save
    from ckptd.formats.zero.shards import Parameter, StateRanges

WIDE_ROW_BYTES = 256 << 10
"""Rows from this width on become ranges: few enough to list, and a file system may clone them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedState:
    """One state of a full parameter: its elements in row-major order of `shape`, type `dtype`, as parts."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    parts: tuple[Part, ...]
    checks: tuple[OutputCheck, ...]


def patterns_of(save: Save, *, strict: bool) -> Patterns:
    """Return the trainer's description of the parameters; one tensor rank of stage 3 never has one.

    Raises:
        RefusedError: several tensor ranks, and nothing says how they join.
    """
    if save.tp == 1 and save.stage >= 3:
        return Patterns(None)
    patterns = Patterns(save.universal_info)
    if save.tp > 1 and (save.universal_info is None or (strict and not patterns.says_anything)):
        where = f"universal_checkpoint_info of {save.rank0_model.source.path}"
        raise RefusedError(
            f"{where} {'is missing and ' if save.universal_info is None else ''}"
            f"says nothing of how the {save.tp} tensor-parallel ranks join",
            hint="save again with that key in client_state, as AutoTP and Megatron-DeepSpeed do; "
            "--inject-missing-state does not help: it would join every parameter along dimension 0, which is "
            "wrong for row-parallel and replicated ones. The ZeRO form is safe all the same",
        )
    return patterns


class Shard:
    """A tensor rank's shard of one state: byte ranges that can be cut anywhere."""

    def __init__(self, state: StateRanges) -> None:
        self.pieces = state.pieces
        self.ends = list(accumulate(piece.nbytes for piece in state.pieces))

    def cut(self, begin: int, nbytes: int) -> Iterator[Range]:
        """`nbytes` bytes from byte `begin` of the flattened shard.

        Raises:
            RefusedError: the layout reaches beyond the shard.
        """
        if begin < 0 or nbytes < 0 or begin + nbytes > (self.ends[-1] if self.ends else 0):
            raise RefusedError("its tensor-parallel layout reaches beyond a shard")
        index = bisect_right(self.ends, begin)
        while nbytes:
            piece = self.pieces[index]
            skip = begin - (self.ends[index] - piece.nbytes)
            count = min(nbytes, piece.nbytes - skip)
            yield Range(piece.source, piece.offset + skip, count)
            begin, nbytes, index = begin + count, nbytes - count, index + 1


def join_states(ranks: list[Parameter], patterns: Patterns) -> tuple[JoinedParameter, list[JoinedState]]:
    """Every state that `ranks` (one shard per tensor rank) hold, joined.

    Raises:
        RefusedError: the shards contradict the trainer's description of them.
    """
    join = patterns.join(ranks[0].name, [rank.shape for rank in ranks])
    return join_as(join, ranks)


def join_as(join: JoinedParameter, ranks: list[Parameter]) -> tuple[JoinedParameter, list[JoinedState]]:
    """Return the states of `ranks` by a rule that is known; a parameter of experts is stacked.

    Raises:
        RefusedError: the ranks differ in states or types, or contradict the rule.
    """
    name = ranks[0].name
    shapes, experts = [rank.shape for rank in ranks], ranks[0].experts
    if any(
        [(s.name, s.dtype) for s in r.states] != [(s.name, s.dtype) for s in ranks[0].states] for r in ranks
    ):
        raise RefusedError(f"{name} has other optimizer states or types on some tensor ranks")
    if experts:
        try:
            join = stacked(join, shapes, experts)
        except RefusedError as error:
            raise RefusedError(f"{name}: {error.message}", hint=error.hint) from error
    joined: list[JoinedState] = []
    for states in zip(*(rank.states for rank in ranks), strict=True):
        try:
            joined.append(_state(name, join, list(states)))
        except RefusedError as error:
            raise RefusedError(f"{name}: {error.message}", hint=error.hint) from error
    return join, joined


def _state(name: str, join: JoinedParameter, states: list[StateRanges]) -> JoinedState:
    first, item = states[0], states[0].item_bytes
    shards = [Shard(state) for state in states]
    parts: tuple[Part, ...]
    if join.averaged:
        if first.dtype != "float32":
            raise RefusedError(f"it should be averaged over the tensor ranks, but is stored as {first.dtype}")
        copies = tuple(tuple(shard.cut(0, prod(join.shape) * item)) for shard in shards)
        parts = (Mean(copies, prod(join.shape)),)
    else:
        parts = tuple(parts_of_steps(join.steps, shards, item))
    what = f"{name} ({first.name})"
    return JoinedState(
        name=first.name,
        parameter=name,
        shape=join.shape,
        dtype=first.dtype,
        item_bytes=item,
        parts=parts,
        checks=tuple(
            OutputCheck(what, tuple(parts_of_steps(a, shards, item)), tuple(parts_of_steps(b, shards, item)))
            for a, b in join.equal
        ),
    )


def model_checks(ranks: list[Parameter]) -> tuple[OutputCheck, ...]:
    """Return the comparisons of a parameter's masters with the model's own copies, one a tensor rank."""
    return tuple(
        OutputCheck(
            rank.name,
            tuple(Range(p.source, p.offset, p.nbytes) for p in rank.states[0].pieces),
            tuple(Range(p.source, p.offset, p.nbytes) for p in rank.weight.pieces),
            (rank.states[0].dtype, rank.weight.dtype),
        )
        for rank in ranks
        if rank.weight is not None and rank.is_compared
    )


def parts_of_steps(steps: tuple[Step, ...], shards: list[Shard], item: int) -> Iterator[Part]:
    """Yield the parts of `steps` over `shards`, by rank; `item` bytes an element.

    Raises:
        RefusedError: the steps reach beyond a shard.
    """
    for step in steps:
        if isinstance(step, BlockCopy):
            yield from shards[step.rank].cut(step.at * item, step.count * item)
        elif max(step.count // step.rows, *(s.stride for s in step.strands)) * item >= WIDE_ROW_BYTES:
            yield from _wide(step, shards, item)
        else:
            yield _woven(step, shards, item)


def _wide(step: Weave, shards: list[Shard], item: int) -> Iterator[Range]:
    if any(s.stride < s.width for s in step.strands):
        raise RefusedError("its tensor-parallel layout repeats elements")
    for row in range(step.rows):
        for s in step.strands:
            yield from shards[s.rank].cut((s.at + row * s.stride) * item, s.width * item)


def _woven(step: Weave, shards: list[Shard], item: int) -> Woven:
    """Strands of one rank whose rows have one stride share a stream, so that it is read once."""
    rows_of: dict[tuple[int, int, int], list[Strand]] = {}
    for s in step.strands:
        if s.stride < s.width:
            raise RefusedError("its tensor-parallel layout repeats elements")
        inside = s.at % s.stride + s.width <= s.stride
        rows_of.setdefault((s.rank, s.stride, s.at // s.stride * s.stride if inside else s.at), []).append(s)
    streams: list[Stream] = []
    numbers: dict[Strand, tuple[int, int]] = {}
    for (rank, stride, base), strands in rows_of.items():
        for s in strands:
            numbers[s] = (len(streams), s.at - base)
        used = max(s.at - base + s.width for s in strands)
        length = (step.rows - 1) * stride + used
        streams.append(Stream(tuple(shards[rank].cut(base * item, length * item)), stride * item))
    placed = ((*numbers[s], s.width) for s in step.strands)
    strands_bytes = tuple((stream, start * item, width * item) for stream, start, width in placed)
    return Woven(step.rows, tuple(streams), strands_bytes)
