"""Accelerate's `save_state` and `load_state`, for real, beside a real daemon (docs/adr/0050).

One folder that is saved over and over, in place, becomes one generation a save; folders that Accelerate names
itself are checkpoints like any other; both are resumed, on as many processes and on others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import Node, node
from tests.support.hf import (
    ACCELERATE_TREES,
    AccelerateRun,
    copy_checkpoint,
    losses_of,
    prepare,
    start,
    train,
    tree_of,
)

pytestmark = pytest.mark.real

UNIVERSAL_TOO = 'forms = ["zero", "universal"]'


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def remote_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a ZeRO form in the NAS, without what travelled along or was derived."""
    return {
        str(path.relative_to(folder)): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.endswith("_universal") for p in path.relative_to(folder).parts)
    }


def noted_hashes(notes: Path, name: str) -> dict[str, str]:
    """What the trainer left, by its own witness."""
    return {path: left["sha256"] for path, left in json.loads((notes / f"{name}.json").read_text()).items()}


@pytest.fixture(scope="module", autouse=True)
def trees() -> None:
    """All cached trees in one start."""
    prepare(ACCELERATE_TREES)


def test_constant_name_saved_in_place(tmp_path: Path) -> None:
    """Each save that is left alone until its COMMIT is a generation of its own, known by (name, step)."""
    notes = tmp_path / "notes"
    with node(tmp_path, local="", remote=UNIVERSAL_TOO) as here:
        here.start()
        run = AccelerateRun(waits_for=here.nas / "_ckptd" / "commits")
        training = start(run, here.save_dir, tmp_path, notes=notes)
        for generation, step in ((1, 2), (2, 4), (3, 6)):
            here.wait_committed(f"state~g{generation}", 60)
            assert here.commits()[f"state~g{generation}"]["step"] == step
        training.finish()
        assert len(here.commits()) == 3
        for folder, step in (("state", 2), ("state.g2", 4), ("state.g3", 6)):
            assert remote_hashes(here.nas / folder) == noted_hashes(notes, f"state@{step}"), folder
        here.wait("no problem", lambda: here.status()["state"] == "ok" and not here.problems(), 20)
        here.wait("safe", lambda: here.status()["safe"]["step"] == 6)
        assert here.checkpoint("state")["step"] == 6
        listed = json.loads(here.ckptd("list", here.job_file, "--json").stdout)["remotes"][0]["checkpoints"]
        assert [(c["tag"], c["generation"], c["step"]) for c in listed] == [
            ("state", 1, 2),
            ("state", 2, 4),
            ("state", 3, 6),
        ]
        assert (here.nas / "latest").read_text() == "state.g3"
        assert not (here.save_dir / "latest").exists()


def test_saved_faster_than_committed(tmp_path: Path) -> None:
    """Over a slow link most saves are gone before they are sent: no COMMIT ever holds bytes of two."""
    notes = tmp_path / "notes"
    run = AccelerateRun(steps=6, save_steps=1, pause_seconds=0.7, slow_seconds=0.3)
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]\nbandwidth = "300KB/s"') as here:
        here.start()
        start(run, here.save_dir, tmp_path, notes=notes).finish()
        here.wait("the last save", lambda: any(c["step"] == 6 for c in here.commits().values()), 60)
        for key, commit in here.commits().items():
            folder = here.nas / commit["folder"]
            assert remote_hashes(folder) == noted_hashes(notes, f"state@{commit['step']}"), key


CHANGES = {2: ((4, False), (2, True)), 3: ((1, True),)}
"""Stage → (processes, whether save_dir is emptied before); all of them: CKPTD_FULL=1."""
if os.environ.get("CKPTD_FULL"):
    CHANGES = dict.fromkeys((2, 3), ((4, False), (2, True), (1, True)))


