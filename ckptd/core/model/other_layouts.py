"""Layouts of checkpoints without ZeRO shards: recognise one, prove it whole, say how to resume from it.

Each is uploaded, verified, committed, kept and deleted as a ZeRO checkpoint is; the daemon
makes no other form of it.
Names raise an expectation; a folder is whole when every file that names, indexes and `.metadata` tell of is
there and whole. A checkpoint that is one file of save_dir has that file's name as its tag, and the same name
as the only path in it. How each trainer writes: docs/formats.md §1.4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from ckptd.core.model.facts import Archive
from ckptd.core.model.layouts import (
    TORCH_FILES,
    TRAINER_STATE,
    Trainer,
    is_weights,
    missing_weights,
    parse_shard_name,
    shard_roots_of,
    step_of_folder,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ckptd.core.model.facts import FileFacts

CKPT = ".ckpt"
LIGHTNING_META = "meta.pt"
METADATA = ".metadata"
"""The file of a torch.distributed.checkpoint folder that is written last and names all others."""
SUFFIX = ".distcp"
"""The end of the names of its other files, as `ckptd.formats.torchfile.sharded` has it too for children."""
_OPTIMIZER = re.compile(r"^optimizer(_\d+)?(_rank\d+)?(\.pt|\.bin|/)")
_RANDOM = re.compile(r"^(?:rng_state|random_states)_(\d+)\.(?:pth|pkl)$")
_RANKED = re.compile(r"^((?:pytorch_model_fsdp|optimizer)(?:_\d+)?)_rank(\d+)\.bin$")
_STATE = re.compile(
    r"^((scheduler|sampler|dl_state_dict)(_\d+)?\.(pt|bin)|scaler\.pt|meta\.pt|custom_checkpoint_\d+\.pkl)$"
)
_MODEL = re.compile(
    r"^((model|pytorch_model)_\d+\.(safetensors|bin)|pytorch_model_fsdp.*|.+/[^/]+\.(safetensors|bin))$"
)
"""Weights under other names: of more than one model, of FSDP, or where a script's hook saved them."""
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


class Layout:
    """Describe one kind of checkpoint folder; paths are relative to it."""

    name: ClassVar[str]
    """The word for it in manifests and in docs/contract.md."""
    words: ClassVar[str]
    trainer: ClassVar[Trainer]
    opened_by: ClassVar[str]
    """The call that resumes from it; PATH stands for the folder."""
    is_resumable: ClassVar[bool] = True
    manifest: str = ""
    """Path in the folder of a file that lists the others, which the job file names."""
    quiet_seconds: float = 0.0
    """So long nothing may have changed before it is judged, where the job file says so."""

    @property
    def written_last(self) -> str:
        """Return the path of a file that no other may be younger than; "" where nothing is said of it."""
        return self.manifest

    def recognises(self, tag: str, paths: Collection[str]) -> bool:
        """Tell whether a folder of these files is, or is becoming, one of this layout."""
        raise NotImplementedError

    def is_state(self, path: str) -> bool:
        """Tell whether a file is part of what training goes on from: such files identify the save."""
        raise NotImplementedError

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:
        """Say what the folder lacks to be whole, None when it lacks nothing."""
        raise NotImplementedError

    def step(self, tag: str, facts: Mapping[str, FileFacts]) -> int | None:  # noqa: ARG002
        """Return the step that was saved: the last number of the name, None where it has none."""
        number = _NUMBER.search(tag)
        return int(number[1]) if number else None


