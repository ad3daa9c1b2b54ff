"""Layouts of Lightning and of Megatron-DeepSpeed, written by our own hand around real DeepSpeed shards.

Neither trainer is installed here: what they write beside the shards is read from their sources
(docs/formats.md §1.2), what DeepSpeed does with the folder that they give it is tried with DeepSpeed itself.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, Node, node, shards_in_order
from tests.support.real import Resume, losses_of, prepare, resume, save_dir_of

pytestmark = pytest.mark.real

FULL = bool(os.environ.get("CKPTD_FULL"))
"""Also loads them with DeepSpeed and trains on."""
STEP = 2
STEPS = 2
UNIVERSAL_TOO = 'forms = ["zero", "universal"]'


def save_as_lightning(here: Node, tag: str, step: int = STEP) -> Path:
    """`DeepSpeedStrategy.save_checkpoint`: the engine's save under the tag `checkpoint` in `<name>.ckpt`."""
    prepare([RUN])
    folder = here.save_dir / tag
    shards = folder / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shards.mkdir(parents=True)
    for path in shards_in_order(save_dir_of(RUN) / f"global_step{step}"):
        shutil.copyfile(path, shards / path.name)
    (folder / "latest").write_text("checkpoint")
    (folder / "zero_to_fp32.py").write_text("# DeepSpeed's\n")
    return folder


def manifest_of(here: Node, key: str) -> dict[str, object]:
    """The node manifest that a COMMIT quotes."""
    found: dict[str, object] = json.loads(
        (here.nas / here.commits()[key]["manifests"][0]["key"]).read_bytes()
    )
    return found


def test_lightning_is_committed_resumed_and_restored_on_other_ranks(tmp_path: Path) -> None:
    """`<name>.ckpt/checkpoint`: the same folder back on as many ranks, one of ours on another number."""
    tag = "epoch=0-step=2.ckpt"
    with node(tmp_path, 'trainer = "lightning"', "forms = []", UNIVERSAL_TOO) as here:
        saved = save_as_lightning(here, tag)
        (here.save_dir / "hparams.yaml").write_text("lr: 1\n")
        assert here.once() == 0, here.log.read_text()[-3000:]
        assert set(here.commits()) == set(here.commits("universal")) == {f"{tag}~g1"}
        assert here.commits()[f"{tag}~g1"]["step"] == STEP
        assert manifest_of(here, f"{tag}~g1")["writer"]["trainer"] == "lightning"  # type: ignore[index]
        assert not (here.save_dir / "latest_universal").exists()

        written = {p.relative_to(saved): p.read_bytes() for p in saved.rglob("*") if p.is_file()}
        shutil.rmtree(here.save_dir)
        here.save_dir.mkdir()
        done = here.ckptd("resume", here.job_file, "--world-size", 2)
        assert (done.returncode, done.stdout.strip()) == (0, str(saved)), done.stderr
        assert {p.relative_to(saved): p.read_bytes() for p in saved.rglob("*") if p.is_file()} == written
        assert (here.save_dir / "hparams.yaml").exists()

        shutil.rmtree(here.save_dir)
        here.save_dir.mkdir()
        done = here.ckptd("resume", here.job_file, "--world-size", 1)
        place = here.save_dir / "_ckptd" / "derived" / "accelerate" / tag
        assert (done.returncode, done.stdout.strip()) == (0, str(place)), done.stderr
        assert "ckpt_path" in done.stderr
        assert not (here.save_dir / tag).exists(), "nothing is put into a folder of the trainer's"
        again = here.ckptd("resume", here.job_file, "--world-size", 1)
        assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
        assert "fetch" not in again.stderr

        elsewhere = tmp_path / "elsewhere"
        command = ("restore", here.job_file, "--to", elsewhere, "--world-size", 1)
        done = here.ckptd(*command)
        restored = elsewhere / "_ckptd" / "derived" / "accelerate" / tag
        assert (done.returncode, done.stdout.strip()) == (0, str(restored)), done.stderr
        assert "fetch" not in here.ckptd(*command).stderr

        # Lightning gives DeepSpeed the folder and no tag; it insists on a folder `checkpoint` in it
        for folder in (place, restored):
            assert (folder / "checkpoint" / "zero").is_dir()
            assert (folder / "latest_universal").read_text() == "checkpoint"
        if FULL:
            reference = losses_of(RUN)
            runs = [Resume(recipe=RUN, save_dir=f, tag=None, steps=STEPS) for f in (place, restored)]
            for losses in resume(1, runs, tmp_path):
                assert all(abs(losses[s] - reference[s]) < 1e-3 for s in range(STEP + 1, STEP + STEPS + 1))


def test_lightning_with_a_constant_name(tmp_path: Path) -> None:
    """`last.ckpt` saved again is a generation of its own; universal is made of the shards that lie here."""
    with node(tmp_path, "", 'forms = ["universal"]', 'forms = ["zero"]') as here:
        save_as_lightning(here, "last.ckpt", 2)
        assert here.once() == 0, here.log.read_text()[-3000:]
        save_as_lightning(here, "last.ckpt", 4)
        assert here.once() == 0, here.log.read_text()[-3000:]
        assert [c["step"] for c in here.commits().values()] == [2, 4]
        assert not here.problems()
        done = here.ckptd("resume", here.job_file, "--world-size", 4)
        place = Path(done.stdout.strip())
        assert done.returncode == 0, done.stderr
        assert (place / "latest_universal").read_text() == "checkpoint"
        assert (place / "zero_to_fp32.py").exists()
        assert "fetch" not in done.stderr
        assert here.once() == 0
        assert len(here.commits()) == 2


def test_megatron_deepspeed_with_its_tracker(tmp_path: Path) -> None:
    """DeepSpeed's own folders and `latest`, which it loads by; the tracker travels along, not followed."""
    with node(tmp_path, 'trainer = "megatron"', "", UNIVERSAL_TOO) as here:
        tracker = here.save_dir / "latest_checkpointed_iteration.txt"
        here.save(2)
        (here.save_dir / "state").mkdir()  # what is no save of DeepSpeed's own is left alone
        save_as_lightning(here, "other.ckpt")
        tracker.write_text("7")
        assert here.once() == 0, here.log.read_text()[-3000:]
        assert set(here.commits()) == {"global_step2~g1"}
        assert manifest_of(here, "global_step2~g1")["writer"]["trainer"] == "deepspeed"  # type: ignore[index]
        shutil.rmtree(here.save_dir)
        here.save_dir.mkdir()
        done = here.ckptd("resume", here.job_file, "--world-size", 2)
        assert (done.returncode, done.stdout.strip()) == (0, str(here.save_dir / "global_step2")), done.stderr
        assert (here.save_dir / "latest").read_text() == "global_step2"
        assert (here.nas / "global_step2" / "_extra" / tracker.name).read_text() == "7"
        assert not tracker.exists()