@pytest.mark.parametrize("stage", [2, 3])
def test_resumed_on_the_same_and_on_other_processes(tmp_path: Path, stage: int) -> None:
    """From an emptied disk, and once from what is here: `load_state` on the printed path goes on."""
    reference = losses_of(AccelerateRun(stage=stage))
    # at stage 3 the universal form is made while it is sent, and lies nowhere here (adr/0093)
    with node(tmp_path, local="forms = []" if stage == 3 else "", remote=UNIVERSAL_TOO) as here:
        tree = tree_of(AccelerateRun(stage=stage, steps=4, save_steps=4))
        copy_checkpoint(tree, "state", here.save_dir)
        assert here.comes_to_rest(), (here.problems(), here.log.read_text()[-3000:])
        assert "state~g1" in here.commits("universal")
        saved = {p.name for p in (here.save_dir / "state").iterdir()}
        for processes, is_emptied in CHANGES[stage]:
            if is_emptied:
                shutil.rmtree(here.save_dir)
                here.save_dir.mkdir()
            is_universal = processes != 2
            done = here.ckptd("resume", here.job_file, "--world-size", processes)
            assert done.returncode == 0, done.stderr
            path = Path(done.stdout.strip())
            place = "_ckptd/derived/accelerate/state" if is_universal else "state"
            assert path == here.save_dir / place
            assert ("load_state" in done.stderr) is is_universal
            again = here.ckptd("resume", here.job_file, "--world-size", processes)
            assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
            assert "fetch" not in again.stderr
            assert "convert" not in again.stderr
            run = AccelerateRun(
                stage=stage,
                processes=processes,
                save_steps=100,
                resume=path,
                universal=is_universal,
                init_seed=11,
            )
            if not is_emptied:
                assert {p.name for p in (here.save_dir / "state").iterdir()} == saved, "nothing was put there"
            losses = train(run, here.save_dir, tmp_path, name=f"on{processes}")
            for step in (5, 6):
                if is_universal:
                    assert abs(losses[step] - reference[step]) < 1e-3, (processes, step)
                else:
                    assert losses[step] == reference[step], (processes, step)


def automatic(here: Node) -> Node:
    """Accelerate makes `<project>/checkpoints` and names what lies in it; nothing of ours may lie there."""
    here.save_dir = here.root / "nvme" / "checkpoints"
    here.save_dir.mkdir()
    here.state = here.root / "nvme" / "_ckptd.checkpoints" / "state"
    here.write_job()
    return here


@pytest.mark.full
def test_automatic_naming_with_a_limit_of_its_own(tmp_path: Path) -> None:
    """Accelerate sorts all names by number and removes the first: one of ours would kill the training."""
    notes = tmp_path / "notes"
    run = AccelerateRun(name=None, limit=2, steps=6, pause_seconds=1.8)
    with node(tmp_path, local="", remote=UNIVERSAL_TOO) as bare:
        here = automatic(bare)
        here.start()
        losses = start(run, here.save_dir, tmp_path, notes=notes).finish()
        for number, step in enumerate((2, 4, 6)):
            here.wait_committed(f"checkpoint_{number}~g1", 40)
            assert here.commits()[f"checkpoint_{number}~g1"]["step"] == step
            tag = f"checkpoint_{number}"
            assert remote_hashes(here.nas / tag) == noted_hashes(notes, f"{tag}@{step}")
        assert {p.name for p in here.save_dir.iterdir()} == {"checkpoint_1", "checkpoint_2"}
        here.wait("the universal form", lambda: "checkpoint_2~g1" in here.commits("universal"), 30)
        here.wait("no problem", lambda: here.status()["state"] == "ok" and not here.problems(), 20)
        shown = here.ckptd("status", here.save_dir)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "● SAFE  step 6" in shown.stdout
        assert here.stop() == 0
        shutil.rmtree(here.root / "nvme")
        (here.root / "nvme").mkdir()
        done = here.ckptd("resume", here.job_file, "--world-size", 2)
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.strip())
        assert path == here.save_dir / "checkpoint_2"
        assert {p.name for p in here.save_dir.iterdir()} == {"checkpoint_2"}
        done = here.ckptd("resume", here.job_file, "--world-size", 1)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()) == here.state.parent / "derived" / "accelerate" / "checkpoint_2"
        here.write_job(local="forms = []\nsave_total_limit = 1")
        here.start()
        again = AccelerateRun(name=None, steps=8, resume=path)
        assert min(start(again, here.save_dir, tmp_path, name="again").finish()) == 7
        assert max(losses) == 6
        here.wait_committed("checkpoint_3~g1", 40)
        here.wait("our own limit", lambda: {p.name for p in here.save_dir.iterdir()} == {"checkpoint_3"}, 30)
        assert not here.problems()