class ModelOnly(Layout):
    """Weights of the Hugging Face Trainer with `save_only_model`: kept, never resumed from."""

    name = ""
    words = "only a model (save_only_model)"
    trainer = Trainer.HUGGINGFACE
    opened_by = "AutoModel.from_pretrained(PATH)"
    is_resumable = False

    def recognises(self, tag: str, paths: Collection[str]) -> bool:
        """Tell whether the folder holds weights, trainer_state.json and no trace of a whole save."""
        is_traced = "latest" in paths or any(
            n.startswith(
                ("rng_state", "zero_to_", "global_step", "optimizer", "scheduler.", "pytorch_model_fsdp")
            )
            for n in paths
        )
        is_saved = step_of_folder(tag) is not None and TRAINER_STATE in paths
        return is_saved and any(is_weights(n) for n in paths) and not is_traced

    def is_state(self, path: str) -> bool:
        """Tell whether a file holds weights."""
        return is_weights(path)

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:
        """Say what is missing of weights that several files hold, or of the Trainer's word that it ended."""
        absent = missing_weights(facts)
        return f"missing: {absent}" if absent else _missing_state(tag, facts)


class TorchShards(Layout):
    """torch.distributed.checkpoint: `*.distcp` and the `.metadata` that names them (FSDP2, torchtitan)."""

    name = "torch"
    words = "a sharded checkpoint of torch.distributed.checkpoint"
    trainer = Trainer.TORCH
    opened_by = "torch.distributed.checkpoint.load(state_dict, checkpoint_id=PATH)"

    def recognises(self, tag: str, paths: Collection[str]) -> bool:  # noqa: ARG002
        """Tell whether a part that torch writes lies in the folder itself."""
        return any(path.endswith(SUFFIX) and "/" not in path for path in paths)

    def is_state(self, path: str) -> bool:
        """Tell whether a file is a part, names parts, or lies beside them as Lightning's `meta.pt` does."""
        return path.endswith(SUFFIX) or _base(path) == METADATA or bool(_STATE.match(path))

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:
        """Say which part is missing or shorter than `.metadata` says; Lightning writes `meta.pt` after it."""
        if tag.endswith(CKPT) and LIGHTNING_META not in facts:
            return _missing_parts(facts) or f"missing: {LIGHTNING_META}"
        return _missing_parts(facts) or _torn(self, facts)

    def step(self, tag: str, facts: Mapping[str, FileFacts]) -> int | None:
        """Return the step that Lightning's `meta.pt` tells, else the last number of the name."""
        meta = facts.get(LIGHTNING_META)
        step = meta.facts.global_steps if meta is not None and meta.facts is not None else None
        return super().step(tag, facts) if step is None else step


class HuggingFace(Layout):
    """The Hugging Face Trainer without DeepSpeed: one process, DDP or FSDP."""

    name = "huggingface"
    words = "a checkpoint of the Hugging Face Trainer without DeepSpeed"
    trainer = Trainer.HUGGINGFACE
    opened_by = "trainer.train(resume_from_checkpoint=PATH)"

    def recognises(self, tag: str, paths: Collection[str]) -> bool:
        """Tell whether a checkpoint-N holds an optimizer of the Trainer's own."""
        return step_of_folder(tag) is not None and any(_OPTIMIZER.match(path) for path in paths)

    def is_state(self, path: str) -> bool:
        """Tell whether a file holds weights or the state of the optimizer, the schedule or the scaler."""
        return is_weights(path) or any(one.match(path) for one in (_OPTIMIZER, _STATE, _MODEL))

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:
        """Say what is missing: rank 0 writes trainer_state.json last, each rank its own random states."""
        return (
            _missing_model(facts)
            or _missing_fsdp(facts)
            or ("missing: scheduler.pt" if "scheduler.pt" not in facts else None)
            or _missing_random(facts, "rng_state")
            or _missing_ranks(facts)
            or _missing_state(tag, facts)
            or _missing_parts(facts)
            or _torn(self, facts)
        )


class Accelerate(HuggingFace):
    """`accelerator.save_state` without DeepSpeed, in folders of any name."""

    name = "accelerate"
    words = "a checkpoint of Accelerate without DeepSpeed"
    trainer = Trainer.ACCELERATE
    opened_by = "accelerator.load_state(PATH)"

    def recognises(self, tag: str, paths: Collection[str]) -> bool:  # noqa: ARG002
        """Tell whether an optimizer lies beside random states, which are written last."""
        has_random = any(path.startswith("random_states_") for path in paths)
        return has_random and any(_OPTIMIZER.match(path) for path in paths)

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:  # noqa: ARG002
        """Say what is missing."""
        return (
            _missing_model(facts)
            or _missing_random(facts, "random_states")
            or _missing_ranks(facts)
            or _missing_parts(facts)
            or _torn(self, facts)
        )


