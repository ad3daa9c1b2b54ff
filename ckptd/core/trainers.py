"""Whose folder is it? The layouts of trainers on top of DeepSpeed (docs/formats.md §1.2; docs/adr/0050).

DeepSpeed's shards lie in the checkpoint folder itself; Hugging Face's Trainer, Accelerate and Lightning put
them one level deeper, beside files of their own. Names only raise an expectation.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from ckptd.core.layouts import parse_shard_name

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAINER_STATE = "trainer_state.json"
LATEST_UNIVERSAL = "latest_universal"
LATE = "_late"
"""Folder, in a checkpoint's on a remote, of files whose own place is another object's."""
_HF_TAG = re.compile(r"^checkpoint-(\d+)$")
_HF_ROOT = re.compile(r"^global_step(\d+)$")
_WEIGHTS = re.compile(
    r"^(?P<stem>model|adapter_model|pytorch_model)(-\d{5}-of-(?P<of>\d{5}))?\.(?P<end>safetensors|bin)$"
)
_ACCELERATE_ROOT = re.compile(r"^pytorch_model(_\d+)?$")
_LIGHTNING_ROOT = "checkpoint"


class Trainer(StrEnum):
    """Who writes a save_dir."""

    DEEPSPEED = "deepspeed"
    HUGGINGFACE = "huggingface"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"


WRITES_AS = {"megatron": Trainer.DEEPSPEED}
"""Trainers of a job file whose folders are those of another one: Megatron-DeepSpeed saves by DeepSpeed."""

BY_NAME = (Trainer.ACCELERATE, Trainer.LIGHTNING)
"""Their loaders open the shard root by name: a universal form lies under that name in a folder of ours."""


def layout_of(tag: str, paths: Iterable[str]) -> tuple[Trainer, tuple[str, ...]]:
    """The trainer that a folder's names suggest, and its shard roots ("" = the folder itself).

    Of several `global_step*` in one checkpoint-N the highest is meant: the others are older. No root at all:
    a model without what training needs to go on (save_only_model).
    """
    paths = tuple(paths)
    roots: set[str] = set()
    for path in paths:
        head, _, name = path.rpartition("/")
        if parse_shard_name(name) is None:
            continue
        if not head:
            return Trainer.DEEPSPEED, ("",)
        roots.add(head)
    steps = {int(match[1]): root for root in roots if (match := _HF_ROOT.match(root))}
    if _HF_TAG.match(tag) and steps:
        return Trainer.HUGGINGFACE, (steps[max(steps)],)
    models = sorted(root for root in roots if _ACCELERATE_ROOT.match(root))
    if models:
        return Trainer.ACCELERATE, tuple(models)
    if _LIGHTNING_ROOT in roots:
        return Trainer.LIGHTNING, (_LIGHTNING_ROOT,)
    if not roots and _HF_TAG.match(tag) and _is_only_a_model(paths):
        return Trainer.HUGGINGFACE, ()
    return Trainer.DEEPSPEED, ("",)


def _is_only_a_model(paths: Iterable[str]) -> bool:
    """trainer_state.json, weights, and no trace of a full save that a rotation left half removed."""
    names = frozenset(paths)
    is_traced = "latest" in names or any(
        n.startswith(
            ("rng_state", "zero_to_", "global_step", "optimizer", "scheduler.", "pytorch_model_fsdp")
        )
        for n in names
    )
    return TRAINER_STATE in names and any(is_weights(n) for n in names) and not is_traced


def is_shard_root(folder: str, name: str) -> bool:
    """Whether `name`, in a checkpoint's `folder`, is where a trainer on top of DeepSpeed puts the shards."""
    if _HF_TAG.match(folder):
        return _HF_ROOT.match(name) is not None
    return _ACCELERATE_ROOT.match(name) is not None or name == _LIGHTNING_ROOT


def is_weights(path: str) -> bool:
    """A file of the model's weights, as `save_pretrained` names it."""
    return _WEIGHTS.match(path) is not None


def missing_weights(paths: Iterable[str]) -> str | None:
    """The first one absent that others' names tell of: `model-00002-of-00003.safetensors`, or the index."""
    names = frozenset(paths)
    for match in sorted((m for n in names if (m := _WEIGHTS.match(n)) and m["of"]), key=lambda m: m.string):
        end = match["end"]
        wanted = [f"{match['stem']}-{i:05d}-of-{match['of']}.{end}" for i in range(1, int(match["of"]) + 1)]
        absent = [n for n in (*wanted, f"{match['stem']}.{end}.index.json") if n not in names]
        if absent:
            return absent[0]
    return None


def step_of_folder(tag: str) -> int | None:
    """N of a Hugging Face `checkpoint-N`."""
    match = _HF_TAG.match(tag)
    return int(match[1]) if match else None


def wanted_marks(trainer: Trainer, names: frozenset[str], processes: int) -> tuple[str, ...]:
    """Files of random states that a whole save of so many processes has; () where none are to be expected.

    Hugging Face writes none with save_only_model; rank 0 writes its own before trainer_state.json, so one
    that is there promises the others (H25). Accelerate always writes them.
    """
    if trainer is Trainer.ACCELERATE:
        return tuple(f"random_states_{rank}.pkl" for rank in range(processes))
    if trainer is Trainer.HUGGINGFACE and any(name.startswith("rng_state") for name in names):
        if processes == 1:
            return ("rng_state.pth",)
        return tuple(f"rng_state_{rank}.pth" for rank in range(processes))
    return ()


def added_by_us(paths: Iterable[str], roots: tuple[str, ...]) -> frozenset[str]:
    """What `ckptd resume` put beside the shards: universal forms that say so, and the pointer to them."""
    listed = frozenset(paths)
    ours = tuple(f"{universal_name(r)}/" for r in roots if r and f"{universal_name(r)}/ckptd.json" in listed)
    found = frozenset(path for path in listed if ours and path.startswith(ours))
    return found | ({LATEST_UNIVERSAL} & listed) if found else found


def is_in_roots(path: str, roots: tuple[str, ...]) -> bool:
    """Whether a file lies where the engine's own lie; of a model alone (no roots) any does."""
    return not roots or path.rpartition("/")[0] in roots


def universal_name(root: str) -> str:
    """What the universal form of a shard root is called beside it: loaders look for exactly this."""
    return f"{root}_universal"


def is_in_form(path: str) -> bool:
    """Whether a file in a trainer's folder lies where a universal form, or the pointer to it, does."""
    head, inside, _ = path.partition("/")
    return path == LATEST_UNIVERSAL or (bool(inside) and head.endswith(universal_name("")))


def place_of(folder: str, path: str, fingerprint: str, size_bytes: int, *, is_taken: bool = False) -> str:
    """Key of a file of a ZeRO form: by its own name, unless something else lies, or will lie, there.

    Beside shards our universal form lies under the very names that a form of somebody else's has here.
    """
    if is_taken or is_in_form(path):
        return f"{folder}/{LATE}/{fingerprint[:12]}{size_bytes}/{path}"
    return f"{folder}/{path}"
