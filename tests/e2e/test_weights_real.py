"""Weights of real checkpoints: zero_to_fp32's bytes where it works, the masters where it refuses.

A second, independent witness is the trainer's own 16-bit copy: bf16 weights rounded from the masters must be
what the engine trained with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from tests.e2e.test_convert_real import (
    BF16,
    GROUPS_TIED_FROZEN,
    PIPELINE,
    ROUND_ROBIN,
    STAGE_1,
    STAGE_2,
    STAGE_3,
    SUB_GROUPS,
)
from tests.support import consolidated, ranks
from tests.support.hf import HfRun, tree_of
from tests.support.hf import prepare as prepare_hf
from tests.support.real import (
    CACHE,
    REPOSITORY,
    START_SECONDS,
    TAG,
    Recipe,
    expect,
    locked,
    prepare,
    run_module,
    save_dir_of,
)
from tests.support.weights import Read, as_read, read_folder

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

CONSOLIDATED = {
    "stage 1, fp32, 1 rank": STAGE_1,
    "stage 2, bf16": STAGE_2,
    "stage 3, bf16": STAGE_3,
    "round robin, odd sizes": ROUND_ROBIN,
    "two groups, tied, frozen, 4 ranks": GROUPS_TIED_FROZEN,
    "stage 3, sub-groups, frozen, odd, 4 ranks": SUB_GROUPS,
}
REFUSED_THERE = {
    "BF16_Optimizer": BF16,
    "two pipeline stages": PIPELINE,
    "two pipeline stages on two ranks each": Recipe(stage=1, world_size=4, pipe=2),
    "a tied pipeline": Recipe(stage=1, world_size=2, pipe=2, pipe_tied=True),
    "tensor parallel, stage 1": Recipe(stage=1, world_size=4, tp=2, universal_info=False),
    "tensor parallel, stage 3": Recipe(stage=3, world_size=4, tp=2, universal_info=False),
}
"""zero_to_fp32 fails on these or makes one rank's part of them."""
SCALE = {"scale": as_read(torch.ones(3, dtype=torch.bfloat16))}
"""The engine leaves this buffer in fp32; weights of one type have it as `model.to(torch.bfloat16)` would."""
TIED = Recipe(stage=2, world_size=2, tie=True)
EXPERTS = [Recipe(stage=2, world_size=2, moe=4, ep=ep) for ep in (1, 2)]
expect(*REFUSED_THERE.values(), TIED, *EXPERTS)
HF_RUNS = {2: HfRun(stage=2), 3: HfRun(stage=3)}
HF_TAG = "checkpoint-8"


@pytest.fixture(scope="module", autouse=True)
def checkpoints() -> None:
    prepare([*CONSOLIDATED.values(), *REFUSED_THERE.values()])
    prepare_hf(list(HF_RUNS.values()))


def export(source: Path, out: Path, dtype: str, **more: Any) -> dict[str, Read]:
    options = ConvertOptions(form="weights", dtype=dtype, verify=True, **more)  # type: ignore[arg-type]
    convert(source, out, options)
    return read_folder(out)


def tensor_of(read: Read) -> torch.Tensor:
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
    return torch.frombuffer(bytearray(read.data or b"\0" * 8), dtype=dtypes[read.dtype])[
        : torch.Size(read.shape).numel()
    ].reshape(read.shape)


def assert_cast(fp32: dict[str, Read], cast: dict[str, Read], dtype: torch.dtype) -> None:
    assert set(cast) == set(fp32)
    for name, read in fp32.items():
        tensor = tensor_of(read)
        assert cast[name] == as_read(tensor.to(dtype) if tensor.is_floating_point() else tensor), name


