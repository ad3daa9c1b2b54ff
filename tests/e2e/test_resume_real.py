"""A replaced node, for real: daemon ships, the disk is lost, `ckptd resume`, stock DeepSpeed goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real import Recipe, Resume, losses_of, prepare, resume, save_dir_of

pytestmark = pytest.mark.real
RECIPE = Recipe(stage=2, world_size=2)


def ckptd(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command."""
    return subprocess.run(
        [sys.executable, "-m", "ckptd", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    prepare([RECIPE])
    save_dir, nas = tmp_path / "nvme" / "run", tmp_path / "nas" / "run"
    nas.parent.mkdir()
    shutil.copytree(save_dir_of(RECIPE), save_dir)
    done = ckptd("run", save_dir, nas, "--once", "--same-filesystem")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(save_dir)
    done = ckptd("resume", save_dir, nas, "--world-size", 4)
    assert done.returncode == 0, done.stderr
    tag = (save_dir / "latest_universal").read_text()
    assert done.stdout.strip() == str(save_dir / tag)
    (losses,) = resume(4, [Resume(recipe=RECIPE, save_dir=save_dir, tag=tag)], tmp_path)
    expected = losses_of(RECIPE)
    assert losses
    for step, loss in losses.items():
        assert abs(loss - expected[step]) <= 1e-3
    zero = ckptd("resume", save_dir, nas, "--world-size", 2)
    assert zero.returncode == 0, zero.stderr
    assert zero.stdout.strip() == str(save_dir / "global_step2")
    assert ckptd("inspect", save_dir / "global_step2").returncode == 0
