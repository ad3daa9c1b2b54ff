"""Real mixtures of experts: stacked as torch does it, resumed with the same losses as the ZeRO form."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import RefusedError
from tests.e2e.harness import node
from tests.e2e.test_inspect_real import inspect
from tests.support import experts, stacked, stock
from tests.support.real import TAG, Recipe, Resume, copy_of, expect, losses_of, prepare, resumed, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

STAGE_2 = Recipe(stage=2, world_size=4, moe=4, ep=2)
STAGE_1 = replace(STAGE_2, stage=1)
BF16 = replace(STAGE_1, grad_accum_dtype="fp32")
NATIVE = {"stage 2": STAGE_2, "stage 1": STAGE_1, "BF16_Optimizer": BF16}
expect(*NATIVE.values())
IN_BLOCKS = experts.Experts(recipe=STAGE_2, in_blocks=True)
AUTOEP = experts.Experts(
    recipe=Recipe(stage=2, world_size=4, llama=True, optimizer="fused_adam", universal_info=False), auto=2
)
AUTOEP_3 = replace(AUTOEP, recipe=replace(AUTOEP.recipe, stage=3))
EXPERT = "blocks.1.mlp.deepspeed_moe.experts.deepspeed_experts.0.0.weight"
FULL = bool(os.environ.get("CKPTD_FULL"))
ROUTED = 5e-3
"""Which tokens an expert drops is drawn at random, and depends on the tokens per rank: no load is exact."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save_dir with the universal form of every native recipe, named after it."""
    prepare(list(NATIVE.values()))
    folder = tmp_path_factory.mktemp("experts")
    for name, recipe in NATIVE.items():
        report = convert(save_dir_of(recipe) / TAG, folder / name, ConvertOptions(verify=True))
        assert ["ep_size 2" in note for note in report.notes] == [True]
    return folder


def test_ranks_are_stacked_as_torch_stacks_them(converted: Path) -> None:
    items = [(save_dir_of(r) / TAG, converted / name, 2, False) for name, r in NATIVE.items()]
    assert stacked.differences(items) == [[], [], []]


def test_four_ranks_resume_with_the_losses_of_the_zero_form(converted: Path, tmp_path: Path) -> None:
    """To the last digit, whichever stage saved it; in another stage up to the draw of dropped tokens."""
    pairs = list(NATIVE.items())
    crossed = [("stage 2", STAGE_1), ("stage 1", STAGE_2), ("BF16_Optimizer", STAGE_2)]
    plain = [Resume(recipe=r, save_dir=save_dir_of(r), tag=TAG, load="zero") for _, r in pairs]
    loads = [Resume(recipe=r, save_dir=converted, tag=name) for name, r in [*pairs, *crossed]]
    runs = resumed(4, [*plain, *loads], tmp_path)
    for (name, _), expected, run in zip(pairs, runs[:3], runs[3:6], strict=True):
        assert set(run.losses) == {3, 4, 5, 6}
        assert run.losses == expected.losses, name
        assert run.optimizer == expected.optimizer, name
    for (name, recipe), run in zip(crossed, runs[6:], strict=True):
        assert run.losses[3] == runs[0].losses[3], f"{name} in stage {recipe.stage}"
        assert run.losses == pytest.approx(runs[0].losses, abs=ROUTED)


def test_two_ranks_resume_what_four_saved(converted: Path, tmp_path: Path) -> None:
    pairs = list(NATIVE.items()) if FULL else [("stage 2", STAGE_1)]
    runs = resumed(2, [Resume(recipe=r, save_dir=converted, tag=name) for name, r in pairs], tmp_path)
    for (name, recipe), run in zip(pairs, runs, strict=True):
        assert run.optimizer["steps"] == [2.0]
        wanted = {step: loss for step, loss in losses_of(recipe).items() if step > 2}
        assert run.losses == pytest.approx(wanted, abs=ROUTED), name


if FULL:  # two starts of torchrun

    @pytest.mark.parametrize(("world_size", "ep"), [(2, 1), (4, 4)])
    def test_another_ep_size_fails_loudly(converted: Path, tmp_path: Path, world_size: int, ep: int) -> None:
        """What the notes warn of is no silent mix of experts: the loader finds other shapes or no file."""
        resumes = [Resume(recipe=replace(STAGE_2, ep=ep), save_dir=converted, tag="stage 2")]
        with pytest.raises(RuntimeError, match=r"numel|No such file"):
            resumed(world_size, resumes, tmp_path)


