"""Conversion of real DeepSpeed checkpoints: equal to the stock converter's, and resumable in every stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.convert.supervise import ConvertOptions, convert, inspect_files
from ckptd.errors import CkptdError
from tests import stock
from tests.real import REPOSITORY, TAG, Recipe, Resume, losses_of, prepare, resume, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

STAGE_1 = Recipe(stage=1, world_size=1, dtype="fp32")
STAGE_2 = Recipe(stage=2, world_size=2)
STAGE_3 = Recipe(stage=3, world_size=2)
BF16 = Recipe(stage=1, world_size=2, grad_accum_dtype="fp32", two_groups=True)
ROUND_ROBIN = Recipe(stage=2, world_size=2, round_robin=True, odd=True, universal_info=False)
GROUPS_TIED_FROZEN = Recipe(stage=2, world_size=4, dtype="fp32", two_groups=True, tie=True, freeze=True)
PIPELINE = Recipe(stage=1, world_size=2, pipe=2)
SUB_GROUPS = Recipe(stage=3, world_size=4, sub_group_size=20_000, freeze=True, odd=True)
CONVERTED = {
    "stage 1, fp32, 1 rank": STAGE_1,
    "stage 2, bf16": STAGE_2,
    "stage 3, bf16": STAGE_3,
    "BF16_Optimizer, two groups": BF16,
    "round robin, odd sizes, no universal info": ROUND_ROBIN,
    "two groups, tied, frozen, fp32, 4 ranks": GROUPS_TIED_FROZEN,
    "stage 3, sub-groups, frozen, odd, 4 ranks": SUB_GROUPS,
    "two pipeline stages": PIPELINE,
}
SOME = {
    1: [("stage 2, bf16", 3), ("stage 3, bf16", 2)],
    2: [
        ("stage 2, bf16", 1),
        ("stage 2, bf16", 2),
        ("stage 3, bf16", 1),
        ("stage 3, bf16", 3),
        ("BF16_Optimizer, two groups", 1),
    ],
    4: [("stage 2, bf16", 3), ("stage 3, bf16", 2), ("stage 3, bf16", 3)],
}
"""World size → (source, stage it is loaded in): pairwise."""
EVERYTHING = {
    world_size: [
        *((name, stage) for name in ("stage 2, bf16", "stage 3, bf16") for stage in (1, 2, 3)),
        ("BF16_Optimizer, two groups", 1),
    ]
    for world_size in (1, 2, 4)
}
"""`make loader-matrix`. Stage 3 loads the first group's settings for all, so two groups stay out of it."""
STAGE_0 = Recipe(stage=0, world_size=2)
EXPERTS = Recipe(stage=2, world_size=2, moe=4, ep=2)


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Path]:
    prepare([*CONVERTED.values(), STAGE_0])
    return {name: save_dir_of(recipe) / TAG for name, recipe in CONVERTED.items()}


def test_strict_equals_the_stock_converter(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    pairs = []
    for i, source in enumerate(checkpoints.values()):
        convert(source, tmp_path / f"ours{i}", ConvertOptions(compat="strict", verify=True))
        pairs.append((source, tmp_path / f"stock{i}"))
    stock.convert(pairs)
    found = stock.differences([(tmp_path / f"stock{i}", tmp_path / f"ours{i}") for i in range(len(pairs))])
    assert dict(zip(checkpoints, found, strict=True)) == {name: [] for name in checkpoints}


def test_the_superset_resumes_in_every_stage_and_on_other_world_sizes(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Losses stay within 1e-3 of the uninterrupted run, with other initial weights than it had."""
    sources = {"stage 2, bf16": STAGE_2, "stage 3, bf16": STAGE_3, "BF16_Optimizer, two groups": BF16}
    for name in sources:
        convert(checkpoints[name], tmp_path / _folder(name), ConvertOptions(compat="superset"))
    for world_size, loads in (EVERYTHING if os.environ.get("CKPTD_FULL") else SOME).items():
        work = tmp_path / f"world{world_size}"
        work.mkdir()
        resumes = [
            Resume(recipe=replace(sources[name], stage=stage), save_dir=tmp_path, tag=_folder(name))
            for name, stage in loads
        ]
        for (name, stage), losses in zip(loads, resume(world_size, resumes, work), strict=True):
            expected = losses_of(sources[name])
            where = f"{name} loaded in stage {stage} on {world_size} ranks"
            assert set(losses) == {3, 4, 5, 6}, where
            for step, loss in losses.items():
                assert loss == pytest.approx(expected[step], abs=1e-3), f"{where}, step {step}"


def _folder(name: str) -> str:
    return name.replace(",", "").replace(" ", "_") + "_universal"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (STAGE_0, "stage 0"),
        (EXPERTS, "mixture-of-experts"),
    ],
)
def test_what_has_no_universal_form_is_refused(recipe: Recipe, words: str, tmp_path: Path) -> None:
    prepare([recipe])
    with pytest.raises(CkptdError, match=words) as caught:
        convert(save_dir_of(recipe) / TAG, tmp_path / "u")
    assert caught.value.exit_code == 65
    assert list(tmp_path.iterdir()) == []


def test_facts_of_real_shards(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["stage 3, sub-groups, frozen, odd, 4 ranks"]
    found = inspect_files(folder, sorted(p.name for p in folder.iterdir()))
    assert len(found) == 8
    for fact in found:
        assert fact.reason is None
        assert fact.has_crc
        assert fact.facts is not None
        assert (fact.facts.zero_stage, fact.facts.dtype, fact.facts.ds_version) == (3, "bf16", "0.19.8")
    model = next(f.facts for f in found if f.facts and f.facts.global_steps is not None)
    assert (model.global_steps, model.dp_world_size, model.frozen_parameters, model.buffers) == (2, 4, 1, 2)
    assert next(f.facts.optimizer_step for f in found if f.facts and f.facts.partition_count) == 2


def ckptd(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptd", *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_converts_a_save_dir_and_names_it(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    save_dir = checkpoints["stage 2, bf16"].parent
    done = ckptd(
        "convert", save_dir, tmp_path / "u", "--compat", "superset", "--memory_budget", "64MiB", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["layout"] == "superset"
    assert report["step"] == 2
    assert (tmp_path / "latest_universal").read_text() == "u"
    again = ckptd("convert", save_dir, tmp_path / "u")
    assert again.returncode == 73
    assert "Traceback" not in again.stderr
    assert "choose another target" in again.stderr
    assert ckptd("convert", save_dir, tmp_path / "v", "--memory-budget", "lots").returncode == 2
    assert ckptd("convert", tmp_path / "no", tmp_path / "v").returncode == 66
