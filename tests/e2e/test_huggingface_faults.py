"""The Trainer at its worst, beside a real daemon: it deletes before the upload, dies in mid-save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import PACE, node
from tests.e2e.test_huggingface import assert_as_written
from tests.support.hf import HfRun, start

pytestmark = pytest.mark.real


@pytest.mark.root
def test_held_until_committed_while_the_trainer_deletes(xfs: Path, tmp_path: Path) -> None:
    """save_total_limit=1 and a slow link: each is gone before it is sent, and is sent all the same."""
    notes = tmp_path / "notes"
    tags = [f"checkpoint-{step}" for step in (2, 4, 6)]
    run = HfRun(steps=6, limit=1, waits_for_hold=True)
    with node(xfs, local="forms = []", remote='forms = ["zero"]\nbandwidth = "20kB/s"') as here:
        here.start()
        training = start(run, here.save_dir, tmp_path, notes=notes)
        here.wait("a hold", lambda: any((here.save_dir / "_ckptd" / "hold").glob("checkpoint-2.*")), 120)
        training.finish()
        assert here.local_tags() == {"checkpoint-6"}
        assert len(here.commits()) < 3, "the upload outran the trainer"
        here.write_job(local="forms = []", remote='forms = ["zero"]')
        assert here.ckptd("reload", here.job_file).returncode == 0
        for tag in tags:
            here.wait_committed(f"{tag}~g1", 60)
            assert_as_written(here, notes, tag)
        hold = here.save_dir / "_ckptd" / "hold"
        here.wait("the holds to go", lambda: not any(hold.iterdir()), 20)
        here.wait("the job to be well", lambda: here.status()["state"] == "ok", 20)
        assert here.problems() <= {"link-slow"}
        assert {line["tag"] for line in here.audit("release-hold")} == set(tags)


def test_killed_in_mid_save(tmp_path: Path) -> None:
    """The torn checkpoint is never committed; resume goes to the one before, whose next save is committed."""
    run = HfRun(steps=6, slow_seconds=1.2, pause_seconds=2.0)
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.start()
        training = start(run, here.save_dir, tmp_path)
        torn = here.save_dir / "checkpoint-4"
        here.wait(
            "a save that is half done", (torn / "global_step4" / "mp_rank_00_model_states.pt").exists, 60
        )
        here.wait("`latest` before the other rank", (torn / "latest").exists, 20)
        training.kill()
        shards = list((torn / "global_step4").glob("*optim_states.pt"))
        assert len(shards) == 1, shards
        here.wait_committed("checkpoint-2~g1", 20)
        done = here.ckptd("resume", here.job_file, "--world-size", 2)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(here.save_dir / "checkpoint-2")
        assert not torn.exists()
        aside = here.save_dir / "_ckptd" / "aside" / "checkpoint-4.1"
        assert (aside / "latest").exists()
        again = HfRun(steps=4, resume=here.save_dir / "checkpoint-2")
        notes = tmp_path / "notes"
        start(again, here.save_dir, tmp_path, name="again", notes=notes).finish()
        here.wait_committed("checkpoint-4~g1", 30)
        assert_as_written(here, notes, "checkpoint-4")
        assert set(here.commits()) == {"checkpoint-2~g1", "checkpoint-4~g1"}
        here.wait("no problem", lambda: here.status()["state"] == "ok" and not here.problems(), 20)


def test_the_best_is_never_let_go(tmp_path: Path) -> None:
    """best_model_checkpoint is an early one: neither the node's limit nor the remote's takes it."""
    run = HfRun(steps=6, best=True, pause_seconds=1.5)
    with node(tmp_path, local="save_total_limit = 1\nforms = []") as here:
        here.write_job(remote='forms = ["zero"]\nsave_total_limit = 1')
        here.start()
        start(run, here.save_dir, tmp_path).finish()
        here.wait_committed("checkpoint-6~g1", 30)
        here.wait("the others to go", lambda: here.local_tags() == {"checkpoint-2", "checkpoint-6"}, 30)
        here.wait("the remote's", lambda: set(here.commits()) == {"checkpoint-2~g1", "checkpoint-6~g1"}, 30)
        assert "best_model_checkpoint" in here.checkpoint("checkpoint-2")["keep"]
        best = here.commits()["checkpoint-2~g1"]["best"]
        assert best["is_best"], best
        assert {line["tag"] for line in here.audit()} == {"checkpoint-4"}
        assert not here.problems() - PACE
