"""Layouts of trainers, judged by names and remembered identities alone (docs/adr/0050)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import Memory, State, judge
from ckptd.core.completeness.markers import judge_markers
from ckptd.core.model.facts import Archive, FileFacts, TrainerFacts
from ckptd.core.model.layouts import Trainer, added_by_us, missing_weights
from ckptd.core.model.listing import FolderListing, ListedFile
from ckptd.core.model.other_layouts import layout_of, other_layout_of

RANK0 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
QUIET = Context(settle_seconds=1, quiet_seconds=100, is_in_flight=False, save_spread_seconds=60)


@pytest.mark.parametrize(
    ("tag", "paths", "expected"),
    [
        ("checkpoint-2", [f"global_step2/{MODEL}"], (Trainer.HUGGINGFACE, ("global_step2",))),
        (
            "checkpoint-2",
            [f"global_step1/{MODEL}", f"global_step2/{MODEL}"],
            (Trainer.HUGGINGFACE, ("global_step2",)),
        ),
        ("state", [f"pytorch_model/{MODEL}"], (Trainer.ACCELERATE, ("pytorch_model",))),
        (
            "checkpoint-2",
            [f"global_step2/{MODEL}", f"global_step2_universal/{MODEL}"],
            (Trainer.HUGGINGFACE, ("global_step2",)),
        ),
        ("last.ckpt", [f"checkpoint/{MODEL}", "latest"], (Trainer.LIGHTNING, ("checkpoint",))),
        # a run that lies in it, or shards deeper down, are nobody's
        ("last.ckpt", [f"checkpoint/checkpoint/{MODEL}"], (Trainer.DEEPSPEED, ("",))),
        ("checkpoint", [MODEL], (Trainer.DEEPSPEED, ("",))),
        ("checkpoint-2", ["model.safetensors", "trainer_state.json"], (Trainer.HUGGINGFACE, ())),
        ("checkpoint-2", ["adapter_model.safetensors", "trainer_state.json"], (Trainer.HUGGINGFACE, ())),
        ("checkpoint-2", ["model.safetensors"], (Trainer.DEEPSPEED, ("",))),
        ("final", ["model.safetensors", "trainer_state.json"], (Trainer.DEEPSPEED, ("",))),
        # what a rotation has not yet removed of a full checkpoint is no model alone
        ("checkpoint-2", ["model.safetensors", "trainer_state.json", "latest"], (Trainer.DEEPSPEED, ("",))),
        (
            "checkpoint-2",
            ["model.safetensors", "trainer_state.json", "rng_state_1.pth"],
            (Trainer.DEEPSPEED, ("",)),
        ),
    ],
)
def test_whose_folder_it_is(tag: str, paths: list[str], expected: tuple[Trainer, tuple[str, ...]]) -> None:
    assert layout_of(tag, paths) == expected


def test_weights_that_are_absent_are_named() -> None:
    shards = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = "model.safetensors.index.json"
    assert missing_weights(["model.safetensors"]) is None
    assert missing_weights([*shards, index]) is None
    assert missing_weights(shards) == index
    assert missing_weights([shards[0], shards[2], index]) == shards[1]


def test_only_a_universal_form_that_says_so_is_ours() -> None:
    theirs = ["global_step2_universal/zero/w/fp32.pt", "latest_universal"]
    ours = [*theirs, "global_step2_universal/ckptd.json"]
    assert added_by_us([*theirs, f"global_step2/{MODEL}"], ("global_step2",)) == frozenset()
    assert added_by_us([*ours, f"global_step2/{MODEL}"], ("global_step2",)) == frozenset(ours)
    assert added_by_us(["ckptd.json", "latest_universal"], ("",)) == frozenset()


def identity(number: int) -> FileIdentity:
    return FileIdentity(dev=1, ino=number, size_bytes=10, mtime_ns=number, ctime_ns=number)


def folder(paths: Iterable[str], tag: str = "checkpoint-2", start: int = 0) -> FolderListing:
    files = tuple(ListedFile(path=p, identity=identity(start + len(p))) for p in sorted(paths))
    trainer, roots = layout_of(tag, (f.path for f in files))
    return FolderListing(
        tag=tag,
        folder=FolderIdentity(dev=1, ino=2),
        files=files,
        trainer=trainer,
        roots=roots,
        other_layout=other_layout_of(tag, [f.path for f in files]),
    )


@pytest.mark.parametrize(("archive", "reason"), [(Archive.EMPTY, None), (Archive.OTHER, "it ends early")])
@pytest.mark.parametrize(
    ("tag", "name"), [("checkpoint-2", "rng_state_1.pth"), ("global_step2", "client.pt")]
)
def test_a_file_without_its_bytes_is_no_whole_save(
    tag: str, name: str, archive: Archive, reason: str | None
) -> None:
    """A power cut left an empty random state beside whole shards; the trainer could not load it."""
    found = folder([f"global_step2/{MODEL}", f"global_step2/{RANK0}", "trainer_state.json", name], tag)
    facts = {name: FileFacts(path=name, bytes=0, archive=archive, reason=reason)}
    marks = judge_markers(found, facts, 2, 100.0, frozenset(), is_in_flight=False)
    assert (marks.waits_for, marks.is_patient) == (reason or f"{name} is empty", False)


@pytest.mark.parametrize(("seconds", "is_in_flight"), [(30, True), (30, False), (9, True), (-30, True)])
def test_the_end_of_a_save_is_no_older_than_its_shards(seconds: int, is_in_flight: bool) -> None:
    """The daemon was away for the first save of the tag, and came back in the midst of the second."""
    shards = [f"global_step2/{MODEL}", f"global_step2/{RANK0}"]
    found = folder([*shards, "trainer_state.json", "rng_state.pth"])
    files = tuple(
        replace(file, identity=replace(file.identity, mtime_ns=file.identity.mtime_ns + seconds * 10**9))
        if file.path in shards
        else file
        for file in found.files
    )
    name, state = "trainer_state.json", TrainerFacts(global_step=2)
    facts = {name: FileFacts(path=name, bytes=10, archive=Archive.OTHER, trainer=state)}
    marks = judge_markers(replace(found, files=files), facts, 1, 30.0, frozenset(), is_in_flight=is_in_flight)
    is_older = is_in_flight and seconds == 30
    assert (marks.waits_for or "").startswith("trainer_state.json is older than") == is_older
    assert marks.is_patient == is_older


FULL = [f"global_step2/{MODEL}", f"global_step2/{RANK0}", "model.safetensors", "trainer_state.json", "latest"]


@pytest.mark.parametrize(
    "left",
    [
        FULL[1:],
        FULL[:1],
        [name for name in FULL if name != "trainer_state.json"],
        ["model.safetensors", "trainer_state.json"],
    ],
)
def test_what_a_rotation_left_is_no_torn_save(left: list[str]) -> None:
    memory = Memory(shards={f.path: f.identity for f in folder(FULL).files})
    verdict = judge(folder(left), {}, memory, QUIET)
    assert verdict.state is State.LEFTOVER
    assert verdict.reason is not None
    assert "being removed" in verdict.reason


def test_a_new_shard_is_no_leftover() -> None:
    memory = Memory(shards={f.path: f.identity for f in folder(FULL).files})
    again = folder(FULL[1:], start=1000)
    assert judge(again, {}, memory, QUIET).state is not State.LEFTOVER


def facts(listing: FolderListing, step: int) -> dict[str, FileFacts]:
    found = {}
    for file in listing.files:
        state = TrainerFacts(global_step=step) if file.path == "trainer_state.json" else None
        found[file.path] = FileFacts(path=file.path, bytes=10, archive=Archive.OTHER, trainer=state)
    return found


def test_a_model_alone_is_complete_with_all_its_weights_and_its_own_state() -> None:
    paths = ["trainer_state.json", "model.safetensors.index.json", "config.json"]
    paths += [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    whole = folder(paths)
    verdict = judge(whole, facts(whole, 2), None, QUIET)
    assert verdict.state is State.COMPLETE
    assert verdict.grid is not None
    assert verdict.grid.is_model_only
    assert verdict.step == 2
    assert judge(whole, facts(whole, 1), None, QUIET).state is State.INCOMPLETE
    cut = folder(paths[:-1])
    missing = judge(cut, facts(cut, 2), None, QUIET)
    assert (missing.state, missing.reason) == (State.INCOMPLETE, f"missing: {paths[-1]}")