class LightningFile(Layout):
    """Lightning's `last.ckpt` and `epoch=0-step=10.ckpt`, which hold model, optimizers and loops."""

    name = "lightning"
    words = "a Lightning checkpoint in one file"
    trainer = Trainer.LIGHTNING
    opened_by = "trainer.fit(model, ckpt_path=PATH)"

    def recognises(self, tag: str, paths: Collection[str]) -> bool:
        """Tell whether a file's name ends as Lightning's do."""
        return tag.endswith(CKPT) and is_single_file(tag, paths)

    def is_state(self, path: str) -> bool:  # noqa: ARG002
        """Return true: there is but the one file."""
        return True

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:
        """Say that the file is cut off, or no file of Lightning's."""
        if (cut := _torn_file(facts[tag])) is not None:
            return cut
        if self.step(tag, facts) is None:
            return f"{tag} holds no global_step, as Lightning's files do: its step is not known"
        return None

    def step(self, tag: str, facts: Mapping[str, FileFacts]) -> int | None:
        """Return the step in the file: `last.ckpt` has none in its name, `…-v1.ckpt` another number."""
        read = facts[tag].facts
        return None if read is None else read.global_steps


class TorchFile(Layout):
    """One file of `torch.save`, or one of safetensors, that `files` of the job file names."""

    name = "torch-file"
    words = "a checkpoint in one torch.save file"
    trainer = Trainer.TORCH
    opened_by = "torch.load(PATH)"

    def recognises(self, tag: str, paths: Collection[str]) -> bool:
        """Tell whether it is one file; which ones are meant, the job file says."""
        return is_single_file(tag, paths)

    def is_state(self, path: str) -> bool:  # noqa: ARG002
        """Return true: there is but the one file."""
        return True

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:
        """Say that the file is cut off, or of a format whose end nothing proves."""
        return _torn_file(facts[tag])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSave(Layout):
    """Describe checkpoints that no other layout recognises, as `[layout]` of a job file does; empty: none."""

    name: ClassVar[str] = "declared"
    words: ClassVar[str] = "a checkpoint that [layout] of the job file describes"
    trainer: ClassVar[Trainer] = Trainer.SCRIPT
    opened_by: ClassVar[str] = "your script with PATH"
    files: str = ""
    """Pattern of files in save_dir that are checkpoints."""
    marker: str = ""
    """Path in the folder of a file that is written last."""
    manifest: str = ""
    quiet_seconds: float = 0.0

    @property
    def written_last(self) -> str:
        """Return the marker or the manifest."""
        return self.marker or self.manifest

    @property
    def evidence(self) -> str:
        """Return the files or the time that make a folder whole, in words; "" where nothing is declared."""
        if self.marker or self.manifest:
            return f"the marker {self.marker}" if self.marker else f"the manifest {self.manifest}"
        return f"{self.quiet_seconds:g} s of quiet" if self.quiet_seconds else ""

    def recognises(self, tag: str, paths: Collection[str]) -> bool:
        """Tell whether a folder's name holds a step, and files of a state lie in it."""
        return bool(self.evidence) and bool(_NUMBER.search(tag)) and any(map(self.is_state, paths))

    def is_state(self, path: str) -> bool:
        """Tell whether a file is more than the marker or the manifest."""
        return path not in (self.marker, self.manifest)

    def missing(self, tag: str, facts: Mapping[str, FileFacts]) -> str | None:  # noqa: ARG002
        """Say that the marker, or what the manifest names, is missing."""
        if self.marker and self.marker not in facts:
            return f"missing: {self.marker}, the marker"
        return (_missing_listed(self.manifest, facts) if self.manifest else None) or _torn(self, facts)


