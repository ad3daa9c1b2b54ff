"""Which folder is a whole save by what its shards hold: elements, one layout, folders of swapped state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files
from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.completeness.grid import Context, Spread
from ckptd.core.completeness.judge import State, Verdict, judge
from ckptd.core.completeness.sealing import sealed_file
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import Role, Trainer, parse_shard_name
from ckptd.core.model.listing import FolderListing, ListedFile
from ckptd.core.model.shard_facts import REVISION, ShardFacts
from ckptd.formats.zero.facts import shard_facts
from ckptd.storage.local.scan import scan_folder

QUIET = Context(settle_seconds=1, quiet_seconds=100, is_in_flight=False, save_spread_seconds=60)
OPTIM = "{}zero_pp_rank_{}_mp_rank_00_optim_states.pt"
RANKED = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
ONE = "mp_rank_00_model_states.pt"
Shards = dict[str, ShardFacts]


def listed(
    shards: Shards, beside: dict[str, int], empty: tuple[str, ...], seconds: dict[str, int]
) -> FolderListing:
    sizes = dict.fromkeys(shards, 9) | beside
    rows = []
    for number, (path, size) in enumerate(sizes.items()):
        at = seconds.get(path, 10) * 10**9
        identity = FileIdentity(dev=1, ino=number, size_bytes=size, mtime_ns=at, ctime_ns=at)
        rows.append(ListedFile(path=path, identity=identity))
    return FolderListing(
        tag="global_step2",
        folder=FolderIdentity(dev=1, ino=99),
        files=tuple(rows),
        trainer=Trainer.DEEPSPEED,
        empty=empty,
    )


def facts_of(shards: Shards, beside: dict[str, int]) -> dict[str, FileFacts]:
    found = {
        path: FileFacts(path=path, bytes=size, archive=Archive.OTHER, fingerprint=path)
        for path, size in beside.items()
    }
    for path, said in shards.items():
        named = parse_shard_name(path)
        assert named is not None
        found[path] = FileFacts(
            path=path, bytes=9, archive=Archive.ZIP, fingerprint=path, role=named.role, facts=said
        )
    return found


def judged(
    shards: Shards,
    beside: dict[str, int] | None = None,
    *,
    empty: tuple[str, ...] = (),
    seconds: dict[str, int] | None = None,
    context: Context = QUIET,
) -> Verdict:
    listing = listed(shards, beside or {}, empty, seconds or {})
    return judge(listing, facts_of(shards, beside or {}), None, context)


def stage_3(held: tuple[int, ...] = (0,), *, is_node_local: bool = False) -> Shards:
    """Two ranks, each owing 100 elements; their optimizer states are swapped to NVMe."""
    optim = ShardFacts(
        zero_stage=3,
        partition_count=(2,),
        optimizer_step=2,
        held=held,
        emptied=("exp_avg",) if 0 in held else (),
        is_offloaded=True,
        is_node_local=is_node_local,
    )
    model = ShardFacts(zero_stage=3, dp_world_size=2, mp_world_size=1, global_steps=2, owed=(100,))
    return {OPTIM.format("", d): optim for d in (0, 1)} | {RANKED.format(d): model for d in (0, 1)}


def swapped(*ranks: int) -> dict[str, int]:
    names = ("0_28.tensor.swp", "exp_avg-0_28.tensor.swp")
    return {f"offloaded_tensors/rank{d:02d}/{name}": 400 for d in ranks for name in names}


def test_swapped_tensors_complete_a_save() -> None:
    assert judged(stage_3(), swapped(0, 1)).state is State.COMPLETE


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({}, "offloaded_tensors/rank00 is not there"),
        (swapped(0), "offloaded_tensors/rank01 is not there"),
        (
            swapped(0, 1) | {"offloaded_tensors/rank01/exp_avg-0_28.tensor.swp": 399},
            "offloaded_tensors/rank01/exp_avg-0_28.tensor.swp has 399 bytes, 400 are needed",
        ),
        (
            {p: n for p, n in swapped(0, 1).items() if p != "offloaded_tensors/rank00/0_28.tensor.swp"},
            "offloaded_tensors/rank00 lacks the fp32 *.tensor.swp (0 of 1 are there)",
        ),
    ],
)
def test_without_them_it_is_not_and_the_rank_is_named(beside: dict[str, int], words: str) -> None:
    verdict = judged(stage_3(), beside)
    assert verdict.state is State.INCOMPLETE
    assert verdict.reason is not None
    assert verdict.reason.endswith(words)
    assert "holds 0 of 100 elements of group 0" in verdict.reason
    in_flight = replace(QUIET, is_in_flight=True)
    assert judged(stage_3(), beside, context=in_flight).state is State.SAVING


def test_ranks_with_nothing_to_swap_leave_empty_folders() -> None:
    ranks = ("offloaded_tensors/rank00", "offloaded_tensors/rank01")
    assert judged(stage_3((100,)), empty=ranks).state is State.COMPLETE
    verdict = judged(stage_3((100,)), empty=ranks[:1])
    assert verdict.state is State.INCOMPLETE
    assert verdict.reason is not None
    assert verdict.reason.endswith("offloaded_tensors/rank01 is not there")


def test_elements_in_the_shard_as_well_need_their_files_all_the_same() -> None:
    """Pipelined swapping leaves them in its buffers; a load reads the files alone."""
    names = ("0_28", "exp_avg-0_28")
    shards = {
        path: replace(facts, swapped=tuple((name, 100) for name in names)) if facts.partition_count else facts
        for path, facts in stage_3((100,)).items()
    }
    assert judged(shards, swapped(0, 1)).state is State.COMPLETE
    for name in names:
        path = f"offloaded_tensors/rank01/{name}.tensor.swp"
        gone = judged(shards, {p: n for p, n in swapped(0, 1).items() if p != path})
        assert (gone.state, str(gone.reason)[-len(name) - 17 :]) == (
            State.INCOMPLETE,
            f"lacks {name}.tensor.swp",
        )
        cut = judged(shards, swapped(0, 1) | {path: 399})
        assert (cut.state, f"{path} has 399 bytes" in str(cut.reason)) == (State.INCOMPLETE, True)


def test_node_local_ranks_are_counted_on_each_node() -> None:
    """A node with ranks 2 and 3 of four: DeepSpeed names their folders by local rank."""
    shards = {
        path.replace("pp_rank_0", "pp_rank_2").replace("pp_rank_1", "pp_rank_3"): replace(
            facts, **{"partition_count": (4,)} if facts.partition_count else {"dp_world_size": 4}
        )
        for path, facts in stage_3(is_node_local=True).items()
    }
    there = replace(QUIET, spread=Spread())
    verdict = judged(shards, swapped(0, 1), context=there)
    assert verdict.state is State.COMPLETE
    assert verdict.missing
    assert judged(shards, swapped(0), context=there).state is State.INCOMPLETE


def test_a_shard_of_stage_2_with_fewer_elements_than_its_mappings_need() -> None:
    shards = layout(2, "bf16")
    first = OPTIM.format("bf16_", 0)
    shards[first] = replace(shards[first], held=(10, 5), owed=(10, 6))
    verdict = judged(shards)
    assert verdict.state is State.INCOMPLETE
    assert verdict.reason is not None
    assert "holds 5 of 6 elements of group 1" in verdict.reason


def layout(stage: int, dtype: str) -> Shards:
    """A save of two ranks."""
    optim = ShardFacts(zero_stage=stage, partition_count=(2,), optimizer_step=2, dtype=dtype)
    model = ShardFacts(
        zero_stage=stage, dp_world_size=2, mp_world_size=1, global_steps=2, dtype=dtype, ds_version="1"
    )
    prefix = "bf16_" if dtype == "bf16" else ""
    models = {RANKED.format(d): model for d in (0, 1)} if stage == 3 else {ONE: model}
    return {OPTIM.format(prefix, d): optim for d in (0, 1)} | models


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "bf16"), (3, "bf16")),
        ((3, "bf16"), (2, "bf16")),
        ((2, "bf16"), (2, "fp32")),
        ((3, "fp32"), (3, "bf16")),
        ((2, "bf16"), (3, "fp32")),
        ((3, "fp32"), (1, "bf16")),
    ],
)
def test_files_of_another_layout_are_no_part_of_the_save(
    before: tuple[int, str], after: tuple[int, str]
) -> None:
    """A run is repeated into its folder with another stage or precision: it writes beside what was there."""
    old, new = layout(*before), layout(*after)
    left = sorted(old.keys() - new.keys())
    seconds = dict.fromkeys(new, 20)
    verdict = judged(old | new, seconds=seconds)
    assert (verdict.state, verdict.reason) == (State.COMPLETE, None)
    assert verdict.grid is not None
    assert verdict.grid.zero_stage == after[0]
    assert verdict.stale == tuple(left)
    assert all(any(path in note for note in verdict.notes) for path in left)

    rank1 = OPTIM.format("bf16_" if after[1] == "bf16" else "", 1)
    cut = {path: facts for path, facts in (old | new).items() if path != rank1}
    verdict = judged(cut, seconds=seconds)
    assert verdict.state is State.INCOMPLETE
    assert verdict.reason is not None
    assert "optimizer shard of rank 1" in verdict.reason


def test_a_save_of_another_layout_that_was_cut_off_is_none() -> None:
    """Rank 0's optimizer shard is of stage 3, rank 1's still of stage 2."""
    shards = layout(2, "bf16") | layout(3, "bf16")
    last = OPTIM.format("bf16_", 1)
    shards[last] = layout(2, "bf16")[last]
    assert judged(shards, seconds={OPTIM.format("bf16_", 0): 20}).state is not State.COMPLETE


def test_a_stale_shard_stands_for_no_rank_when_it_is_sealed() -> None:
    """Else it would fill another node's place in the grid."""
    shards = layout(2, "bf16") | layout(2, "fp32")
    listing, facts = listed(shards, {}, (), {}), facts_of(shards, {})
    verdict = judge(listing, facts, None, QUIET)
    sealed = {f.path: sealed_file(f, facts[f.path], listing, verdict.stale) for f in listing.files}
    stale = sealed[OPTIM.format("bf16_", 1)]
    assert (stale.role, stale.shard.d) == (Role.SIDE, None)
    assert sealed[OPTIM.format("", 1)].role is Role.OPTIM