def test_fp32_equals_zero_to_fp32_and_the_others_are_its_casts(tmp_path: Path) -> None:
    cases = []
    for i, recipe in enumerate(CONSOLIDATED.values()):
        source = save_dir_of(recipe) / TAG
        fp32 = export(source, tmp_path / f"fp32-{i}", "fp32", max_shard_bytes=50_000)
        assert_cast(fp32, export(source, tmp_path / f"bf16-{i}", "bf16"), torch.bfloat16)
        assert_cast(fp32, export(source, tmp_path / f"fp16-{i}", "fp16"), torch.float16)
        cases.append((str(save_dir_of(recipe)), TAG, str(tmp_path / f"fp32-{i}")))
    found = consolidated.differences("fp32", cases)
    assert dict(zip(CONSOLIDATED, found, strict=True)) == {name: [] for name in CONSOLIDATED}


@pytest.mark.parametrize("name", REFUSED_THERE)
def test_what_zero_to_fp32_refuses_is_the_universal_forms_fp32(name: str, tmp_path: Path) -> None:
    """Whose bytes equal the stock converter's (tests/e2e/test_convert_real.py)."""
    source = save_dir_of(REFUSED_THERE[name]) / TAG
    convert(source, tmp_path / "u", ConvertOptions(compat="strict"))
    fp32 = export(source, tmp_path / "fp32", "fp32")
    assert_cast(fp32, export(source, tmp_path / "bf16", "bf16"), torch.bfloat16)
    trained = {p.parent.name for p in (tmp_path / "u" / "zero").glob("*/exp_avg.pt")}
    for parameter in trained:
        value = torch.load(tmp_path / "u" / "zero" / parameter / "fp32.pt", weights_only=False)
        universal = value["param"] if isinstance(value, dict) else value
        mine = tensor_of(fp32[parameter])
        assert torch.equal(mine.reshape(-1), universal.reshape(-1)), parameter
        assert REFUSED_THERE[name].stage == 3 or mine.shape == universal.shape
    buffers = {"scale": torch.ones(3), "positions": torch.arange(5)} if name == "BF16_Optimizer" else {}
    others = {n: r for n, r in fp32.items() if n not in trained}
    assert others == {n: as_read(t) for n, t in buffers.items()} or "tensor parallel" in name


@pytest.mark.parametrize("recipe", [STAGE_2, BF16, ROUND_ROBIN, TIED])
def test_bf16_is_what_the_engine_trained_with(recipe: Recipe, tmp_path: Path) -> None:
    prepare([recipe])
    source = save_dir_of(recipe) / TAG
    module = torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    mine = export(source, tmp_path / "w", "bf16")
    tied = {"head.lm.weight"} if recipe.tie else set()
    assert set(mine) == set(module) - tied
    assert {n: as_read(t) for n, t in module.items() if n in mine} | SCALE == mine


@pytest.mark.parametrize(
    "name", ["two pipeline stages", "two pipeline stages on two ranks each", "a tied pipeline"]
)
def test_bf16_of_a_pipeline_is_what_its_layer_files_hold(name: str, tmp_path: Path) -> None:
    source = save_dir_of(REFUSED_THERE[name]) / TAG
    mine = export(source, tmp_path / "w", "bf16")
    held: dict[str, Any] = {}
    for path in sorted(source.glob("layer_*")):
        number = int(path.name[6:8])
        for local, tensor in torch.load(path, weights_only=False).items():
            tied = f"tied_modules.embed.{local}"
            held[tied if tied in mine and f"{number}.{local}" not in mine else f"{number}.{local}"] = tensor
    assert {n: as_read(t) for n, t in held.items()} == mine


@pytest.mark.parametrize("recipe", EXPERTS)
def test_experts_have_their_global_numbers(recipe: Recipe, tmp_path: Path) -> None:
    """As the trainer's own files of experts name them; beside them the model's other tensors."""
    prepare(EXPERTS)
    source = save_dir_of(recipe) / TAG
    held = dict(torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)["module"])
    for path in source.glob("layer_*_expert_*_model_states.pt"):
        held |= torch.load(path, weights_only=False)
    mine = export(source, tmp_path / "w", "bf16")
    assert sum("deepspeed_experts" in name for name in mine) == 16
    assert {n: as_read(t.bfloat16() if t.is_floating_point() else t) for n, t in held.items()} == mine


