"""`ckptd verify --load`: DeepSpeed's own loader takes what is good, refuses what is not, and runs no code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.api import convert, verify_by_loading
from ckptd.errors import DamagedError, NoSpaceError, RefusedError
from ckptd.maintenance import deepspeed_load_child
from tests.support import real
from tests.support.real import TAG, Recipe

ADAM = ("exp_avg", "exp_avg_sq", "step")
ZERO = {
    "stage 1": (Recipe(stage=1, world_size=2), ADAM),
    "stage 2, fp16": (Recipe(stage=2, world_size=2, dtype="fp16"), ADAM),
    "stage 3": (Recipe(stage=3, world_size=2), ADAM),
    "BF16_Optimizer, two groups": (
        Recipe(stage=1, world_size=2, grad_accum_dtype="fp32", two_groups=True),
        ADAM,
    ),
    "fp32, tied, frozen, four ranks": (
        Recipe(stage=2, world_size=4, dtype="fp32", two_groups=True, tie=True, freeze=True),
        ADAM,
    ),
    "SGD": (Recipe(stage=2, world_size=2, optimizer="sgd"), ("momentum_buffer",)),
}
FULL_ALONE = ("stage 2, fp16", "BF16_Optimizer, two groups")
OTHERS = {
    "pipeline": Recipe(stage=1, world_size=2, pipe=2),
    "experts": Recipe(stage=2, world_size=2, moe=4, ep=2),
    "tensor parallel": Recipe(stage=1, world_size=2, tp=2),
}
real.expect(*(recipe for recipe, _ in ZERO.values()), *OTHERS.values())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in FULL_ALONE else ()) for name in ZERO],
)
def test_what_was_saved_and_what_was_converted_load(name: str, tmp_path: Path) -> None:
    recipe, states = ZERO[name]
    real.prepare([recipe])
    save = real.save_dir_of(recipe) / TAG
    loaded = verify_by_loading(save)
    assert (loaded.stage, loaded.ranks, loaded.step) == (recipe.stage, recipe.world_size, real.SAVED_AT)
    assert loaded.states == states
    assert bool(loaded.compared) == (recipe.stage < 3)
    convert(save, tmp_path / "u")
    again = verify_by_loading(tmp_path / "u")
    assert (again.ranks, again.step, again.states) == (1, real.SAVED_AT, states)
    assert (again.tensors, again.elements) == (loaded.tensors, loaded.elements)
    assert "masters and states with the form's files" in again.compared


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_its_own_model_loads_is_refused_by_name(name: str) -> None:
    real.prepare([OTHERS[name]])
    with pytest.raises(RefusedError, match=r"pipeline|experts|tensor-parallel"):
        verify_by_loading(real.save_dir_of(OTHERS[name]) / TAG)


SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


class Code:
    """Writes a file when it is unpickled as stock DeepSpeed unpickles."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _add_code(root: Any, path: Path) -> None:
    root["client"] = Code(path)


def _change_a_master(root: Any, path: Path) -> None:
    groups = root["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0].data.reshape(-1)[7] += 1


def _lose_a_group(root: Any, path: Path) -> None:
    """DeepSpeed loads it without a word."""
    root["optimizer_state_dict"]["single_partition_of_fp32_groups"] = []


def _lose_all(root: Any, path: Path) -> None:
    root.clear()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_add_code, RefusedError, "posix.mkdir"),
        (_change_a_master, DamagedError, "its masters, rounded"),
        (_lose_a_group, DamagedError, "its masters, rounded"),
        (_lose_all, DamagedError, "does not load global_step2: KeyError"),
    ],
)
def test_what_is_wrong_is_named_and_no_code_runs(
    change: Callable[[Any, Path], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    recipe, _ = ZERO["stage 1"]
    real.prepare([recipe])
    save = real.copy_of(real.save_dir_of(recipe), tmp_path / "copy") / TAG
    root = torch.load(save / SHARD, weights_only=False)
    change(root, tmp_path / "code-ran")
    torch.save(root, save / SHARD)
    with pytest.raises(error, match=words):
        verify_by_loading(save)
    assert not (tmp_path / "code-ran").exists()


def test_too_little_memory_is_said_before_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = deepspeed_load_child._Load(tmp_path, ranks=64)
    monkeypatch.setattr(deepspeed_load_child, "_PROCESS_BYTES", 1 << 40)
    with pytest.raises(NoSpaceError, match=r"on 64 ranks takes .* are free"):
        load._refuse_without_memory({"w": (4, 4)}, ADAM)


def ckptd(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptd", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_committed_checkpoint_is_restored_and_loaded(tmp_path: Path) -> None:
    recipe, _ = ZERO["stage 1"]
    real.prepare([recipe])
    run, nas = real.copy_of(real.save_dir_of(recipe), tmp_path / "run"), tmp_path / "nas"
    done = ckptd("run", run, nas, "--once", "--same-filesystem")
    assert done.returncode == 0, done.stderr
    for options, ranks in (((), 1), ((TAG, "--form", "zero"), 2)):  # the universal form is committed too
        done = ckptd("verify", nas, *options, "--load", "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)["loaded"]
        assert (said["ranks"], said["step"]) == (ranks, real.SAVED_AT)
    for wrong in ("--load --form weights-bf16", "--load --read-data", "--form zero"):
        assert ckptd("verify", nas, TAG, *wrong.split()).returncode == 2
