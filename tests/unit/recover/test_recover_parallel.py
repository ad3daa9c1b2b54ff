"""What a node fetches of a save with pipeline stages or tensor ranks: its own ranks' shards (adr/0104)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.generation import KnownManifest, build_commit
from ckptd.core.model.layouts import Grid, Role, ShardKey, parse_shard_name
from ckptd.core.model.manifest import Cell, Checksums, ManifestFile, NodeManifest, Topology, manifest_key
from ckptd.recover.select.copies import Copy, Nodes, files_for_node, is_held
from ckptd.recover.select.inventory import LocalCheckpoint
from ckptd.storage.remote.messages import CommitView
from tests.unit.core.model.test_core_resave import listed
from tests.unit.core.model.test_many_nodes import SHA, manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NAMES = ("gpu-8", "gpu-9", "gpu-10", "gpu-11")
"""In the order of their ranks; as text the last two come first."""
PIPELINE = Grid(dp=4, mm_count=2, tp=1, pp=2, zero_stage=1)
TENSOR = Grid(dp=2, mm_count=4, tp=4, pp=1, zero_stage=1)


def optim(d: int, mm: int) -> str:
    return f"bf16_zero_pp_rank_{d}_mp_rank_{mm:02d}_optim_states.pt"


def model(mm: int) -> str:
    return f"mp_rank_{mm:02d}_model_states.pt"


def row(name: str) -> ManifestFile:
    named = parse_shard_name(name)
    return ManifestFile(
        path=name,
        key=f"s/{name}",
        bytes=1,
        role=named.role if named else Role.SIDE,
        shard=named.shard if named else ShardKey(),
        checksums=Checksums(crc64nvme="0"),
        fingerprint=f"mark of {name}",
        proof="read-back",
    )


def part(node: str, grid: Grid, names: Iterable[str]) -> NodeManifest:
    return manifest(node, (), grid=grid, files=tuple(map(row, names)))


def saved(grid: Grid, held: Sequence[Iterable[str]], nodes: Sequence[str] = NAMES) -> Copy:
    """A committed save of which each node uploaded some files."""
    manifests = tuple(part(node, grid, names) for node, names in zip(nodes, held, strict=True))
    known = [KnownManifest(key=manifest_key(m, SHA), sha256=SHA, manifest=m) for m in manifests]
    commit = build_commit(known, committed_by="a", committed_at="then", config_digest="c")
    view = CommitView(key="k", sha256=SHA, commit=commit)
    return Copy(remote=cast("Any", None), view=view, manifests=manifests, files=())


def by_rank(grid: Grid, order: Sequence[tuple[int, int]], nodes: int = 4) -> list[list[str]]:
    """Files of each node whose ranks wrote these cells, model states by the first of a model rank."""
    each = len(order) // nodes
    found: list[list[str]] = []
    for n in range(nodes):
        mine = order[n * each : (n + 1) * each]
        found.append([optim(*cell) for cell in mine] + [model(mm) for d, mm in mine if d == 0])
    return found


STAGES = [(d, stage) for stage in (0, 1) for d in range(4)]
TENSORS = [(d, tensor) for d in range(2) for tensor in range(4)]


def wanted(copy: Copy, count: int, rank: int, world_size: int | None = None) -> set[str]:
    return {
        file.path for file in files_for_node(copy, Nodes(count=count, rank=rank, world_size=world_size)).files
    }


def optims(paths: set[str]) -> set[str]:
    return {path for path in paths if "optim" in path}


@pytest.mark.parametrize(
    ("grid", "order"), [(PIPELINE, STAGES), (TENSOR, TENSORS)], ids=["stages", "tensor ranks over nodes"]
)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_each_node_wants_its_ranks_shards(grid: Grid, order: list[tuple[int, int]], count: int) -> None:
    """Stages have the same data-parallel ranks, and names sort otherwise than ranks do."""
    copy = saved(grid, by_rank(grid, order))
    every = {path for names in by_rank(grid, order) for path in names}
    for rank, mine in enumerate(by_rank(grid, order, nodes=count)):
        for world_size in (None, 8):
            found = wanted(copy, count, rank, world_size)
            assert optims(found) == optims(set(mine))
            assert found - optims(found) == every - optims(every)
    assert wanted(copy, count, 0, world_size=4) == every


@pytest.mark.parametrize(
    ("grid", "order"),
    [
        (PIPELINE.model_copy(update={"tp": None, "pp": None}), STAGES),
        (PIPELINE.model_copy(update={"sp": 2}), STAGES),
        (TENSOR.model_copy(update={"tp": 2}), TENSORS),
        (PIPELINE, [(d, stage) for d in range(4) for stage in (0, 1)]),
        (Grid(dp=4, mm_count=2, tp=2, pp=1, zero_stage=1), STAGES),
    ],
    ids=[
        "unknown degrees",
        "sequence parallel",
        "degrees that are none",
        "another order",
        "tensor outermost",
    ],
)
def test_where_ranks_do_not_tell_all_is_fetched(grid: Grid, order: list[tuple[int, int]]) -> None:
    copy = saved(grid, by_rank(grid, order))
    every = {path for names in by_rank(grid, order) for path in names}
    assert all(wanted(copy, 4, rank) == every for rank in range(4))
    assert wanted(copy, 3, 0) == every, "not as many on each"


def test_before_degrees_were_recorded_what_is_no_pipeline_has_tensor_ranks() -> None:
    grid = TENSOR.model_copy(update={"tp": None, "pp": None})
    held = by_rank(grid, TENSORS)
    assert optims(wanted(saved(grid, held), 4, 2)) == optims(set(held[2]))
    pipeline = saved(grid.model_copy(update={"layers": (0, 1)}), held)
    assert len(optims(wanted(pipeline, 4, 2))) == 8, "its layer files are not known"


def test_before_degrees_were_recorded_layer_files_tell_them() -> None:
    grid = Grid(dp=2, mm_count=4, zero_stage=1, layers=(0, 1))
    order = [(d, stage * 2 + t) for stage in (0, 1) for d in range(2) for t in (0, 1)]
    held = by_rank(grid, order)
    for node, stage in ((0, 0), (2, 1)):
        held[node] += [f"layer_{stage:02d}-model_{t:02d}-model_states.pt" for t in (0, 1)]
    copy = saved(grid, held)
    assert optims(wanted(copy, 4, 2)) == {optim(0, 2), optim(0, 3)}
    assert len(wanted(copy, 4, 2)) == 2 + 4 + 4


def test_a_node_that_was_replaced_uploaded_under_two_names() -> None:
    held = by_rank(PIPELINE, STAGES)
    held[2:3] = [[name] for name in held[2]]
    copy = saved(PIPELINE, held, nodes=("a", "b", "c", "c2", "c3", "d"))
    assert optims(wanted(copy, 4, 2)) == {optim(0, 1), optim(1, 1)}


def test_at_stage_3_model_states_of_all_tensor_ranks_lie_beside() -> None:
    """DeepSpeed counts `zero_pp_rank_D_mp_rank_*_model_states.pt` to know how many tensor ranks saved."""
    grid = Grid(dp=2, mm_count=2, tp=2, pp=1, zero_stage=3)
    order = [(d, t) for d in range(2) for t in range(2)]
    names = [[optim(d, t), f"zero_pp_rank_{d}_mp_rank_{t:02d}_model_states.pt"] for d, t in order]
    copy = saved(grid, names)
    models = {f"zero_pp_rank_1_mp_rank_{t:02d}_model_states.pt" for t in range(2)}
    assert wanted(copy, 4, 3) == {optim(1, 1), *models}


@pytest.mark.parametrize(
    "held",
    [[(0, 1, 2), (3,)], [(0, 2), (1, 3)], [(0, 1, 2), (3, 4)], [(3,), (0, 1), (2,)]],
    ids=["3 and 1", "in turn", "3 and 2", "2, 1 and 1"],
)
def test_where_nodes_do_not_tell_which_ranks_run_where_each_wants_all(held: list[tuple[int, ...]]) -> None:
    """3 and 1 saved, 2 and 2 resume: what those had that saved is another node's."""
    ranks = sum(map(len, held))
    names = [[optim(d, 0) for d in mine] for mine in held]
    names[0].append(model(0))
    copy = saved(Grid(dp=ranks, mm_count=1, zero_stage=1), names, nodes=NAMES[: len(held)])
    count = len(held)
    every = {path for files in names for path in files}
    for rank in range(count):
        share = files_for_node(copy, Nodes(count=count, rank=rank, world_size=ranks))
        assert {file.path for file in share.files} == every
        assert "wanted on each node" in str(share.all_for_each)
    assert files_for_node(copy, Nodes()).all_for_each is None


