"""`ckptd inspect` on real checkpoints: whole, torn, missing a rank, mixed of two saves, universal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from tests.e2e.test_convert_real import STAGE_2, STAGE_3, ckptd
from tests.support.real import TAG, Recipe, copy_of, expect, prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
TWO_SAVES = Recipe(stage=2, world_size=2, save_at=(2, 4))
expect(TWO_SAVES)
LAST = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    prepare([TWO_SAVES, STAGE_2, STAGE_3])
    return copy_of(save_dir_of(TWO_SAVES), tmp_path / "save")


def inspect(path: Path) -> tuple[int, dict[str, Any]]:
    done = ckptd("inspect", path, "--json")
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_whole_save_dir(save_dir: Path) -> None:
    code, seen = inspect(save_dir)
    assert code == 0
    assert (seen["kind"], seen["latest"]) == ("save_dir", "global_step4")
    assert [c["tag"] for c in seen["checkpoints"]] == ["global_step2", "global_step4"]
    first = seen["checkpoints"][0]
    assert (first["state"], first["step"], first["zero_stage"], first["dtype"]) == ("complete", 2, 2, "bf16")
    assert (first["grid"]["dp"], first["grid"]["mm_count"]) == (2, 1)
    assert ckptd("inspect", save_dir).returncode == 0


def test_a_torn_shard(save_dir: Path) -> None:
    shard = save_dir / TAG / LAST
    shard.write_bytes(shard.read_bytes()[:-1000])
    code, seen = inspect(save_dir / TAG)
    assert code == 65
    assert not seen["checkpoints"][0]["is_complete"]
    assert LAST in seen["checkpoints"][0]["reason"]
    shown = ckptd("inspect", save_dir)
    assert shown.returncode == 65
    assert LAST in shown.stdout


def test_a_missing_rank(save_dir: Path) -> None:
    (save_dir / TAG / LAST).unlink()
    code, seen = inspect(save_dir / TAG)
    assert code == 65
    assert "rank 1" in seen["checkpoints"][0]["reason"]


def test_shards_of_two_saves(save_dir: Path) -> None:
    shutil.copy2(save_dir / "global_step4" / LAST, save_dir / TAG / LAST)
    code, seen = inspect(save_dir / TAG)
    assert code == 65
    assert "two saves" in seen["checkpoints"][0]["reason"]


def test_a_universal_folder_and_a_torn_one(save_dir: Path) -> None:
    made = save_dir / f"{TAG}_universal"
    convert(save_dir / TAG, made, ConvertOptions())
    code, seen = inspect(made)
    assert code == 0
    assert (seen["kind"], seen["checkpoints"][0]["layout"]) == ("universal", "superset")
    assert seen["checkpoints"][0]["step"] == 2
    torn = made / "zero" / "head.lm.weight" / "exp_avg.pt"
    torn.write_bytes(torn.read_bytes()[:200])
    code, seen = inspect(made)
    assert code == 65
    assert "head.lm.weight/exp_avg.pt" in seen["checkpoints"][0]["reason"]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    done = ckptd("inspect", tmp_path)
    assert done.returncode == 66
    assert "no DeepSpeed checkpoint" in done.stderr
    assert ckptd("inspect", tmp_path / "no").returncode == 66
