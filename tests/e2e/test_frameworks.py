"""The recipes of examples/frameworks: launch files are whole and know nothing of ckptd; one is performed.

`make demo-frameworks` performs all of them, with trainers that the tests do without.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.frameworks.recipes import BATCH, HERE, OTHER_RANKS, RANKS, RECIPES, SAVE_STEPS, Launch
from tests.support.real import REPOSITORY

FOLDERS = sorted(path for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__")
FILES = sorted(path for folder in FOLDERS for path in folder.iterdir() if path.is_file())


def read(path: Path) -> object:
    """Return what a configuration holds."""
    return json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_launch_file_knows_nothing_of_ckptd(path: Path) -> None:
    """It stays as its trainer's users have it, and can be read."""
    assert "ckptd" not in path.read_text()
    if path.suffix == ".py":
        compile(path.read_text(), str(path), "exec")
    else:
        assert read(path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_resume_on_other_ranks_changes_the_universal_key_and_the_batch_alone(
    name: str, tmp_path: Path
) -> None:
    """Every file that a command names is there, the total batch stays, and the path is handed over."""
    recipe = RECIPES[name]
    folder = HERE / (recipe.folder or name)
    first = recipe.command(Launch(bin=tmp_path, out=tmp_path, ranks=RANKS, port=1))
    second = recipe.command(
        Launch(bin=tmp_path, out=tmp_path, ranks=OTHER_RANKS, port=1, resume=tmp_path / "the-path")
    )
    assert "the-path" not in " ".join(first)
    assert str(tmp_path / "the-path") in " ".join(second)
    for command, ranks in ((first, RANKS), (second, OTHER_RANKS)):
        words = [word.rpartition("=")[2] for word in command]
        named = [word for word in words if re.fullmatch(r"[\w./]+\.(py|json|yaml)", word)]
        assert named
        assert all((folder / word).is_file() for word in named), named
        batch = [words[n + 1] for n, word in enumerate(words) if word.endswith("batch_size")]
        batch += [word.partition("=")[2] for word in command if "batch_size=" in word]
        assert [int(size) * ranks for size in batch] == [BATCH]


def test_a_universal_configuration_is_its_twin_with_one_key_more() -> None:
    """DeepSpeed's `load_universal`, and nothing that changes the training."""
    twins = sorted(HERE.rglob("ds_*_universal.json"))
    assert len(twins) == 3
    for path in twins:
        there = read(path.with_name(path.name.replace("_universal", "")))
        assert isinstance(there, dict)
        assert read(path) == {"checkpoint": {"load_universal": True}} | there


@pytest.mark.real
def test_the_trainer_of_hugging_face_beside_ckptd_killed_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    """Two arguments of ckptd, an unchanged launch file, a SIGKILL; other trainings wait meanwhile."""
    with (REPOSITORY / ".build" / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-m", "examples.frameworks", "hf_trainer", "--out", str(tmp_path / "out")],
            cwd=REPOSITORY,
            env=os.environ | {"DS_BUILD_OPS": "0"},
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    row = done.stdout.splitlines()[-1]
    found = re.search(r"step (\d+), 2 ranks *\| step (\d+), 1 rank *\| step (\d+) ", row)
    assert found is not None, row
    killed_at, resumed_from, ended_at = map(int, found.groups())
    assert SAVE_STEPS <= resumed_from <= killed_at
    assert ended_at >= resumed_from + SAVE_STEPS
