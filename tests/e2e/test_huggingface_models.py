"""save_only_model, for real: shards without random states, or a model alone, which nothing can resume."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import node
from tests.e2e.test_huggingface import assert_as_written, files_in, sha256
from tests.support.hf import HF_TREES, HfRun, copy_checkpoint, prepare, start, tree_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", autouse=True)
def trees() -> None:
    """All cached trees in one start."""
    prepare(HF_TREES)


def test_only_models_beside_one_to_resume_from(tmp_path: Path) -> None:
    """Shipped, verified, committed and rotated among themselves; never safe, never what resume offers."""
    notes = tmp_path / "notes"
    with node(tmp_path, local="save_total_limit = 1") as here:
        here.write_job(remote='forms = ["zero", "universal"]\nsave_total_limit = 1')
        here.start()
        copy_checkpoint(tree_of(HfRun(stage=2)), "checkpoint-2", here.save_dir)
        here.wait_committed("checkpoint-2~g1")
        run = HfRun(steps=6, save_steps=3, save_only_model=True, pause_seconds=2.0)
        start(run, here.save_dir, tmp_path, name="models", notes=notes).finish()
        here.wait_committed("checkpoint-6~g1")
        assert here.commits()["checkpoint-6~g1"]["step"] == 6
        for name, left in json.loads((notes / "checkpoint-6.json").read_text()).items():
            assert sha256(here.nas / "checkpoint-6" / name) == left["sha256"], name
        here.wait("the older one to go", lambda: here.local_tags() == {"checkpoint-2", "checkpoint-6"})
        here.wait("the remote's", lambda: set(here.commits()) == {"checkpoint-2~g1", "checkpoint-6~g1"})
        here.wait("committed", lambda: here.checkpoint("checkpoint-6")["state"] == "committed", 20)
        here.wait("rest", lambda: here.status()["state"] == "ok" and not here.problems(), 20)
        status = here.status()
        assert (status["safe"]["tag"], status["newest_complete"]) == ("checkpoint-2", "checkpoint-2")
        assert here.checkpoint("checkpoint-6")["kind"] == "model-only"
        assert "only a model" in here.ckptd("status", here.job_file).stdout
        assert (here.nas / "latest").read_text() == "checkpoint-2"
        assert set(here.commits("universal")) == {"checkpoint-2~g1"}
        listed = json.loads(here.ckptd("list", here.job_file, "--json").stdout)["remotes"][0]["checkpoints"]
        assert {c["tag"]: c["kind"] for c in listed} == {
            "checkpoint-2": "resumable",
            "checkpoint-6": "model-only",
        }
        done = here.ckptd("resume", here.job_file, "--world-size", 2)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(here.save_dir / "checkpoint-2")
        assert "checkpoint-6 is only a model" in done.stderr
        assert here.local_tags() == {"checkpoint-2", "checkpoint-6"}
        here.stop()
        (here.state / "journal.db").unlink()
        assert here.once() == 0
        assert set(here.commits()) == {"checkpoint-2~g1", "checkpoint-6~g1"}, "nothing is sent again"


def test_shards_without_random_states(tmp_path: Path) -> None:
    """Stage 3 without gathering writes all shards and no random states: a checkpoint like any other."""
    tree = tree_of(HfRun(stage=3, steps=2, save_only_model=True))
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        copy_checkpoint(tree, "checkpoint-2", here.save_dir)
        assert here.once() == 0
        assert_as_written(here, tree.parent / "notes", "checkpoint-2")
        assert not list((here.nas / "checkpoint-2").glob("rng_state*"))
        assert here.checkpoint("checkpoint-2")["kind"] == "resumable"
        done = here.ckptd("resume", here.job_file, "--world-size", 2)
        assert done.stdout.strip() == str(here.save_dir / "checkpoint-2"), done.stderr


def test_only_models_is_a_fresh_start(tmp_path: Path) -> None:
    """Gathered at stage 3 there is a model alone as well; without anything to resume from: exit code 4."""
    tree = tree_of(HfRun(stage=3, steps=2, save_only_model=True, gather=True))
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        copy_checkpoint(tree, "checkpoint-2", here.save_dir)
        assert here.once() == 0
        assert set(here.commits()) == {"checkpoint-2~g1"}
        done = here.ckptd("resume", here.job_file)
        assert done.returncode == 4, done.stderr
        assert "only a model: checkpoint-2" in done.stderr
        assert here.local_tags() == {"checkpoint-2"}
        assert not (here.nas / "latest").exists()
        assert here.ckptd("restore", here.job_file, "--to", tmp_path / "else").returncode == 4
        done = here.ckptd("restore", here.job_file, "checkpoint-2", "--to", tmp_path / "else")
        assert done.returncode == 0, done.stderr
        assert "only a model" in done.stderr
        assert files_in(tmp_path / "else" / "checkpoint-2") == files_in(tree / "checkpoint-2")
        done = here.ckptd(
            "restore", here.job_file, "checkpoint-2", "--to", tmp_path / "u", "--form", "universal"
        )
        assert done.returncode == 65, done.stderr
