"""Checkpoints that no job protects are recognised by their names, and nothing else is (P17)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from ckptd.base import files
from ckptd.config.quantities import parse_share
from ckptd.conversion.remote.ends import resolve_source
from ckptd.core.model.other_layouts import NOTHING_DECLARED, DeclaredSave
from ckptd.core.model.unprotected import Kind, warn_unprotected
from ckptd.daemon.intake.listing import list_save_dir
from ckptd.daemon.state.problems import Problems
from ckptd.errors import NotFoundError, RefusedError
from ckptd.maintenance.inspection import inspect_folder as inspect
from ckptd.maintenance.status.verdict import Life, exit_code
from ckptd.maintenance.status.words import headline
from ckptd.storage.local.probe import probe_save_dir
from ckptd.storage.local.scan import scan
from tests.support.recover_scene import Scene

if TYPE_CHECKING:
    from ckptd.core.model.listing import SaveDirListing

HUGGINGFACE = (
    "trainer_state.json",
    "model.safetensors",
    "scheduler.pt",
    "rng_state.pth",
    "training_args.bin",
)
SHARDS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
METADATA = ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp")


def lay(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")


def inside(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


def seen(root: Path, trainer: str = "auto") -> SaveDirListing:
    with files.opened_dir(root) as fd:
        return scan(fd, trainer)


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (
            inside("run-0/checkpoint-8", *HUGGINGFACE, "optimizer.pt"),
            {"run-0/checkpoint-8": Kind.HUGGINGFACE},
        ),
        (inside("best", *HUGGINGFACE, "optimizer.pt"), {"best": Kind.HUGGINGFACE}),
        (inside("a/checkpoint-8", *HUGGINGFACE, *METADATA), {"a/checkpoint-8": Kind.TORCH_SHARDS}),
        (inside("checkpoint-8", *HUGGINGFACE, "pytorch_model_fsdp.bin"), {"checkpoint-8": Kind.TORCH_SHARDS}),
        (inside("a/step-10", ".metadata", "__0_0.distcp", "__1_0.distcp"), {"a/step-10": Kind.TORCH_SHARDS}),
        (
            inside("a/checkpoint_0", "model.safetensors", "optimizer.bin", "random_states_0.pkl"),
            {"a/checkpoint_0": Kind.ACCELERATE},
        ),
        (inside("iter_0000010", "mp_rank_00/model_optim_rng.pt"), {"iter_0000010": Kind.MEGATRON}),
        (
            inside("global_step5", "mp_rank_00_model_states.pt-0.2", "mp_rank_00_model_states.pt-1.2"),
            {"global_step5": Kind.FAST_WRITER},
        ),
        (("checkpoint_100.pt",), {"checkpoint_100.pt": Kind.TORCH_FILE}),
        (("epoch_3.pth", "ckpt.pt"), {"epoch_3.pth": Kind.TORCH_FILE, "ckpt.pt": Kind.TORCH_FILE}),
        (("checkpoint.pth.tar",), {"checkpoint.pth.tar": Kind.TORCH_FILE}),
        (
            inside("lightning_logs/version_0/checkpoints", "epoch=0.ckpt"),
            {"lightning_logs/version_0/checkpoints/epoch=0.ckpt": Kind.LIGHTNING},
        ),
        (inside("epoch1/step2", *SHARDS), {"epoch1/step2": Kind.ZERO}),
        (inside("run-0/checkpoint-8/global_step8", *SHARDS), {"run-0/checkpoint-8": Kind.ZERO}),
        (inside("_actor/global_step8", *SHARDS), {"_actor/global_step8": Kind.ZERO}),
        (inside("logs/e=0.ckpt/checkpoint", *SHARDS), {"logs/e=0.ckpt": Kind.ZERO}),
        (SHARDS, {"": Kind.ZERO}),
        ((*HUGGINGFACE, "optimizer.pt"), {"": Kind.HUGGINGFACE}),
        (("latest", *HUGGINGFACE, *inside("global_step8", *SHARDS)), {"": Kind.ZERO}),
        ((".metadata", "__0_0.distcp"), {"": Kind.TORCH_SHARDS}),
    ],
)
def test_what_nothing_protects_is_recognised(
    tmp_path: Path, paths: tuple[str, ...], found: dict[str, Kind]
) -> None:
    lay(tmp_path, *paths)
    listing = seen(tmp_path)
    assert {one.path: one.kind for one in listing.unprotected} == found
    assert listing.folders == ()


@pytest.mark.parametrize(
    "paths",
    [
        inside("runs/Nov25_12-11-59_host", "events.out.tfevents.1764072719.host.1.0"),
        inside("best_model", "model.safetensors", "config.json"),
        ("model.safetensors", "config.json", "tokenizer.json", "training_args.bin", "trainer_state.json"),
        inside("export", "pytorch_model.bin", "optimizer.txt"),
        ("model.pt", "pytorch_model.bin", "model_final.pth", "train.log", "optimizer.pt", "stepper.py"),
        inside("logs", "step_10.log", "checkpoint.log"),
        inside("checkpoint-8", "trainer_state.json", "model.safetensors", "training_args.bin"),
        inside("checkpoint-8", "model.safetensors"),
        inside("global_step8", *SHARDS),
        inside(
            "checkpoint-8",
            "trainer_state.json",
            "latest",
            "rng_state_0.pth",
            *inside("global_step8", *SHARDS),
        ),
        inside("global_step8_universal", "mp_rank_00_model_states.pt", "zero/w/fp32.pt"),
        inside("checkpoint-8", *inside("global_step8", *SHARDS), "global_step8_universal/zero/w/fp32.pt"),
        inside("old", "global_step8_universal/mp_rank_00_model_states.pt"),
    ],
)
def test_what_lies_in_ordinary_save_dirs_is_not(tmp_path: Path, paths: tuple[str, ...]) -> None:
    lay(tmp_path, *paths)
    assert seen(tmp_path).unprotected == ()


def test_what_the_trainer_saves_last_beside_its_checkpoints_is_none_of_them(tmp_path: Path) -> None:
    """Stage 3 without gathering: `trainer.save_model(output_dir)` leaves a whole global_stepN."""
    lay(tmp_path, *inside("checkpoint-4", *HUGGINGFACE, *inside("global_step4", *SHARDS)))
    lay(tmp_path, "latest", "training_args.bin", "config.json", *inside("global_step4", *SHARDS))
    (tmp_path / "latest").write_text("global_step4")
    listing = seen(tmp_path)
    assert [folder.tag for folder in listing.folders] == ["checkpoint-4"]
    assert listing.loose == {"global_step4"}
    assert "global_step4" in listing.foreign
    (said,) = warn_unprotected(listing.unprotected, "/data", listing.latest, ["checkpoint-4"])
    assert not said.is_urgent, "what the Trainer resumes from is protected"
    assert "the Trainer cannot resume from" in said.text
    assert seen(tmp_path, "deepspeed").loose == frozenset(), "a job file may say otherwise"


@pytest.mark.parametrize(
    ("holder", "wanted"),
    [
        ("run-0/checkpoint-8/global_step8", "/data/run-*"),
        ("epoch1/step2", "/data/epoch*"),
        ("_actor/global_step5", "/data/_actor"),
    ],
)
def test_where_checkpoints_lie_deeper_the_folder_to_name_is_said(
    tmp_path: Path, holder: str, wanted: str
) -> None:
    lay(tmp_path, *inside(holder, *SHARDS))
    (said,) = warn_unprotected(seen(tmp_path).unprotected, "/data", None, [])
    assert f'save_dir = "{wanted}"' in said.next_step
    assert said.is_urgent


def test_a_tag_folder_given_as_save_dir_is_told_its_parent(tmp_path: Path) -> None:
    lay(tmp_path, *SHARDS)
    (said,) = warn_unprotected(seen(tmp_path).unprotected, "/data/run/global_step8", None, [])
    assert said.next_step == "name its parent as save_dir: /data/run"


class Watched:
    def __init__(self, root: Path) -> None:
        self.dir = root
        self.job = SimpleNamespace(
            state=None,
            problems=Problems(),
            config=SimpleNamespace(trainer="auto", save_dir=root, declared=NOTHING_DECLARED),
        )

    def look(self) -> list[tuple[str, str]]:
        with files.opened_dir(self.dir) as fd:
            list_save_dir(self.job.config, self.job.problems, None, fd)
        return [(p.code, p.severity) for p in self.job.problems.all()]


def test_the_daemon_says_it_while_it_lies_there_and_status_is_not_safe(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    lay(tmp_path, "epoch_8.pt")
    assert watched.look() == [("unprotected-save", "attention")]
    (first,) = watched.job.problems.all()
    lay(tmp_path, "epoch_12.pt")
    assert watched.look() == [("unprotected-save", "attention")], "one line for all of a kind"
    (then,) = watched.job.problems.all()
    assert then.since == first.since, "it is as old as the first one"
    assert then.text.startswith("epoch_12.pt (and 1 more) is a checkpoint in one torch.save file")
    assert then.next_step.endswith('[layout] files = "epoch_*.pt"')
    problem = {
        "code": then.code,
        "severity": then.severity,
        "text": then.text,
        "since": "2026-01-01T00:00:00Z",
    }
    job = {"state": "attention", "safe": None, "problems": [problem], "opt_outs": [], "checkpoints": []}
    assert headline(job, Life(), 0.0).startswith("NOT SAFE  ")
    assert exit_code([job], is_alive=True) == 1
    for name in ("epoch_8.pt", "epoch_12.pt"):
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    assert watched.look() == [], "it ends with its cause"


@pytest.mark.parametrize(("name", "severity"), [("ckpt_4.pt", "note"), ("ckpt_9.pt", "attention")])
def test_beside_protected_checkpoints_only_a_newer_one_is_an_alarm(
    tmp_path: Path, name: str, severity: str
) -> None:
    scene = Scene(tmp_path)
    scene.save(5)
    lay(scene.save_dir, name)
    assert Watched(scene.save_dir).look() == [("unprotected-save", severity)]


def test_files_of_lightning_and_files_that_are_named_are_checkpoints(tmp_path: Path) -> None:
    lay(tmp_path, "last.ckpt", "epoch=1-step=20.ckpt", "model_20.pt", "model.json")
    with files.opened_dir(tmp_path) as fd:
        listing = scan(fd, declared=DeclaredSave(files="model_*.pt"))
        other = scan(fd, "deepspeed")
    assert [one.tag for one in listing.folders] == ["epoch=1-step=20.ckpt", "last.ckpt", "model_20.pt"]
    assert listing.unprotected == ()
    assert [one.path for one in listing.extras] == ["model.json"]
    assert {one.kind for one in other.unprotected} == {Kind.LIGHTNING}
    (said,) = warn_unprotected(other.unprotected, "/data", None, [])
    assert said.next_step.startswith('set trainer = "auto"')


@pytest.mark.parametrize(
    ("paths", "is_said"),
    [
        (inside("ckpt_100", "weights.npz"), True),
        (inside("step-5", "d/manifest.ocdbt"), True),
        (inside("epoch_3", "sample.png", "metrics.txt"), False),
        (inside("checkpoint-8", "model.safetensors"), False),
        (inside("runs", "weights.npz"), False),
    ],
)
def test_a_folder_of_unknown_layout_is_said_once_nobody_writes_there(
    tmp_path: Path, paths: tuple[str, ...], is_said: bool
) -> None:
    lay(tmp_path, *paths)
    assert seen(tmp_path).unprotected == (), "it may be on its way"
    for path in paths:
        os.utime(tmp_path / path, (1, 1))
    found = seen(tmp_path).unprotected
    assert [one.kind for one in found] == ([Kind.UNKNOWN] if is_said else [])
    if is_said:
        (said,) = warn_unprotected(found, "/data", None, [])
        assert said.is_urgent
        assert "[layout] complete_when" in said.next_step
        with files.opened_dir(tmp_path) as fd:
            listing = scan(fd, declared=DeclaredSave(marker="DONE"))
        assert [one.tag for one in listing.folders] == [paths[0].partition("/")[0]]
        assert listing.unprotected == ()


def test_check_fails_and_inspect_names_it(tmp_path: Path) -> None:
    lay(tmp_path, *inside("epoch1/step2", *SHARDS), "latest")
    (tmp_path / "latest").write_text("epoch1/step2")
    found = {f.what: f for f in probe_save_dir(tmp_path, parse_share("1%"), writes=False)}
    assert (found["layout"].verdict, found["layout"].exit_code) == ("fail", 65)
    assert "epoch1/step2, which latest names, lies one folder deeper" in found["layout"].text
    with pytest.raises(NotFoundError, match="epoch1/step2, which latest names"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("paths", "name", "words"),
    [
        (("last.ckpt",), "last.ckpt", "a Lightning checkpoint in one file.* trainer.fit"),
        (("model_5.pt",), "model_5.pt", "a checkpoint in one torch.save file.* torch.load"),
        (inside("checkpoint-8", *HUGGINGFACE, "optimizer.pt"), "checkpoint-8", "Hugging Face.*resume_from"),
    ],
)
def test_convert_names_the_layout_of_which_it_makes_nothing(
    tmp_path: Path, paths: tuple[str, ...], name: str, words: str
) -> None:
    lay(tmp_path, *paths)
    with pytest.raises(RefusedError) as caught:
        resolve_source(tmp_path / name)
    assert re.search(words, f"{caught.value.message} {caught.value.hint}")