@pytest.fixture(scope="module")
def excluded() -> Path:
    """Saves without their frozen parameters, made once."""
    folder = CACHE / "excluded-1"
    with locked():
        if not (folder / "done").exists():
            folder.mkdir(parents=True, exist_ok=True)
            ranks.train("tests.support.make_excluded", [str(folder)], folder, ranks=2, seconds=START_SECONDS)
            (folder / "done").touch()
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_excluded_frozen_parameters_are_not_there_and_said(
    excluded: Path, tmp_path: Path, stage: int
) -> None:
    options = ConvertOptions(form="weights")
    report = convert(excluded / f"z{stage}" / "step", tmp_path / "w", options)
    whole = convert(excluded / f"whole-z{stage}" / "step", tmp_path / "all", options)
    mine, everything = read_folder(tmp_path / "w"), read_folder(tmp_path / "all")
    assert everything.pop("embed.pos.weight").dtype == "F32"
    assert mine == everything
    assert "exclude_frozen_parameters" in report.notes[0]
    assert whole.notes == ()
    case = (str(excluded / f"whole-z{stage}"), "step", str(tmp_path / "all"))
    assert consolidated.differences("fp32", [case]) == [[]]


@pytest.fixture(scope="module")
def adapters() -> Path:
    """Saves of a model under LoRA, made once."""
    pytest.importorskip("peft", reason="peft opens what is exported: pip install peft")
    folder = CACHE / "adapters-2"
    with locked():
        if not (folder / "done").exists():
            folder.mkdir(parents=True, exist_ok=True)
            arguments = ["train", str(folder)]
            ranks.train("tests.support.make_adapters", arguments, folder, ranks=2, seconds=START_SECONDS)
            (folder / "done").touch()
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_peft_opens_the_adapter(adapters: Path, tmp_path: Path, stage: int) -> None:
    export(adapters / f"z{stage}" / "step", tmp_path / "w", "fp32")
    found = set(os.listdir(tmp_path / "w"))
    assert found == {"adapter_config.json", "adapter_model.safetensors", "ckptd.json", "model.safetensors"}
    out = run_module("tests.support.make_adapters", "load", str(adapters / f"z{stage}"), str(tmp_path / "w"))
    assert json.loads(out.splitlines()[-1]) == []


def test_peft_opens_adapters_of_other_names(adapters: Path, tmp_path: Path) -> None:
    """Each lies in a folder of its name, its configuration with it."""
    export(adapters / "named" / "step", tmp_path / "w", "fp32")
    assert set(os.listdir(tmp_path / "w")) == {"ckptd.json", "judge", "model.safetensors", "policy"}
    out = run_module("tests.support.make_adapters", "load", str(adapters / "named"), str(tmp_path / "w"))
    assert json.loads(out.splitlines()[-1]) == []


def test_transformers_opens_it_and_computes_the_same(tmp_path: Path) -> None:
    cases = []
    for stage, dtype in product(HF_RUNS, ("fp32", "bf16")):
        checkpoint = tree_of(HF_RUNS[stage]) / HF_TAG
        out = tmp_path / f"z{stage}-{dtype}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ckptd", "convert", str(checkpoint), str(out), "--form", "weights"),
                *("--dtype", dtype, "--max_shard_size", "30KB", "--json"),
            ],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["form"] == f"weights-{dtype}"
        assert report["notes"] == ["stored once under another name: lm_head.weight = transformer.wte.weight"]
        assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= set(
            os.listdir(out)
        )
        cases.append((str(checkpoint), str(out), "float32" if dtype == "fp32" else "bfloat16"))
    assert consolidated.differences("logits", cases) == [[]] * 4


def test_bf16_is_the_file_that_the_trainer_saved(tmp_path: Path) -> None:
    """save_pretrained's names, types and bytes, from the masters."""
    from safetensors.torch import load_file

    checkpoint = tree_of(HF_RUNS[2]) / HF_TAG
    theirs = load_file(checkpoint / "model.safetensors")
    mine = export(checkpoint / "global_step8", tmp_path / "w", "bf16")
    assert torch.equal(theirs.pop("lm_head.weight"), theirs["transformer.wte.weight"])
    assert {n: as_read(t) for n, t in theirs.items()} == mine
