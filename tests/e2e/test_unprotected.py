"""Checkpoints of real trainers that nothing protects, and real shards that mislead: said, never mistaken."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import RUN, made_before, node
from tests.support.hf import HfRun, train
from tests.support.real import save_dir_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real
real_saves = made_before(RUN)


def test_the_shards_that_a_trainer_saves_last_are_no_checkpoint_of_it(tmp_path: Path) -> None:
    """Stage 3 gathers no weights by default: `trainer.save_model()` leaves global_stepN and `latest`."""
    with node(tmp_path, local="save_total_limit = 1") as here:
        train(HfRun(stage=3, steps=2, final_save=True), here.save_dir, tmp_path)
        assert (here.save_dir / "latest").read_text() == "global_step2", "what the real Trainer leaves"
        assert here.once() == 0
        assert set(here.commits()) == {"checkpoint-2~g1"}
        assert (here.nas / "latest").read_text() == "checkpoint-2"
        said = here.ckptd("status", here.job_file).stdout
        assert "global_step2: shards that trainer.save_model left" in said
        done = here.ckptd("resume", here.job_file)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(here.save_dir / "checkpoint-2")
        train(
            HfRun(stage=3, steps=4, resume=here.save_dir / "checkpoint-2"), here.save_dir, tmp_path, name="on"
        )
        assert (here.save_dir / "checkpoint-4" / "trainer_state.json").exists()


def test_a_trainer_without_deepspeed_is_protected_and_its_last_model_is_none_of_its_checkpoints(
    tmp_path: Path,
) -> None:
    with node(tmp_path) as here:
        run = HfRun(steps=4, save_steps=2, deepspeed=False, processes=1, final_save=True)
        train(run, here.save_dir, tmp_path)
        names = {path.name for path in (here.save_dir / "checkpoint-4").iterdir()}
        assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= names
        assert here.once() == 0, here.log.read_text()[-2000:]
        assert "checkpoint-4~g1" in here.commits()
        done = here.ckptd("resume", here.job_file)
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert done.stdout.strip() == str(here.save_dir / "checkpoint-4")


def test_a_trainer_that_ckptd_does_not_know_is_not_safe_and_never_begun_anew(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        for name in ("ckpt_2.pt", "ckpt_4.pt"):
            (here.save_dir / name).write_bytes(b"x")
        assert here.once() == 1
        assert here.commits() == {}
        assert "ckpt_4.pt (and 1 more) is a checkpoint in one torch.save file" in here.log.read_text()
        done = here.ckptd("check", here.job_file, "--init-remote")
        assert (done.returncode, "FAIL" in done.stdout) == (65, True), done
        done = here.ckptd("resume", here.job_file)
        assert done.returncode == 65, (done.stdout, done.stderr)
        assert "ckpt_4.pt (a checkpoint in one torch.save file)" in done.stderr
        assert "scratch" not in done.stderr
        assert (here.save_dir / "ckpt_4.pt").exists()


def test_a_tag_with_a_slash_is_said_and_its_pointer_is_left(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        shutil.copytree(save_dir_of(RUN) / "global_step2", here.save_dir / "epoch1" / "step2")
        (here.save_dir / "latest").write_text("epoch1/step2")
        here.start()
        here.wait("said", lambda: "NOT SAFE" in here.ckptd("status", here.job_file).stdout)
        said = here.ckptd("status", here.job_file)
        assert said.returncode == 1
        assert "epoch1/step2, which latest names" in " ".join(said.stdout.split())
        here.ckptd("check", here.job_file, "--init-remote")
        done = here.ckptd("resume", here.job_file)
        assert done.returncode == 65, (done.stdout, done.stderr)
        assert (here.save_dir / "latest").read_text() == "epoch1/step2", "nothing was moved"
        shutil.rmtree(here.save_dir / "epoch1")
        here.wait("over", lambda: here.ckptd("status", here.job_file).returncode == 3)


def test_a_tag_that_no_remote_takes_is_resumed_from_here(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        shutil.copytree(save_dir_of(RUN) / "global_step2", here.save_dir / "global_step2")
        assert here.once() == 0
        for tag in ("é" * 60, ".hidden_step3"):
            shutil.copytree(save_dir_of(RUN) / "global_step3", here.save_dir / tag)
            (here.save_dir / "latest").write_text(tag)
            assert here.once() == 1
            done = here.ckptd("resume", here.job_file)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == str(here.save_dir / tag)
            assert "is not sent to any remote" in done.stderr
            assert (here.save_dir / "latest").read_text() == tag
            shutil.rmtree(here.save_dir / tag)
        assert json.loads((here.nas / "_ckptd" / "remote.json").read_text())["job"] == "run"
