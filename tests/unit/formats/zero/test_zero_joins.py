"""Joins of tensor-parallel shards against torch.cat: any shapes, widths, ranks (docs/formats.md §6.1)."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.conversion.parts import Literal, Mean, Part, Range, Stream, Woven, decode, encode, ranges_of
from ckptd.conversion.reader import blocks_of, same_bytes
from ckptd.conversion.tp_join import Shard, join_states
from ckptd.errors import CkptdError, RefusedError, SourceChanged
from ckptd.formats.zero.blocks import Block, BlockCopy, Strand, Weave, dense, sequence
from ckptd.formats.zero.patterns import Patterns
from ckptd.formats.zero.shards import Parameter, Piece, StateRanges

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


class Files:
    """Shards scattered over source files in fragments that cut anywhere."""

    def __init__(self, folder: Path, draw: st.DataObject) -> None:
        self.folder, self.draw = folder, draw
        self.sources = [os.open(folder / f"s{i}", os.O_RDWR | os.O_CREAT) for i in range(3)]
        self.ends = [0, 0, 0]

    def shard(self, tensor: torch.Tensor) -> tuple[Piece, ...]:
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        item, pieces, at = tensor.element_size(), [], 0
        while at < len(data):
            count = item * self.draw.draw(st.integers(1, max(1, (len(data) - at) // item)))
            source = self.draw.draw(st.integers(0, 2))
            os.pwrite(self.sources[source], data[at : at + count], self.ends[source] + 3)
            pieces.append(Piece(source, self.ends[source] + 3, count))
            self.ends[source] += count + 3
            at += count
        return tuple(pieces)

    def join(self, info: dict[str, Any], shards: list[torch.Tensor]) -> torch.Tensor:
        ranks = [
            Parameter("w", tuple(s.shape), (StateRanges("fp32", "float32", 4, self.shard(s)),), {}, 0)
            for s in shards
        ]
        _, (state,) = join_states(ranks, Patterns(info))
        for check in state.checks:
            assert same_bytes(check.one, check.other, self.sources)
        data = b"".join(b for part in state.parts for b in blocks_of(decode(encode(part)), self.sources))
        assert len(data) == 4 * prod(state.shape)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(state.shape) if data else (
            torch.empty(state.shape)
        )  # fmt: skip

    def close(self) -> None:
        for fd in self.sources:
            os.close(fd)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("joins")


def joined(draw: st.DataObject, info: dict[str, Any], shards: list[torch.Tensor]) -> torch.Tensor:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), draw)
        try:
            return files.join(info, shards)
        finally:
            files.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=SHAPES, widths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_along_dimension_0_and_1(data: st.DataObject, shape: list[int], widths: list[int]) -> None:
    dim = data.draw(st.integers(0, min(1, len(shape) - 1)))
    shards = [torch.randn(*shape[:dim], w, *shape[dim + 1 :]) for w in widths]
    info = {"parameter_with_row_parallelism_patterns": ["w"]} if dim else {}
    assert torch.equal(joined(data, info, shards), torch.cat(shards, dim))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(1, 4))
def test_sub_parameters_of_recorded_widths(data: st.DataObject, shape: list[int], ranks: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    row = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)
    widths = data.draw(st.lists(row, min_size=1, max_size=3))
    subs = [torch.randn(*shape[:dim], sum(w), *shape[dim + 1 :]) for w in widths]
    cuts = [sub.split(w, dim) for sub, w in zip(subs, widths, strict=True)]
    shards = [torch.cat([c[rank] for c in cuts], dim) for rank in range(ranks)]
    spec: list[Any] = list(shape)
    spec[dim] = tuple(map(sum, widths))
    if data.draw(st.booleans()) and dim and sum(spec[dim]):
        spec[0] = -1
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["w"], "shape": tuple(spec), "partition_dim": dim}],
        "sub_param_shard_widths": {"w": widths},
    }
    assert torch.equal(joined(data, info, shards), torch.cat(subs, dim))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), half=st.integers(1, 5), columns=st.integers(1, 5))
def test_two_sub_parameters(data: st.DataObject, ranks: int, half: int, columns: int) -> None:
    shards = [torch.randn(2 * half, columns) for _ in range(ranks)]
    halves = [s.chunk(2, 0) for s in shards]
    expected = torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    assert torch.equal(joined(data, {"parameter_with_2_sub_params_cat_dim_0": ["w"]}, shards), expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(2, 4))
def test_averages_round_as_torch_does(data: st.DataObject, shape: list[int], ranks: int) -> None:
    shards = [torch.randn(*shape) * 10.0 ** data.draw(st.integers(-40, 37)) for _ in range(ranks)]
    made = joined(data, {"parameter_to_average_patterns": ["w"]}, shards)
    expected = sum(shards) / len(shards)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(made.view(torch.int32), expected.view(torch.int32))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(2, 4))
def test_replicated_takes_one_and_compares_all(data: st.DataObject, shape: list[int], ranks: int) -> None:
    full = torch.randn(*shape)
    info = {"tp_replicated_parameter_patterns": ["w"]}
    assert torch.equal(joined(data, info, [full] * ranks), full)
    drifted = full.clone()
    drifted.view(-1)[data.draw(st.integers(0, full.numel() - 1))] += 1
    with pytest.raises(AssertionError):
        joined(data, info, [*[full] * (ranks - 1), drifted])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=st.integers(0, 12), by_row=st.booleans())
def test_padded_vocabulary_rows_are_left_out(data: st.DataObject, rows: int, by_row: bool) -> None:
    shards = [torch.randn(12, 3) for _ in range(2)] if by_row else [torch.randn(6, 3) for _ in range(2)]
    info: dict[str, Any] = {"vocabulary_parameter_patterns": ["w"], "original_vocab_size": rows}
    info["parameter_with_row_parallelism_patterns"] = ["w"] if by_row else []
    assert torch.equal(joined(data, info, shards), torch.cat(shards, int(by_row))[:rows])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=SHAPES, ranks=st.integers(1, 3))
def test_affine_maps_of_any_blocks(data: st.DataObject, shape: list[int], ranks: int) -> None:
    """Each slice along a dimension belongs to one rank or to all; DeepSpeed's own map is the reference."""
    from deepspeed.checkpoint.affine import block_gather_map, segmented_map

    dim = data.draw(st.integers(0, len(shape) - 1))
    if data.draw(st.booleans()):
        owners = [data.draw(st.integers(0, ranks - 1)) for _ in range(shape[dim])]
        ids = {r: [i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)}
        layout = block_gather_map(tuple(shape), ids, 1, dim)
    else:
        split = data.draw(st.integers(0, shape[dim]))
        widths = [split // ranks + (r < split % ranks) for r in range(ranks)]
        segments = [(split, False), (shape[dim] - split, True)]
        layout = segmented_map(tuple(shape), segments, dim, ranks, [widths])
    full = torch.randn(*shape)
    info = {"affine_map": {"version": 1, "params": {"w": layout.to_dict()}}}
    shards = [layout.extract(full, rank) for rank in range(ranks)]
    assert torch.equal(joined(data, info, shards), full)


def test_rows_too_wide_to_weave_become_ranges(folder: Path) -> None:
    """Nothing of the size of a row is ever held (P12), and ranges can be cloned."""
    pieces = (Piece(0, 64, 1 << 20),)
    ranks = [
        Parameter("w", (2, 1 << 17), (StateRanges("fp32", "float32", 4, pieces),), {}, 0) for _ in range(2)
    ]
    _, (state,) = join_states(ranks, Patterns({"parameter_with_row_parallelism_patterns": ["w"]}))
    assert [type(p) for p in state.parts] == [Range] * 4
    assert [p.offset for p in state.parts if isinstance(p, Range)] == [64, 64, 64 + (1 << 19), 64 + (1 << 19)]


def test_streams_of_one_rank_are_read_once() -> None:
    """Sub-parameters along columns: three strands per rank, one stream per rank."""
    shape = (4, 6)
    pieces = (Piece(0, 0, 96),)
    ranks = [Parameter("w", shape, (StateRanges("fp32", "float32", 4, pieces),), {}, 0) for _ in range(2)]
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["w"], "shape": (4, (4, 4, 4)), "partition_dim": 1}],
        "sub_param_shard_widths": {"w": [[2, 2]] * 3},
    }
    _, (state,) = join_states(ranks, Patterns(info))
    (part,) = state.parts
    assert isinstance(part, Woven)
    assert len(part.streams) == 2
    assert len(part.strands) == 6


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([Block(0, (3,), 0, (1,), 0, (1,))], "covers 3 of 6"),
        ([Block(0, (3,), 0, (1,), 0, (1,)), Block(1, (3,), 2, (1,), 0, (1,))], "overlaps at 2"),
        ([Block(0, (2,), 0, (1,), 0, (1,)), Block(1, (3,), 3, (1,), 0, (1,))], "has a gap at 2"),
        ([Block(0, (2, 2), 0, (3, 1), 0, (2, 1))], "gaps inside rows"),
        ([Block(0, (1 << 10,) * 3, 0, (7, 5, 3), 0, (1, 2, 3))], "too many pieces"),
    ],
)
def test_layouts_that_are_none_are_refused(blocks: list[Block], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        sequence(blocks, 6)


def test_a_layout_never_reads_beyond_a_shard() -> None:
    shard = Shard(StateRanges("fp32", "float32", 4, (Piece(0, 10, 8), Piece(1, 0, 8))))
    assert list(shard.cut(4, 8)) == [Range(0, 14, 4), Range(1, 0, 4)]
    assert list(shard.cut(16, 0)) == []
    for begin, length in ((0, 17), (-4, 4), (16, 1), (8, -1)):
        with pytest.raises(RefusedError, match="beyond a shard"):
            list(shard.cut(begin, length))


PARTS: list[Part] = [
    Literal(b"abc"),
    Range(1, 2, 3),
    Mean(((Range(0, 0, 8),), (Range(1, 0, 4), Range(2, 4, 4))), 2),
    Woven(3, (Stream((Range(0, 0, 12),), 4), Stream((Range(1, 5, 6),), 2)), ((0, 1, 2), (1, 0, 2))),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda p: type(p).__name__)
def test_parts_read_back_and_name_their_ranges(part: Part) -> None:
    assert decode(encode(part)) == part
    named = {Literal: 0, Range: 3, Mean: 16, Woven: 18}
    assert sum(r.nbytes for r in ranges_of(part)) == named[type(part)]


def test_an_unknown_kind_of_part_is_refused() -> None:
    with pytest.raises(CkptdError, match="kind 'z'"):
        decode(["z", 1])


@pytest.mark.parametrize("part", PARTS[1:], ids=lambda p: type(p).__name__)
def test_a_source_that_ends_early_is_noticed(folder: Path, part: Part) -> None:
    (folder / "short").write_bytes(b"")
    fd = os.open(folder / "short", os.O_RDONLY)
    try:
        with pytest.raises(SourceChanged):
            list(blocks_of(part, [fd, fd, fd]))
    finally:
        os.close(fd)


def test_wide_and_narrow_strands_scatter_alike(folder: Path) -> None:
    """Row by row above 64 bytes, column by column below; blocks of many rows either way."""
    for width in (4, 60, 64, 68, 4096):
        rows = 3 * (1 << 20) // (2 * width) + 5
        a, b = os.urandom(rows * width), os.urandom(rows * width)
        (folder / "a").write_bytes(a)
        (folder / "b").write_bytes(b)
        fds = [os.open(folder / name, os.O_RDONLY) for name in "ab"]
        streams = tuple(Stream((Range(i, 0, rows * width),), width) for i in range(2))
        part = Woven(rows, streams, ((0, 0, width), (1, 0, width)))
        made = b"".join(blocks_of(part, fds))
        x, y = (torch.frombuffer(bytearray(d), dtype=torch.uint8).reshape(rows, width) for d in (a, b))
        assert made == torch.cat([x, y], 1).numpy().tobytes()
        for fd in fds:
            os.close(fd)


def test_copies_and_rows_of_one_block_are_steps_of_reading() -> None:
    from ckptd.formats.zero.blocks import reading

    assert reading(Block(1, (6,), 0, (1,), 2, (1,))) == (BlockCopy(1, 2, 6),)
    rows = Block(1, (3, 2), 5, (9, 1), 4, (7, 1))
    assert reading(rows) == (Weave(3, (Strand(1, 4, 2, 7),)),)
    assert dense((2, 3, 4)) == (12, 4, 1)


def test_rows_far_apart_in_a_shard_become_ranges() -> None:
    """A hostile map's strides decide nothing about how much is read at once (P12)."""
    far = 1 << 17
    pieces: list[dict[str, Any]] = [
        {"shape": (2, 1), "source": (0, (1, 1)), "dest": (0, (far, 1))},
        {"shape": (2, far - 1), "source": (2, (far - 1, 1)), "dest": (1, (far, 1))},
    ]
    entry = {"logical_shape": (2 * far,), "ranks": {0: {"shard_shape": (2 * far,), "pieces": pieces}}}
    states = (StateRanges("fp32", "float32", 4, (Piece(0, 0, 8 * far),)),)
    info = {"affine_map": {"version": 1, "params": {"w": entry}}}
    _, (state,) = join_states([Parameter("w", (2 * far,), states, {}, 0)], Patterns(info))
    assert [(p.offset, p.nbytes) for p in state.parts if isinstance(p, Range)] == [
        (0, 4),
        (4 * far, 4),
        (4, 4 * far - 4),
        (4 * far + 4, 4 * far - 4),
    ]