NOTHING_DECLARED = DeclaredSave()
MODEL = ModelOnly()
TORCH, LIGHTNING_FILE, TORCH_FILE = TorchShards(), LightningFile(), TorchFile()
OTHERS: tuple[Layout, ...] = (
    MODEL,
    Accelerate(),
    HuggingFace(),
    TORCH,
    LIGHTNING_FILE,
    TORCH_FILE,
    NOTHING_DECLARED,
)
"""In the order in which they are asked: scripts name folders of Accelerate's as the Trainer does."""
STAGE_0 = "deepspeed-stage-0"
"""Layout of DeepSpeed without ZeRO: model states alone, which hold the optimizer too."""


def other_layout_of(
    tag: str, paths: Collection[str], declared: DeclaredSave = NOTHING_DECLARED
) -> Layout | None:
    """Return the layout of a checkpoint without ZeRO shards, None when it is none that ckptd knows."""
    if any(parse_shard_name(_base(path)) is not None for path in paths):
        return None
    return next((layout for layout in (*OTHERS, declared) if layout.recognises(tag, paths)), None)


def layout_of_file(name: str, trainer: str, declared: DeclaredSave) -> Layout | None:
    """Return the layout of a file of save_dir that is a checkpoint by itself, None of any other file.

    `trainer`: the only one whose files are meant, or auto.
    """
    if declared.files and fnmatchcase(name, declared.files):
        has_end = name.endswith((*TORCH_FILES, CKPT, ".tar", ".safetensors"))
        return declared if declared.quiet_seconds and not has_end else TORCH_FILE
    is_lightning = trainer in ("auto", LIGHTNING_FILE.trainer) and LIGHTNING_FILE.recognises(name, {name})
    return LIGHTNING_FILE if is_lightning else None


def is_single_file(tag: str, paths: Collection[str]) -> bool:
    """Tell whether a checkpoint of these files is one file of save_dir, which bears the tag's name."""
    return len(paths) == 1 and tag in paths


def below(tag: str, path: str) -> str:
    """Return the path below save_dir of a checkpoint's file, which may be the checkpoint itself."""
    return path if path == tag else f"{tag}/{path}"


def layout_of(tag: str, paths: Iterable[str]) -> tuple[Trainer, tuple[str, ...]]:
    """Return the trainer that a folder's names suggest, and where its shards lie: ("",) in the folder itself,
    () where it has none.
    """
    paths = frozenset(paths)
    other = other_layout_of(tag, paths)
    return shard_roots_of(tag, paths) if other is None else (other.trainer, ())


def other_layout(name: str) -> Layout | None:
    """Return the layout of that name that can be resumed from; None for ZeRO, stage 0 and a model alone."""
    return next((one for one in OTHERS if one.is_resumable and one.name == name), None)


def words_of(name: str) -> str:
    """Return a layout's name in words for people; one that a newer release wrote by its name."""
    if name == STAGE_0:
        return "a checkpoint of DeepSpeed without ZeRO (stage 0)"
    return next((layout.words for layout in OTHERS if layout.name == name), name)


# --- what may be missing ---------------------------------------------------------------------------------


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _missing_state(tag: str, facts: Mapping[str, FileFacts]) -> str | None:
    state = facts.get(TRAINER_STATE)
    if state is None:
        return f"{TRAINER_STATE} is not there yet"
    step = state.trainer.global_step if state.trainer else None
    return None if step == step_of_folder(tag) else f"{TRAINER_STATE} is of step {step}, not of {tag}"


def _missing_model(facts: Mapping[str, FileFacts]) -> str | None:
    absent = missing_weights(facts)
    if absent:
        return f"missing: {absent}"
    return None if any(is_weights(p) or _MODEL.match(p) for p in facts) else "missing: the model's weights"


