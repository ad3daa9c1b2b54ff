"""Hugging Face's Trainer, for real, beside a real daemon: complete at the right moment, committed, resumed.

The trainer rotates by itself, writes everything twice at stage 3 and dies in mid-save; nothing of that may
lose or mix a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Node, node
from tests.support.hf import HF_TREES, HfRun, copy_checkpoint, losses_of, prepare, start, train, tree_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real

FULL = bool(os.environ.get("CKPTD_FULL"))
UNIVERSAL_TOO = 'forms = ["zero", "universal"]'


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_as_written(here: Node, notes: Path, tag: str) -> None:
    """The remote holds exactly what the trainer left, by its own witness."""
    noted = json.loads((notes / f"{tag}.json").read_text())
    assert any(name.startswith("global_step") for name in noted)
    for name, left in noted.items():
        assert sha256(here.nas / tag / name) == left["sha256"], name


def files_in(folder: Path) -> dict[str, str]:
    """Name → SHA-256 of every file below a folder."""
    return {str(p.relative_to(folder)): sha256(p) for p in folder.rglob("*") if p.is_file()}


def assert_restored_alike(here: Node, resumed: Path, to: Path, processes: int) -> None:
    """`restore` puts elsewhere what `resume` puts into save_dir; a second call fetches nothing."""
    command = ("restore", here.job_file, "--to", to, "--world-size", processes)
    assert here.ckptd(*command).returncode == 0
    done = here.ckptd(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(to / resumed.name)
    assert "fetch" not in done.stderr, done.stderr
    assert not (to / "latest").exists()
    assert files_in(to / resumed.name) == files_in(resumed)


@pytest.fixture(scope="module", autouse=True)
def trees() -> None:
    """All cached trees in one start."""
    prepare(HF_TREES)


@pytest.mark.parametrize("stage", [2, 3] if FULL else [3])
def test_live_run_that_rotates_by_itself(tmp_path: Path, stage: int) -> None:
    """Each checkpoint is committed once, as its trainer wrote it, while the trainer keeps only two."""
    run = HfRun(stage=stage, steps=6, limit=2, pause_seconds=6.0)  # a busy machine looks late
    notes = tmp_path / "notes"
    with node(tmp_path, local="", remote=UNIVERSAL_TOO) as here:
        here.start()
        start(run, here.save_dir, tmp_path, notes=notes).finish()
        for step in (2, 4, 6):
            here.wait_committed(f"checkpoint-{step}~g1", 40)
        assert set(here.commits()) == {f"checkpoint-{step}~g1" for step in (2, 4, 6)}
        for step in (2, 4, 6):
            assert_as_written(here, notes, f"checkpoint-{step}")
        assert here.commits()["checkpoint-6~g1"]["step"] == 6
        assert (here.nas / "latest").read_text() == "checkpoint-6"
        here.wait("the universal form", lambda: "checkpoint-6~g1" in here.commits("universal"), 40)
        inside = here.nas / "checkpoint-6"
        assert (inside / "latest_universal").read_text() == "global_step6_universal"
        assert (inside / "global_step6_universal" / "zero").is_dir()
        here.wait("no problem", lambda: not here.problems(), 20)
        assert here.local_tags() == {"checkpoint-4", "checkpoint-6"}
        assert not (here.save_dir / "latest_universal").exists()
        assert not (here.save_dir / "latest").exists()
        assert {p.name for p in (here.save_dir / "checkpoint-6").iterdir()} == {
            name.split("/")[0] for name in json.loads((notes / "checkpoint-6.json").read_text())
        }
        assert "torn" not in here.log.read_text()
        assert here.stop() == 0


CHANGES = {2: (2, 4), 3: (1,)}
"""Stage → numbers of processes; the others with CKPTD_FULL=1."""
if FULL:
    CHANGES = {2: (2, 4, 1), 3: (2, 4, 1)}


@pytest.mark.parametrize("stage", [2, 3])
def test_resumed_on_the_same_and_on_other_processes(tmp_path: Path, stage: int) -> None:
    """From an emptied disk: exactly the same losses on two processes, within 1e-3 on four and on one."""
    reference = losses_of(HfRun(stage=stage))
    # at stage 3 the universal form is made while it is sent, and lies nowhere here (adr/0093)
    with node(tmp_path, local="forms = []" if stage == 3 else "", remote=UNIVERSAL_TOO) as here:
        copy_checkpoint(tree_of(HfRun(stage=stage)), "checkpoint-4", here.save_dir)
        assert here.comes_to_rest(), (here.problems(), here.log.read_text()[-3000:])
        assert "checkpoint-4~g1" in here.commits("universal")
        for processes in CHANGES[stage]:
            shutil.rmtree(here.save_dir)
            here.save_dir.mkdir()
            done = here.ckptd("resume", here.job_file, "--world-size", processes)
            assert done.returncode == 0, done.stderr
            path = here.save_dir / "checkpoint-4"
            assert done.stdout.strip() == str(path)
            assert not (here.save_dir / "latest").exists()
            is_universal = processes != 2
            if processes != 1:
                assert_restored_alike(here, path, tmp_path / f"else{processes}", processes)
            assert (path / "latest_universal").exists() is is_universal
            assert ("load_universal" in done.stderr) is is_universal
            run = HfRun(
                stage=stage, processes=processes, steps=7, resume=path, universal=is_universal, init_seed=11
            )
            losses = train(run, here.save_dir, tmp_path, name=f"on{processes}")
            for step in (5, 6, 7):
                if is_universal:
                    assert abs(losses[step] - reference[step]) < 1e-3, (processes, step)
                else:
                    assert losses[step] == reference[step], (processes, step)


def test_universal_is_put_beside_the_shards_that_are_here(tmp_path: Path) -> None:
    """Nothing is fetched; the folder keeps its times, because the Trainer rotates by them.

    What was put in is no save of the trainer's, not even for a daemon that remembers nothing; it goes with
    the folder.
    """
    with node(tmp_path, 'existing = "all"', "forms = []\nsave_total_limit = 1", 'forms = ["zero"]') as here:
        copy_checkpoint(tree_of(HfRun(stage=2)), "checkpoint-2", here.save_dir)
        here.once()
        folder = here.save_dir / "checkpoint-2"
        before = folder.stat().st_mtime_ns
        done = here.ckptd("resume", here.job_file, "--world-size", 4)
        assert done.returncode == 0, done.stderr
        assert "fetch" not in done.stderr
        assert folder.stat().st_mtime_ns == before
        assert (folder / "latest_universal").read_text() == "global_step2_universal"
        proven = here.ckptd("verify", here.job_file, "--read-data")
        assert (proven.returncode, proven.stderr) == (0, "")
        # no universal form is committed: it is converted in the other directory, beside the shards
        assert_restored_alike(here, folder, tmp_path / "else", 4)
        again = here.ckptd("resume", here.job_file, "--world-size", 4)
        assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
        (here.state / "journal.db").unlink()
        assert here.once() == 0
        assert set(here.commits()) == {"checkpoint-2~g1"}
        assert not here.problems()
        train(HfRun(steps=4, resume=folder), here.save_dir, tmp_path, name="on")
        assert here.once() == 0
        assert set(here.commits()) == {"checkpoint-2~g1", "checkpoint-4~g1"}
        assert here.local_tags() == {"checkpoint-4"}
        assert not here.problems()
        assert "global_step2_universal" not in "".join(p.name for p in (here.nas / "checkpoint-2").iterdir())
