"""Whose folder is it? The layouts of trainers on top of DeepSpeed (docs/formats.md §1.2; docs/adr/0050).

DeepSpeed's shards lie in the checkpoint folder itself; Hugging Face's Trainer and Accelerate put them one
level deeper, beside marks of their own that tell when a save is whole. Names only raise an expectation.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from ckptd.core.layouts import parse_shard_name

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAINER_STATE = "trainer_state.json"
_HF_TAG = re.compile(r"^checkpoint-(\d+)$")
_HF_ROOT = re.compile(r"^global_step(\d+)$")
_ACCELERATE_ROOT = re.compile(r"^pytorch_model(_\d+)?$")


class Trainer(StrEnum):
    """Who writes a save_dir."""

    DEEPSPEED = "deepspeed"
    HUGGINGFACE = "huggingface"
    ACCELERATE = "accelerate"


def layout_of(tag: str, paths: Iterable[str]) -> tuple[Trainer, tuple[str, ...]]:
    """The trainer that a folder's names suggest, and its shard roots ("" = the folder itself).

    Of several `global_step*` in one checkpoint-N the highest is meant: the others are older.
    """
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
    return Trainer.DEEPSPEED, ("",)


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


def universal_name(root: str) -> str:
    """What the universal form of a shard root is called beside it: loaders look for exactly this."""
    return f"{root}_universal"
