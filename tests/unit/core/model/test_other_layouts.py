"""Checkpoints without ZeRO shards, by the names and facts of their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import PIPELINE_0, Memory, State, judge
from ckptd.core.model.facts import Archive, FileFacts, TrainerFacts
from ckptd.core.model.layouts import Role, parse_shard_name
from ckptd.core.model.listing import FolderListing, ListedFile
from ckptd.core.model.other_layouts import DeclaredSave, other_layout_of
from ckptd.core.model.shard_facts import ShardFacts
from ckptd.storage.local.scan import scan

HF = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "trainer_state.json",
)
ACCELERATE = ("model.safetensors", "optimizer.bin", "random_states_0.pkl")
TORCH = (".metadata", "__0_0.distcp", "__1_0.distcp")
HOUR_NS = 3600 * 10**9


def folder(tag: str, names: tuple[str, ...], times: dict[str, int] | None = None) -> FolderListing:
    listed = tuple(
        ListedFile(
            path=name,
            identity=FileIdentity(
                dev=1,
                ino=n,
                size_bytes=10,
                mtime_ns=(times or {}).get(name, 0),
                ctime_ns=(times or {}).get(name, 0),
            ),
        )
        for n, name in enumerate(sorted(names))
    )
    return FolderListing(
        tag=tag,
        folder=FolderIdentity(dev=1, ino=99),
        files=listed,
        roots=(),
        other_layout=other_layout_of(tag, list(names)),
    )


def facts(listing: FolderListing, step: int = 8) -> dict[str, FileFacts]:
    found = {}
    for file in listing.files:
        is_archive = file.path.endswith((".pt", ".pth", ".bin", ".pkl"))
        found[file.path] = FileFacts(
            path=file.path,
            bytes=10,
            archive=Archive.ZIP if is_archive else Archive.OTHER,
            fingerprint=file.path,
            parts=(("__0_0.distcp", 10), ("__1_0.distcp", 10)) if file.path == ".metadata" else None,
            trainer=TrainerFacts(global_step=step) if file.path == "trainer_state.json" else None,
        )
    return found


def verdict(
    listing: FolderListing, memory: Memory | None = None, **changes: object
) -> tuple[State, str | None]:
    context = Context(save_spread_seconds=60.0, **changes)  # type: ignore[arg-type]
    found = judge(listing, facts(listing), memory, context)
    return found.state, found.reason


@pytest.mark.parametrize(
    ("tag", "names", "layout"),
    [
        ("checkpoint-8", HF, "huggingface"),
        ("checkpoint-8", ACCELERATE, "accelerate"),
        ("step_8", ACCELERATE, "accelerate"),
        ("step-8", TORCH, "torch"),
        ("step_8", ("pytorch_model_fsdp_0_rank0.bin", "optimizer_0_rank0.bin", ACCELERATE[2]), "accelerate"),
        ("e=0-step=8.ckpt", (*TORCH, "meta.pt"), "torch"),
        ("checkpoint-8", ("unet/diffusion_pytorch_model.safetensors", *ACCELERATE[1:]), "accelerate"),
        ("best-8", HF, None),
        ("run", ("step-8/.metadata", "step-8/__0_0.distcp"), None),
        ("checkpoint-8", (*HF, "global_step8/mp_rank_00_model_states.pt"), None),
    ],
)
def test_recognised_by_names(tag: str, names: tuple[str, ...], layout: str | None) -> None:
    found = other_layout_of(tag, names)
    assert (found.name if found else None) == layout
    if layout is not None:
        assert verdict(folder(tag, names)) == (State.COMPLETE, None)


@pytest.mark.parametrize(("tag", "names"), [("checkpoint-8", HF), ("step_8", ACCELERATE), ("step-8", TORCH)])
def test_without_any_file_it_is_not_whole(tag: str, names: tuple[str, ...]) -> None:
    """But for the random states of the highest rank: how many there are, nothing tells."""
    for name in set(names) - {"rng_state_1.pth"}:
        left = folder(tag, tuple(other for other in names if other != name))
        if left.other_layout is not None:
            assert verdict(left)[0] is State.INCOMPLETE, name


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ((*TORCH,), "missing: meta.pt"),
        (
            ("pytorch_model_fsdp_0_rank0.bin", "optimizer_0_rank0.bin", "optimizer_0_rank1.bin"),
            "missing: pytorch_model_fsdp_0_rank1.bin",
        ),
    ],
)
def test_what_fsdp_of_lightning_and_of_accelerate_write_last(names: tuple[str, ...], missing: str) -> None:
    is_torch = ".metadata" in names
    random = () if is_torch else ("random_states_0.pkl", "random_states_1.pkl")
    found = folder("epoch=0-step=8.ckpt" if is_torch else "step_8", (*names, *random))
    assert verdict(found) == (State.INCOMPLETE, missing)


def test_files_of_two_saves_are_suspect_until_a_person_accepts_them() -> None:
    """No journal tells that the tag was saved before: the times do."""
    mixed = folder("step-8", TORCH, {"__0_0.distcp": 2 * HOUR_NS, ".metadata": 2 * HOUR_NS})
    state, reason = verdict(mixed)
    assert (state, "7200 s apart" in str(reason)) == (State.SUSPECT, True)
    marks = tuple(sorted((file.path, file.path) for file in mixed.shards))
    assert verdict(mixed, accepted=frozenset({marks}))[0] is State.COMPLETE


def test_a_file_that_is_added_later_makes_no_torn_save() -> None:
    """Merged weights beside the trainer's; what was sealed is as it was."""
    before = folder("checkpoint-8", HF)
    memory = Memory(shards={file.path: file.identity for file in before.shards})
    after = folder("checkpoint-8", (*HF, "pytorch_model.bin"), {"pytorch_model.bin": HOUR_NS // 3600})
    after = FolderListing(
        tag=after.tag,
        folder=after.folder,
        files=(*before.files, *(file for file in after.files if file.path == "pytorch_model.bin")),
        roots=(),
        other_layout=after.other_layout,
    )
    assert verdict(after, memory) == (State.COMPLETE, None)


def test_a_name_without_a_number_is_refused_and_left_where_it_is() -> None:
    assert verdict(folder("last", ACCELERATE)) == (
        State.REFUSED,
        "its name holds no number that tells its step",
    )


def stage_0(names: tuple[str, ...], **of_model: object) -> tuple[State, str | None]:
    listed = tuple(
        ListedFile(path=name, identity=FileIdentity(dev=1, ino=n, size_bytes=10, mtime_ns=0, ctime_ns=0))
        for n, name in enumerate(sorted(names))
    )
    listing = FolderListing(tag="global_step8", folder=FolderIdentity(dev=1, ino=99), files=listed)
    found = {}
    for file in listed:
        named = parse_shard_name(file.path)
        assert named is not None
        told = ShardFacts(zero_stage=0, dp_world_size=2, mp_world_size=1, global_steps=8, **of_model)  # type: ignore[arg-type]
        found[file.path] = FileFacts(
            path=file.path,
            bytes=10,
            archive=Archive.ZIP,
            fingerprint=file.path,
            role=named.role,
            shard=named.shard,
            facts=told if named.role is Role.MODEL else None,
        )
    judged = judge(listing, found, None, Context(save_spread_seconds=60.0))
    return judged.state, judged.reason


def test_stage_0_is_whole_with_every_expert_and_layer() -> None:
    model = "mp_rank_00_model_states.pt"
    assert stage_0((model,)) == (State.COMPLETE, None)
    assert stage_0((model,), num_experts=(2,))[0] is State.INCOMPLETE
    experts = tuple(f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in range(2))
    optimizers = tuple(f"expp_rank_{e}_mp_rank_00_optim_states.pt" for e in range(2))
    assert stage_0((model, *experts, *optimizers), num_experts=(2,)) == (State.COMPLETE, None)
    assert stage_0((model, *experts), num_experts=(2,))[0] is State.INCOMPLETE
    assert stage_0((model, *experts, optimizers[1]), num_experts=(2,))[0] is State.INCOMPLETE
    assert stage_0((model, experts[1], *optimizers), num_experts=(2,))[0] is State.INCOMPLETE
    assert stage_0((model,), groups=1)[0] is State.INCOMPLETE
    assert stage_0((model, "layer_00-model_states.pt")) == (State.REFUSED, PIPELINE_0)


def test_a_trainers_checkpoint_without_deepspeed_takes_nothing_from_deepspeeds(tmp_path: Path) -> None:
    """Who switches trainers keeps both histories: `global_stepN` is no leftover of `trainer.save_model`."""
    for name in HF:
        (tmp_path / "checkpoint-4").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-4" / name).write_bytes(b"x")
    (tmp_path / "global_step10").mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (tmp_path / "global_step10" / name).write_bytes(b"x")
    with files.opened_dir(tmp_path) as fd:
        listing = scan(fd)
    assert [one.tag for one in listing.folders] == ["checkpoint-4", "global_step10"]
    assert listing.loose == frozenset()


def declared(
    names: tuple[str, ...], said: DeclaredSave, times: dict[str, int] | None = None
) -> FolderListing:
    listing = folder("ckpt-8", names, times)
    return replace(listing, other_layout=other_layout_of("ckpt-8", names, said))


def test_what_the_job_file_declares_is_whole_by_its_marker_and_not_before() -> None:
    said = DeclaredSave(marker="DONE")
    names = ("weights.npz", "opt.npz")
    assert folder("ckpt-8", names).other_layout is None
    assert verdict(declared(names, said))[0] is State.INCOMPLETE
    assert verdict(declared((*names, "DONE"), said)) == (State.COMPLETE, None)
    older = declared((*names, "DONE"), said, {"opt.npz": 5})
    assert verdict(older) == (State.SUSPECT, "two saves? opt.npz was written after DONE")
    assert other_layout_of("ckpt-8", ("DONE",), said) is None, "a marker alone is no checkpoint"
    assert other_layout_of("ckpt", names, said) is None, "its name tells no step"
    assert other_layout_of("checkpoint-8", HF, said).name == "huggingface"  # type: ignore[union-attr]


def test_a_declared_quiet_time_is_waited_for() -> None:
    listing = declared(("weights.npz",), DeclaredSave(quiet_seconds=120.0))
    assert verdict(listing, quiet_seconds=119.0)[0] is State.SAVING
    assert verdict(listing, quiet_seconds=120.0) == (State.COMPLETE, None)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((("weights.npz", 10), ("opt.npz", -1)), None),
        ((("weights.npz", 11),), "weights.npz has 10 bytes, files.json says 11"),
        ((("more.npz", -1),), "missing: more.npz, which files.json names"),
        ((), "files.json: it names no file"),
    ],
)
def test_a_declared_manifest_names_what_must_be_there(
    parts: tuple[tuple[str, int], ...], reason: str | None
) -> None:
    listing = declared(("weights.npz", "opt.npz", "files.json"), DeclaredSave(manifest="files.json"))
    read = facts(listing)
    read["files.json"] = read["files.json"].model_copy(update={"parts": parts})
    found = judge(listing, read, None, Context(save_spread_seconds=60.0))
    assert found.reason == reason
    assert (found.state is State.COMPLETE) == (reason is None)


def test_single_files_are_proved_by_their_end_and_lightnings_tell_their_step() -> None:
    last = replace(folder("last.ckpt", ("last.ckpt",)), tag="last.ckpt")
    read = {
        "last.ckpt": FileFacts(path="last.ckpt", bytes=10, archive=Archive.ZIP, fingerprint="x", facts=None)
    }
    context = Context(save_spread_seconds=60.0)
    assert "its step is not known" in str(judge(last, read, None, context).reason)
    told = {"last.ckpt": read["last.ckpt"].model_copy(update={"facts": ShardFacts(global_steps=40)})}
    found = judge(last, told, None, context)
    assert (found.state, found.step) == (State.COMPLETE, 40)
    named = replace(folder("model_8.pt", ("model_8.pt",)), tag="model_8.pt")
    other = FileFacts(path="model_8.pt", bytes=10, archive=Archive.OTHER, fingerprint="x")
    assert "no torch.save file" in str(judge(named, {"model_8.pt": other}, None, context).reason)