def test_nodes_that_held_as_many_ranks_each_tell_those_of_other_nodes() -> None:
    grid = Grid(dp=12, mm_count=1, zero_stage=1)
    held = [[optim(d, 0) for d in range(n * 4, n * 4 + 4)] for n in range(3)]
    copy = saved(grid, [held[2], held[0], held[1]], nodes=("a", "b", "c"))
    assert wanted(copy, 3, 1) == set(held[1])
    assert wanted(copy, 4, 3) == {optim(d, 0) for d in (9, 10, 11)}
    assert files_for_node(copy, Nodes(count=4, rank=3)).all_for_each is None
    assert len(wanted(copy, 5, 0)) == 12, "not as many on each"


def test_stages_on_nodes_with_unlike_numbers_of_ranks_are_all_fetched() -> None:
    grid = Grid(dp=2, mm_count=2, tp=1, pp=2, zero_stage=1)
    order = [optim(0, 0), optim(1, 0), optim(0, 1), optim(1, 1)]
    copy = saved(grid, [[*order[:3], model(0), model(1)], order[3:]], nodes=("a", "b"))
    assert all(wanted(copy, 2, rank) == {*order, model(0), model(1)} for rank in (0, 1))


# --- folders that are there -------------------------------------------------------------------------------


def folder(names: Iterable[str]) -> LocalCheckpoint:
    """A node's own part, which is not whole by itself."""
    names = list(names)
    facts = {
        name: FileFacts(path=name, bytes=1, archive=Archive.ZIP, fingerprint=f"mark of {name}")
        for name in names
    }
    return LocalCheckpoint(
        listing=listed(dict.fromkeys(names, 1)), verdict=Verdict(state=State.INCOMPLETE), facts=facts
    )