def test_neighbouring_ranks_with_the_same_experts(tmp_path: Path) -> None:
    """use_data_before_expert_parallelism: another order of ranks, found in ds_config."""
    source = experts.prepare(IN_BLOCKS)
    convert(source / TAG, tmp_path / "u")
    assert stacked.differences([(source / TAG, tmp_path / "u", 2, True)]) == [[]]
    loads = [(IN_BLOCKS, source, TAG, "zero"), (IN_BLOCKS, tmp_path, "u", "universal")]
    if FULL:
        zero, universal = experts.resume(4, loads, tmp_path)
        assert zero == universal


@pytest.fixture(scope="module")
def autoep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("autoep")
    report = convert(experts.prepare(AUTOEP) / TAG, folder / "u", ConvertOptions(verify=True))
    assert report.notes == ()
    return folder


def test_autoep_equals_the_stock_converter(autoep: Path, tmp_path: Path) -> None:
    """All tensors; stock writes the model states anew with shorter metadata, which no loader reads."""
    source = experts.prepare(AUTOEP) / TAG
    convert(source, tmp_path / "ours", ConvertOptions(compat="strict"))
    stock.convert([(source, tmp_path / "stock")])
    (found,) = stock.differences([(tmp_path / "stock", tmp_path / "ours")])
    about = (
        "mp_rank_00_model_states.pt/universal_checkpoint_info/",
        "zero/optimizer_state.pt/partition_count",
    )
    assert [words for words in found if not words.startswith(about)] == []
    assert stacked.differences([(source, autoep / "u", 2, False)]) == [[]]


def test_autoep_of_stage_3_equals_the_stock_converter(tmp_path: Path) -> None:
    """Every file; and what the model states say of a rank must be what its optimizer shard says."""
    source = experts.prepare(AUTOEP_3) / TAG
    convert(source, tmp_path / "ours", ConvertOptions(compat="strict", verify=True))
    stock.convert([(source, tmp_path / "stock")])
    assert stock.differences([(tmp_path / "stock", tmp_path / "ours")]) == [[]]
    odd = copy_of(source, tmp_path / "odd")
    (odd / "zero_pp_rank_2_mp_rank_00_model_states.pt").write_bytes(
        (source / "zero_pp_rank_1_mp_rank_00_model_states.pt").read_bytes()
    )
    with pytest.raises(RefusedError, match="rank 2 do not say that it is expert-parallel rank 0"):
        convert(odd, tmp_path / "u")


if FULL:  # four starts of torchrun

    def test_autoep_resumes_with_any_expert_parallel_size(autoep: Path, tmp_path: Path) -> None:
        losses = json.loads((AUTOEP.place / "losses.json").read_text())
        wanted = {int(step): loss for step, loss in losses.items() if int(step) > 2}
        for world_size, ep in [(4, 4), (2, 2), (2, 1)]:
            (run,) = experts.resume(
                world_size, [(replace(AUTOEP, auto=ep), autoep, "u", "universal")], tmp_path
            )
            assert run == pytest.approx(wanted, abs=1e-3), f"{world_size} ranks, autoep_size {ep}"
        runs = [(AUTOEP, experts.prepare(AUTOEP), TAG, "zero"), (AUTOEP, autoep, "u", "universal")]
        zero, universal = experts.resume(4, runs, tmp_path)
        assert zero == universal


def test_inspect_tells_of_experts_and_names_a_missing_one(tmp_path: Path) -> None:
    prepare([STAGE_2])
    save = copy_of(save_dir_of(STAGE_2), tmp_path / "save")
    code, seen = inspect(save / TAG)
    (found,) = seen["checkpoints"]
    assert (code, found["state"], found["grid"]["dp"], found["grid"]["experts"]) == (0, "complete", 4, [4])
    assert found["grid"]["ep"] == 2
    assert any("ep_size 2" in note for note in found["notes"])
    (save / TAG / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    code, seen = inspect(save / TAG)
    assert code == 65
    assert "expert 3 of MoE layer 0" in seen["checkpoints"][0]["reason"]


def test_the_daemon_ships_and_converts_a_whole_mixture_alone(tmp_path: Path) -> None:
    """Groups of different partition counts are one save; a save that lacks an expert is not whole."""
    prepare([STAGE_2])
    with node(tmp_path) as here:
        here.start()
        here.save(2, STAGE_2)
        here.wait_committed(f"{TAG}~g1", 150)
        here.wait("its universal form", lambda: f"{TAG}~g1" in here.commits("universal"), 150)
        # only now: while a save is under way conversions wait
        copy_of(here.save_dir / TAG, here.save_dir / "global_step3")
        (here.save_dir / "global_step3" / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
        lacks = "expert 1 of MoE layer 0"
        here.wait("the reason", lambda: lacks in (here.checkpoint("global_step3")["reason"] or ""), 150)
        time.sleep(1.5)
        assert set(here.commits()) == {f"{TAG}~g1"}
