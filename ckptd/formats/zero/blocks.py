"""Join tensor-parallel shards into one parameter, as geometry: blocks in, a sequence of copies out.

Every rule of DeepSpeed (replicated, along a dimension, fused sub-parameters, affine maps; docs/formats.md
§2.5, §6.1) becomes blocks; a block lies in a rank's shard and in the full parameter by offset and strides.
`sequence` turns blocks into steps in output order: runs to copy, and rows to weave. Elements, no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from ckptd.errors import RefusedError

MAX_RUNS = 1 << 17
"""Runs that one parameter may fall into; beyond, a map is of no real layout."""


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of `shape`: at `at` (`strides`) in rank's shard, at `out` (`out_strides`) in the full one."""

    rank: int
    shape: tuple[int, ...]
    out: int
    out_strides: tuple[int, ...]
    at: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """`count` elements from element `at` of rank's shard."""

    rank: int
    at: int
    count: int


@dataclass(frozen=True, slots=True)
class Strand:
    """Describe a strided piece: row r is `width` elements from element `at + r * stride` of the rank's
    shard."""

    rank: int
    at: int
    width: int
    stride: int


@dataclass(frozen=True, slots=True)
class Weave:
    """`rows` rows, each of all strands one after another."""

    rows: int
    strands: tuple[Strand, ...]

    @property
    def count(self) -> int:
        """Elements in all."""
        return self.rows * sum(s.width for s in self.strands)


Step = BlockCopy | Weave


@dataclass(frozen=True, slots=True)
class _Run:
    """`rows` pieces of `width` elements: `out + r * out_stride` from `at + r * stride`."""

    out: int
    out_stride: int
    rows: int
    width: int
    rank: int
    at: int
    stride: int


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def along(shapes: list[tuple[int, ...]], dim: int) -> tuple[tuple[int, ...], list[Block]]:
    """Shards one after another along `dim`; returns the full shape and the blocks.

    Raises:
        RefusedError: they differ in another dimension, or have no such dimension.
    """
    first = shapes[0]
    if any(len(s) <= dim or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
        raise RefusedError(f"shapes {shapes} of the tensor ranks cannot be joined along dimension {dim}")
    widths = [s[dim] for s in shapes]
    full = (*first[:dim], sum(widths), *first[dim + 1 :])
    return full, fused(full, dim, [widths])


def fused(full: tuple[int, ...], dim: int, widths: list[list[int]]) -> list[Block]:
    """Sub-parameters one after another along `dim`; of number i, `widths[i][rank]` lie on each rank."""
    out_strides = dense(full)
    blocks: list[Block] = []
    out = 0
    begins = [0] * len(widths[0])
    totals = [sum(w[rank] for w in widths) for rank in range(len(begins))]
    for sub in widths:
        for rank, width in enumerate(sub):
            strides = dense((*full[:dim], totals[rank], *full[dim + 1 :]))
            shape = (*full[:dim], width, *full[dim + 1 :])
            at = begins[rank] * strides[dim]
            blocks.append(Block(rank, shape, out * out_strides[dim], out_strides, at, strides))
            begins[rank] += width
            out += width
    return blocks


def whole(shape: tuple[int, ...], rank: int) -> Block:
    """Return a rank's shard that is the full parameter."""
    return Block(rank, shape, 0, dense(shape), 0, dense(shape))


def sequence(blocks: Iterable[Block], numel: int) -> tuple[Step, ...]:
    """Return the blocks as steps in output order.

    Raises:
        RefusedError: they overlap, leave gaps, or interleave in a way that is no row pattern.
    """
    runs = list(islice((run for block in blocks for run in _runs(block)), MAX_RUNS + 1))
    if len(runs) > MAX_RUNS:
        raise RefusedError("its tensor-parallel layout falls into too many pieces")
    steps: list[Step] = []
    at = 0
    for begin, step, count in sorted(_placed(runs), key=lambda placed: placed[0]):
        if begin != at:
            raise RefusedError(
                f"its tensor-parallel layout {'overlaps' if begin < at else 'has a gap'} at {min(at, begin)}"
            )
        steps.append(step)
        at += count
    if at != numel:
        raise RefusedError(f"its tensor-parallel layout covers {at} of {numel} elements")
    return tuple(steps)


def reading(block: Block) -> tuple[Step, ...]:
    """Return a block's elements in their own order, for comparing copies."""
    steps: list[Step] = []
    for run in _runs(block):
        strand = Strand(run.rank, run.at, run.width, run.stride)
        steps.append(BlockCopy(run.rank, run.at, run.width) if run.rows == 1 else Weave(run.rows, (strand,)))
    return tuple(steps)


def first_rows(steps: tuple[Step, ...], rows: int, row: int) -> tuple[Step, ...]:
    """Return the first `rows` rows of `row` elements (the padded rows of a vocabulary lie at the end)."""
    left = rows * row
    kept: list[Step] = []
    for step in steps:
        if left <= 0:
            break
        kept.append(step if step.count <= left else _first(step, left))
        left -= step.count
    return tuple(kept)


def _first(step: Step, count: int) -> Step:
    if isinstance(step, BlockCopy):
        return BlockCopy(step.rank, step.at, count)
    width = step.count // step.rows
    if count % width:
        raise RefusedError("its padded rows are not whole rows of its tensor-parallel layout")
    return Weave(count // width, step.strands)


def _runs(block: Block) -> Iterator[_Run]:
    """Return the block as runs of rows: neighbouring dimensions merged, outer ones written out."""
    dims = [
        d for d in zip(block.shape, block.out_strides, block.strides, strict=True) if d[0] != 1
    ]  # fmt: skip
    if any(n == 0 for n, _, _ in dims):
        return
    merged: list[tuple[int, int, int]] = []
    for n, out, at in dims:
        if merged and merged[-1][1] == n * out and merged[-1][2] == n * at:
            n *= merged.pop()[0]  # noqa: PLW2901
        merged.append((n, out, at))
    width = merged.pop()[0] if merged and merged[-1][1:] == (1, 1) else 1
    rows, out_stride, stride = merged.pop() if merged else (1, width, width)
    if prod(n for n, _, _ in merged) > MAX_RUNS:
        raise RefusedError("its tensor-parallel layout falls into too many pieces")
    for index in product(*(range(n) for n, _, _ in merged)):
        out = block.out + sum(i * d[1] for i, d in zip(index, merged, strict=True))
        at = block.at + sum(i * d[2] for i, d in zip(index, merged, strict=True))
        yield _Run(out, out_stride, rows, width, block.rank, at, stride)


def _placed(runs: list[_Run]) -> Iterator[tuple[int, Step, int]]:
    """Return (first element, step, elements): single runs as copies, rows of equal pattern woven together."""
    patterns: dict[tuple[int, int], list[_Run]] = {}
    for run in runs:
        if run.rows == 1:
            yield run.out, BlockCopy(run.rank, run.at, run.width), run.width
        else:
            patterns.setdefault((run.out_stride, run.rows), []).append(run)
    for (out_stride, rows), members in patterns.items():
        members.sort(key=lambda run: run.out)
        row: list[_Run] = []
        for run in members:
            if row and run.out != row[-1].out + row[-1].width:
                raise RefusedError("its tensor-parallel layout leaves gaps inside rows")
            row.append(run)
            if run.out + run.width == row[0].out + out_stride:
                strands = tuple(Strand(r.rank, r.at, r.width, r.stride) for r in row)
                yield row[0].out, Weave(rows, strands), rows * out_stride
                row = []
        if row:
            raise RefusedError("its tensor-parallel layout leaves gaps inside rows")