@pytest.mark.parametrize(
    ("grid", "order"), [(PIPELINE, STAGES), (TENSOR, TENSORS)], ids=["stages", "tensor ranks over nodes"]
)
def test_the_model_states_of_all_are_needed_and_no_other_nodes_shards(
    grid: Grid, order: list[tuple[int, int]]
) -> None:
    """DeepSpeed counts the `mp_rank_*` that are there before it takes its own (check_ckpt_list)."""
    held = by_rank(grid, order)
    models = [model(mm) for mm in range(grid.mm_count)]
    copy = saved(grid, held)
    for rank in range(4):
        share = files_for_node(copy, Nodes(count=4, rank=rank))
        assert not is_held(folder(held[rank]), share)
        assert is_held(folder({*held[rank], *models}), share)
        assert not is_held(folder({*held[(rank + 2) % 4], *models}), share), "another node's"


@pytest.mark.full
@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 4, 1), (1, 2, 4), (2, 3, 2), (3, 2, 2)])
def test_ranks_are_numbered_as_deepspeed_numbers_them(pp: int, dp: int, tp: int) -> None:
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology")
    theirs = topology.PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    ours = Topology(dp=dp, tp=tp, pp=pp)
    for rank in range(pp * dp * tp):
        d = theirs.get_coord(rank).data
        # PipelineParallelGrid.get_model_parallel_rank
        mm = sorted(theirs.get_axis_list(axis="data", idx=d)).index(rank)
        assert ours.cell_of(rank) == Cell(d, mm)
        assert ours.rank_of(Cell(d, mm)) == rank
