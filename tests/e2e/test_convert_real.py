"""Conversion of real DeepSpeed checkpoints: bit for bit what the stock converter writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from tests.support import stock
from tests.support.real import REPOSITORY, TAG, Recipe, expect, prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

STAGE_1 = Recipe(stage=1, world_size=1, dtype="fp32")
STAGE_2 = Recipe(stage=2, world_size=2)
STAGE_3 = Recipe(stage=3, world_size=2)
BF16 = Recipe(stage=1, world_size=2, grad_accum_dtype="fp32", two_groups=True)
ROUND_ROBIN = Recipe(stage=2, world_size=2, round_robin=True, odd=True, universal_info=False)
ONE_RANK = Recipe(stage=2, world_size=1, odd=True)
GROUPS_TIED_FROZEN = Recipe(stage=2, world_size=4, dtype="fp32", two_groups=True, tie=True, freeze=True)
PIPELINE = Recipe(stage=1, world_size=2, pipe=2)
SUB_GROUPS = Recipe(stage=3, world_size=4, sub_group_size=20_000, freeze=True, odd=True)
CONVERTED = {
    "stage 1, fp32, 1 rank": STAGE_1,
    "stage 2, bf16": STAGE_2,
    "stage 3, bf16": STAGE_3,
    "BF16_Optimizer, two groups": BF16,
    "round robin, odd sizes, no universal info": ROUND_ROBIN,
    "stage 2, one rank, odd sizes": ONE_RANK,
    "BF16_Optimizer, one rank, odd sizes": replace(ONE_RANK, stage=1, grad_accum_dtype="fp32"),
    "two groups, tied, frozen, fp32, 4 ranks": GROUPS_TIED_FROZEN,
    "stage 3, sub-groups, frozen, odd, 4 ranks": SUB_GROUPS,
    "two pipeline stages": PIPELINE,
}
MORE = {
    "stage 2, fp16": Recipe(stage=2, world_size=2, dtype="fp16"),
    "stage 3, fp16": Recipe(stage=3, world_size=2, dtype="fp16"),
    "stage 1, offload": Recipe(stage=1, world_size=2, offload=True),
    "stage 3, offload": Recipe(stage=3, world_size=2, offload=True),
    "stage 2, 16-bit moments": Recipe(stage=2, world_size=2, bf16_optimizer_states=True),
    "stage 3, 16-bit moments": Recipe(stage=3, world_size=2, bf16_optimizer_states=True),
    "stage 2, FusedAdam": Recipe(stage=2, world_size=2, optimizer="fused_adam"),
    "stage 2, CPUAdam, odd sizes": Recipe(stage=2, world_size=2, optimizer="cpu_adam", odd=True),
    "stage 3, CPUAdam, odd sizes": Recipe(stage=3, world_size=2, optimizer="cpu_adam", odd=True),
    "stage 1, step in the group alone": Recipe(stage=1, world_size=2, optimizer="group_step_adam"),
    "stage 2, step in the group alone": Recipe(stage=2, world_size=2, optimizer="group_step_adam"),
    "stage 3, three ranks": Recipe(stage=3, world_size=3),
    "stage 3, Ulysses 2 on 4 ranks": Recipe(stage=3, world_size=4, sp=2),
}
"""What stock converts too, beyond AdamW in bf16 and fp32."""
FULL = {
    **{f"stage {s}, fp16": Recipe(stage=s, world_size=2, dtype="fp16") for s in (1, 2, 3)},
    **{f"stage {s}, offload": Recipe(stage=s, world_size=2, offload=True) for s in (1, 2, 3)},
    **{
        f"stage {s}, 16-bit moments": Recipe(stage=s, world_size=2, bf16_optimizer_states=True)
        for s in (1, 2, 3)
    },
    **{
        f"stage {s}, {o}": Recipe(stage=s, world_size=2, optimizer=o)
        for s in (1, 2, 3)
        for o in ("fused_adam", "cpu_adam", "group_step_adam", "cpu_lion")
    },
    **{f"stage {s}, {n} ranks": Recipe(stage=s, world_size=n) for s in (1, 2, 3) for n in (1, 3, 4)},
}
CONVERTED |= MORE
if os.environ.get("CKPTD_FULL"):
    CONVERTED |= FULL
expect(*CONVERTED.values())


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Path]:
    prepare([*CONVERTED.values()])
    return {name: save_dir_of(recipe) / TAG for name, recipe in CONVERTED.items()}


def test_strict_equals_the_stock_converter(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    pairs = []
    for i, (name, source) in enumerate(checkpoints.items()):
        report = convert(source, tmp_path / f"ours{i}", ConvertOptions(compat="strict", verify=True))
        assert name not in MORE or bool(report.notes) is ("group alone" in name), (name, report.notes)
        pairs.append((source, tmp_path / f"stock{i}"))
    stock.convert(pairs)
    found = stock.differences([(tmp_path / f"stock{i}", tmp_path / f"ours{i}") for i in range(len(pairs))])
    assert dict(zip(checkpoints, found, strict=True)) == {name: [] for name in checkpoints}


def test_ulysses_ranks_are_data_parallel(checkpoints: dict[str, Path]) -> None:
    """0.19.8 records their degree as tp_degree; no shard of a second tensor rank is waited for."""
    done = ckptd("inspect", checkpoints["stage 3, Ulysses 2 on 4 ranks"], "--json")
    assert done.returncode == 0, done.stderr
    (seen,) = json.loads(done.stdout)["checkpoints"]
    assert seen["state"] == "complete"
    grid = seen["grid"]
    assert (grid["dp"], grid["mm_count"], grid["tp"], grid["sp"]) == (4, 1, 1, 2)


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