def _missing_random(facts: Mapping[str, FileFacts], name: str) -> str | None:
    """Name a random state below the highest that is there, or any: each rank writes its own."""
    if not any(path.startswith(name) for path in facts):
        return f"missing: {name}*"
    found = {int(match[1]): match[0] for path in facts if (match := _RANDOM.match(path))}
    absent = next((rank for rank in range(max(found, default=-1)) if rank not in found), None)
    if absent is None:
        return None
    return f"missing: {re.sub(r'[0-9]+', str(absent), found[max(found)])}"


def _missing_listed(manifest: str, facts: Mapping[str, FileFacts]) -> str | None:
    """Name a file of a declared manifest that is missing, or has another size."""
    index = facts.get(manifest)
    if index is None:
        return f"missing: {manifest}, the manifest"
    if index.reason or not index.parts:
        return f"{manifest}: {index.reason or 'it names no file'}"
    for name, size_bytes in index.parts:
        part = facts.get(name)
        if part is None:
            return f"missing: {name}, which {manifest} names"
        if size_bytes >= 0 and part.bytes != size_bytes:
            return f"{name} has {part.bytes} bytes, {manifest} says {size_bytes}"
    return None


def _missing_fsdp(facts: Mapping[str, FileFacts]) -> str | None:
    """Name the weights that FSDP resumes from, where the optimizer is FSDP's: others may lie beside them."""
    is_fsdp = any(path.startswith(("optimizer.bin", "optimizer_")) for path in facts)
    has_weights = any(path.startswith("pytorch_model_fsdp") for path in facts)
    return "missing: pytorch_model_fsdp*" if is_fsdp and not has_weights else None


def _missing_ranks(facts: Mapping[str, FileFacts]) -> str | None:
    """Name a file of FSDP that one rank writes alone, where others' or random states tell of that rank."""
    random = {int(match[1]) for path in facts if (match := _RANDOM.match(path))}
    ranked: dict[str, set[int]] = {}
    for path in facts:
        if (match := _RANKED.match(path)) is not None:
            ranked.setdefault(match[1], set()).add(int(match[2]))
    for stem, ranks in sorted(ranked.items()):
        absent = set(range(max(ranks | random) + 1)) - ranks
        if absent:
            return f"missing: {stem}_rank{min(absent)}.bin"
    return None


def _missing_parts(facts: Mapping[str, FileFacts]) -> str | None:
    """Name a part of a torch.distributed.checkpoint folder that is missing or too short."""
    folders = {path.rpartition("/")[0] for path in facts if path.endswith(SUFFIX) or _base(path) == METADATA}
    for folder in sorted(folders):
        head = f"{folder}/" if folder else ""
        index = facts.get(head + METADATA)
        if index is None:
            return f"missing: {head}{METADATA}"
        if index.parts is None:
            return f"{head}{METADATA} names no parts ({index.reason or 'it cannot be read'})"
        for name, least_bytes in index.parts:
            part = facts.get(head + name)
            if part is None:
                return f"missing: {head}{name}"
            if part.bytes < least_bytes:
                return f"{head}{name} has {part.bytes} bytes, {METADATA} tells of {least_bytes}"
    return None


def _torn_file(fact: FileFacts) -> str | None:
    """Say that a checkpoint in one file is cut off, or that nothing proves its end."""
    if fact.bytes == 0:
        return f"{fact.path} is empty"
    if fact.reason:
        return f"{fact.path} is cut off ({fact.reason})"
    if fact.archive in (Archive.ZIP, Archive.LEGACY) or fact.path.endswith(".safetensors"):
        return None
    return f"{fact.path} is no torch.save file: nothing in it tells whether it is whole"


def _torn(layout: Layout, facts: Mapping[str, FileFacts]) -> str | None:
    """Name a file of the state that is cut off."""
    for path, fact in sorted(facts.items()):
        if not layout.is_state(path) and not _RANDOM.match(path):
            continue
        is_archive = fact.archive in (Archive.ZIP, Archive.LEGACY)
        if fact.bytes == 0:
            return f"{path} is empty"
        if fact.reason or (path.endswith(TORCH_FILES) and not is_archive):
            return f"{path} is cut off" + (f" ({fact.reason})" if fact.reason else "")
    return None
