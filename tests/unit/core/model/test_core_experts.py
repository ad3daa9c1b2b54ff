"""Mixtures of experts as the daemon judges them: from facts, each group with its own partition count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, Verdict, judge
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import Trainer, parse_shard_name
from ckptd.core.model.listing import FolderListing, ListedFile
from ckptd.core.model.shard_facts import ShardFacts

QUIET = Context(settle_seconds=1, quiet_seconds=100, is_in_flight=False, save_spread_seconds=60)


def model(**changes: Any) -> ShardFacts:
    said = {"zero_stage": 2, "dp_world_size": 4, "mp_world_size": 1, "global_steps": 2, "num_experts": (4,)}
    return ShardFacts(**{**said, **changes})


def save(
    counts: tuple[int, ...] = (4, 2), *, stage: int = 2, experts: int = 4, mms: int = 1, **changes: Any
) -> dict[str, ShardFacts]:
    """Shards of four ranks, times `mms` tensor ranks, and the files of the experts."""
    optim = ShardFacts(zero_stage=stage, partition_count=counts, optimizer_step=2)
    ranks = [f"mp_rank_{mm:02d}" for mm in range(mms)]
    each = [f"zero_pp_rank_{d}_{rank}" for rank in ranks for d in range(4)]
    shards = {f"bf16_{name}_optim_states.pt": optim for name in each}
    names = ranks if stage < 3 else each
    if mms > 1:
        changes = {"mp_world_size": mms, "tp": mms, "pp": 1} | changes
    shards |= {f"{name}_model_states.pt": model(zero_stage=stage, **changes) for name in names}
    return shards | {f"layer_0_expert_{e}_mp_rank_00_model_states.pt": ShardFacts() for e in range(experts)}


def judged(shards: dict[str, ShardFacts]) -> Verdict:
    facts: dict[str, FileFacts] = {}
    files: list[ListedFile] = []
    for i, (path, said) in enumerate(shards.items()):
        shard = parse_shard_name(path)
        assert shard is not None
        facts[path] = FileFacts(
            path=path, bytes=9, archive=Archive.ZIP, fingerprint=f"{i:064x}", role=shard.role, facts=said
        )
        identity = FileIdentity(dev=1, ino=i, size_bytes=9, mtime_ns=10**9, ctime_ns=10**9)
        files.append(ListedFile(path=path, identity=identity))
    folder = FolderIdentity(dev=1, ino=99)
    listing = FolderListing(
        tag="global_step2", folder=folder, files=tuple(files), trainer=Trainer.DEEPSPEED, roots=("",)
    )
    return judge(listing, facts, None, QUIET)


@pytest.mark.parametrize("expert", range(4))
def test_the_optimizer_file_of_a_rank_stands_for_no_expert(expert: int) -> None:
    """DeepSpeed 0.12 to 0.19.2 writes `expp_rank_0` beside `layer_0_expert_0`, which has the weights."""
    shards = save() | {f"expp_rank_{e}_mp_rank_00_optim_states.pt": ShardFacts() for e in range(2)}
    assert judged(shards).state is State.COMPLETE
    del shards[f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"]
    assert judged(shards).state is State.INCOMPLETE


def test_groups_of_different_partition_counts_are_one_save() -> None:
    verdict = judged(save())
    assert (verdict.state, verdict.reason) == (State.COMPLETE, None)
    assert verdict.grid is not None
    assert (verdict.grid.dp, verdict.grid.ep, verdict.grid.experts) == (4, 2, (4,))
    assert verdict.notes == (
        "experts are shared by 2 ranks: the universal form resumes with ep_size 2 alone",
    )


def test_a_missing_expert_is_named() -> None:
    verdict = judged(save(experts=3))
    assert verdict.state is State.INCOMPLETE
    assert verdict.reason == "missing: expert 3 of MoE layer 0"


def test_experts_that_every_rank_holds_need_no_note() -> None:
    verdict = judged(save(counts=(4, 4)))
    assert (verdict.state, verdict.notes) == (State.COMPLETE, ())


def test_experts_alone_are_trained() -> None:
    assert judged(save(counts=(2,))).state is State.COMPLETE


@pytest.mark.parametrize("counts", [(8, 4), (2, 1)])
def test_a_shard_of_another_world_is_still_noticed(counts: tuple[int, ...]) -> None:
    shards = save()
    stranger = "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    shards[stranger] = ShardFacts(zero_stage=2, partition_count=counts, optimizer_step=2)
    verdict = judged(shards)
    assert verdict.state is State.TORN_RESAVE
    assert verdict.reason is not None
    assert stranger in verdict.reason


def test_autoep_of_stage_3_has_no_expert_files() -> None:
    """Its experts lie in the optimizer shards; nothing is missing, and any ep_size resumes."""
    verdict = judged(save(counts=(4,), stage=3, experts=0, autoep=True))
    assert (verdict.state, verdict.reason, verdict.notes) == (State.COMPLETE, None, ())


def test_autoep_needs_no_note() -> None:
    assert judged(save(autoep=True)).notes == ()


def test_every_shard_of_every_tensor_rank_is_wanted_at_stage_3() -> None:
    shards = save((4,), stage=3, experts=0, mms=2, num_experts=())
    assert judged(shards).state is State.COMPLETE
    assert len(shards) == 16
    for name in shards:
        verdict = judged({other: facts for other, facts in shards.items() if other != name})
        assert verdict.state is State.INCOMPLETE, name
        # model states of the lowest rank prove the grid: without them nobody knows what is missing
        assert name.removeprefix("bf16_").partition("_model")[0] in str(verdict.reason)


@pytest.mark.parametrize("are_split", [True, False])
def test_experts_beside_tensor_parallelism_are_all_wanted(are_split: bool) -> None:
    """Cut over the tensor ranks every rank has a part of each; otherwise one of them has the whole."""
    shards = save((4, 2) if are_split else (4, 4), mms=2, experts=0)
    for name in [name for name in shards if "optim" in name]:
        shards[name] = replace(shards[name], ep=2)
    pairs = [(e, mm) for e in range(4) for mm in (0, 1) if are_split or mm == e // 2]
    files = {f"layer_0_expert_{e}_mp_rank_{mm:02d}_model_states.pt": ShardFacts() for e, mm in pairs}
    shards |= files
    verdict = judged(shards)
    assert (verdict.state, verdict.grid and verdict.grid.experts_split) == (State.COMPLETE, are_split)
    for name in files:
        assert judged({n: f for n, f in shards.items() if n != name}).state is State.INCOMPLETE, name
    if are_split:  # nothing of the second rank's has come yet
        held = {n: f for n, f in shards.items() if "expert" not in n or "mp_rank_00" in n}
        assert "1 of 2 tensor ranks" in str(judged(held).reason)


def test_experts_of_every_pipeline_stage_are_wanted() -> None:
    shards = save((4, 2), mms=2, experts=0, tp=1, pp=2)
    for name in [name for name in shards if "_mp_rank_01_model" in name or name.startswith("mp_rank_01")]:
        shards[name] = model(num_experts=(4, 4), mp_world_size=2, tp=1, pp=2)
    layers = [(0, 0), (0, 1), (1, 1)]
    files = [f"layer_{n}_expert_{e}_mp_rank_{mm:02d}_model_states.pt" for n, mm in layers for e in range(4)]
    shards |= dict.fromkeys(files, ShardFacts())
    assert judged(shards).state is State.COMPLETE
    for name in files:
        assert judged({n: f for n, f in shards.items() if n != name}).state is State.INCOMPLETE, name


def test_layer_files_of_every_tensor_rank_are_wanted() -> None:
    shards = save((4,), mms=4, experts=0, num_experts=(), tp=2, pp=2, layers=(0, 1))
    files = [f"layer_{n:02d}-model_{t:02d}-model_states.pt" for n in (0, 1) for t in (0, 1)]
    shards |= dict.fromkeys(files, ShardFacts())
    assert judged(shards).state is State.COMPLETE
    for name in files:
        assert judged({n: f for n, f in shards.items() if n != name}).state is State.INCOMPLETE, name