def test_a_stage_that_is_not_told_stays_unknown() -> None:
    """Native MoE before DeepSpeed 0.19.4: no ds_config, no param_shapes."""
    assert shard_facts({"module": {}, "dp_world_size": 2}, -1).zero_stage is None
    config = {"bf16": {"enabled": True}}
    assert shard_facts({"module": {}, "param_shapes": None, "ds_config": config}, -1).zero_stage == 0


@pytest.mark.parametrize(
    "model",
    [
        {"param_shapes": [{"w": (2, 3)}], "optimizer": None},
        {"param_shapes": None, "optimizer": {"single_partition_of_fp32_groups": []}},
    ],
    ids=["bf16 up to 0.17", "a pipeline in bf16"],
)
def test_stage_0_whose_optimizer_is_sharded_is_saved_as_stage_1(model: dict[str, Any]) -> None:
    """BF16_Optimizer without ZeRO: its shards have no `zero_stage`, which means 1."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    shard = {"optimizer_state_dict": {"partition_count": [2]}, "ds_config": config}
    found = shard_facts({"module": {}, "ds_config": config, **model}, -1)
    assert found.zero_stage == shard_facts(shard, -1).zero_stage == 1
    whole: dict[str, Any] = {
        "module": {},
        "ds_config": config,
        "param_shapes": None,
        "optimizer": {"state": {}},
    }
    assert shard_facts(whole, -1).zero_stage == 0


def test_facts_of_an_older_inspection_are_known_by_their_revision() -> None:
    assert shard_facts({}, -1).revision == REVISION
    assert ShardFacts().revision < REVISION


def test_a_look_lists_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "tag" / "offloaded_tensors" / "rank00").mkdir(parents=True)
    (tmp_path / "tag" / "a").write_bytes(b"a")
    with files.opened_dir(tmp_path) as fd:
        first = scan_folder(fd, "tag")
        assert first is not None
        assert (first.empty, first.irregular) == (("offloaded_tensors/rank00",), ())
        assert scan_folder(fd, "tag", first) is first
        (tmp_path / "tag" / "offloaded_tensors" / "rank01").mkdir()
        second = scan_folder(fd, "tag", first)
    assert second is not None
    assert second.digest != first.digest
    assert [f.path for f in second.files] == ["a"]
