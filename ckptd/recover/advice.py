"""Tell the trainer how to go on from the chosen checkpoint: lines for stderr.

A universal load needs a line in the DeepSpeed configuration, another number of ranks another accumulation,
and neither restores frozen parameters or buffers (docs/formats.md §5.1).
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.convert.engine.inspect import inspect_files
from ckptd.core.model.layouts import Role, Trainer, parse_shard_name, universal_name
from ckptd.core.model.records import WEIGHTS
from ckptd.errors import CkptdError
from ckptd.formats.zero.optimizers import stage3_loader_word
from ckptd.recover.select.copies import DESCRIPTION, UNIVERSAL
from ckptd.recover.select.steps import DERIVED_ACCELERATE, DERIVED_UNIVERSAL

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.core.model.listing import SaveDirListing
    from ckptd.core.model.shard_facts import ShardFacts
    from ckptd.recover.plan import ResumePlan


def model_facts(folder: Path) -> ShardFacts | None:
    """Return the facts of the first model-states file of a folder; None when there is none or it cannot be
    read.
    """
    try:
        with files.opened_dir(folder) as fd:
            names = sorted(os.listdir(fd))
    except OSError:
        return None
    models = [n for n in names if (s := parse_shard_name(n)) is not None and s.role is Role.MODEL]
    return inspect_files(folder, models[:1])[0].facts if models else None


_OPENED_BY = {
    Trainer.ACCELERATE: "accelerator.load_state(PATH)",
    Trainer.LIGHTNING: "trainer.fit(model, ckpt_path=PATH)",
}


def advice(plan: ResumePlan, facts: ShardFacts | None) -> list[str]:
    """Return the lines for the person or the log of the launch script."""
    candidate = plan.candidate
    grid = candidate.grid
    first = f"resume from step {candidate.order.step} (branch {candidate.order.branch}): {candidate.tag}, "
    first += f"ZeRO stage {grid.zero_stage}, saved by {candidate.saved_world_size} ranks, form {plan.form}"
    if grid.is_model_only:
        return [f"{candidate.tag} is only a model (step {candidate.order.step}): nothing to resume from"]
    if plan.form in WEIGHTS:
        return [f"{plan.form} of {candidate.tag}, step {candidate.order.step}: nothing to resume from"]
    lines = [first]
    if plan.form != UNIVERSAL:
        return lines
    if candidate.is_universal_alone:
        lines.append(f"of {candidate.tag} only the universal form is left: it loads on any number of ranks")
    lines.append('in the DeepSpeed configuration: "checkpoint": {"load_universal": true}')
    if candidate.layout[0] in _OPENED_BY:
        lines.append(
            f"{_OPENED_BY[candidate.layout[0]]} with exactly this path: the universal form lies there under "
            "the name that it opens"
        )
    lines += _unread(facts) if grid.zero_stage >= 3 else []
    if grid.mm_count > 1:
        lines.append(
            f"saved with tensor parallel degree {grid.tp or 1} and pipeline parallel degree {grid.pp or 1}: "
            "the universal form loads with other degrees too, the training script chooses them"
        )
    if (grid.ep or 1) > 1:
        lines.append(
            f"experts are shared by {grid.ep} ranks: keep ep_size {grid.ep}, in ZeRO stage 1 or 2 "
            "(DeepSpeed's AutoEP takes any size)"
        )
    if (grid.sp or 1) > 1:
        lines.append(
            f"saved with sequence parallel degree {grid.sp}, which the training script may change: keep "
            "train_batch_size by the replicas, ranks divided by that degree"
        )
    elif facts is not None and plan.world_size is not None and plan.world_size % grid.mm_count == 0:
        lines += _batch(facts, plan.world_size // grid.mm_count)
    if facts is not None and facts.round_robin_gradients and grid.zero_stage < 3:
        lines.append(
            "switch round_robin_gradients off in the DeepSpeed configuration: with it on, DeepSpeed's "
            "universal loader puts parameters into wrong places"
        )
    if facts is None or facts.frozen_parameters or facts.buffers:
        lines.append(
            "frozen parameters and buffers are not restored by a universal load: the script must set them "
            "as at the first start"
        )
    return lines


def _unread(facts: ShardFacts | None) -> list[str]:
    """Say that the DeepSpeed that saved cannot load the form, where it cannot."""
    if facts is None or not facts.ds_version:
        return []
    word = stage3_loader_word(facts.ds_version, facts.groups)
    return [word] if word is not None else []


def _batch(facts: ShardFacts, ranks: int) -> list[str]:
    """Return the accumulation that keeps the global batch on that many data-parallel ranks."""
    batch, micro = facts.train_batch_size, facts.micro_batch_size
    if not batch or not micro:
        return []
    if batch % ranks:
        return [f"train_batch_size {batch} cannot be kept on {ranks} data-parallel ranks: it is no multiple"]
    steps, rest = divmod(batch, micro * ranks)
    if rest:
        steps, micro = 1, batch // ranks
    text = f"keep train_batch_size {batch} on {ranks} data-parallel ranks: "
    return [f"{text}train_micro_batch_size_per_gpu {micro}, gradient_accumulation_steps {steps}"]


# --- universal forms that lie in a directory already -----------------------------------------------------
# Each says in its `ckptd.json` which shards it was made from.

_DESCRIPTION_LIMIT_BYTES = 8 << 20


def derived_universals(save_dir_fd: int) -> dict[str, dict[str, str] | None]:
    """Read which save each universal form in `_ckptd/derived` was made from.

    Returns tag → fingerprints of its source; None for one that is unreadable.
    """
    return _derived(save_dir_fd, DERIVED_UNIVERSAL, "")


def derived_accelerate(save_dir_fd: int) -> dict[str, dict[str, str] | None]:
    """Read which save each form in `_ckptd/derived/accelerate` was made from, one level deeper."""
    return _derived(save_dir_fd, DERIVED_ACCELERATE, "/pytorch_model", "/checkpoint")


def put_in_universals(save_dir_fd: int, listing: SaveDirListing) -> dict[str, dict[str, str] | None]:
    """Read the sources of universal forms that lie beside shards, by their names below save_dir."""
    names = [f"{f.tag}/{universal_name(root)}" for f in listing.folders for root in f.roots if root]
    is_there = [name for name in names if files.stat_beneath(save_dir_fd, name) is not None]
    return {name: source_of(save_dir_fd, name) for name in is_there}


def _derived(save_dir_fd: int, place: str, *inner: str) -> dict[str, dict[str, str] | None]:
    try:
        fd = files.open_dir_beneath(save_dir_fd, place)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        names = [name for name in sorted(os.listdir(fd)) if not name.startswith(".")]
        found = {name: [_sources(fd, name + one) for one in inner] for name in names}
        return {name: next(filter(None, sources), None) for name, sources in found.items()}
    finally:
        os.close(fd)


def source_of(save_dir_fd: int, folder: str) -> dict[str, str] | None:
    """Return the fingerprints of what a universal folder was made from; None: absent or unreadable."""
    head, _, name = folder.rpartition("/")
    try:
        fd = files.open_dir_beneath(save_dir_fd, head)
    except (OSError, CkptdError):
        return None
    try:
        return _sources(fd, name)
    finally:
        os.close(fd)


def _sources(fd: int, name: str) -> dict[str, str] | None:
    try:
        data = files.read_beneath(fd, f"{name}/{DESCRIPTION}", limit_bytes=_DESCRIPTION_LIMIT_BYTES)
        marks = json.loads(data)["source"]["fingerprints"]
        return {str(path): str(mark) for path, mark in marks.items()}
    except (OSError, CkptdError, ValueError, KeyError, TypeError, AttributeError):
        return None
