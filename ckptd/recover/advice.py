"""Tell the trainer how to go on from the chosen checkpoint: lines for stderr.

A universal load needs a line in the DeepSpeed configuration, another number of ranks another accumulation,
and neither restores frozen parameters or buffers (docs/formats.md §5.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.owned_dirs import list_dir
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.model.layouts import Role, Trainer, parse_shard_name
from ckptd.core.model.other_layouts import other_layout, words_of
from ckptd.core.model.records import UNIVERSAL, WEIGHTS
from ckptd.formats.zero.optimizers import TENSOR_STAGE_3, stage3_loader_word

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.core.model.shard_facts import ShardFacts
    from ckptd.recover.plan import RecoveryPlan


def model_facts(folder: Path) -> ShardFacts | None:
    """Return the facts of the first model-states file of a folder; None when there is none or it cannot be
    read.
    """
    try:
        with files.opened_dir(folder) as fd:
            names = sorted(list_dir(fd))
    except OSError:
        return None
    models = [n for n in names if (s := parse_shard_name(n)) is not None and s.role is Role.MODEL]
    return inspect_files(folder, models[:1])[0].facts if models else None


_OPENED_BY = {
    Trainer.ACCELERATE: "accelerator.load_state(PATH)",
    Trainer.LIGHTNING: "trainer.fit(model, ckpt_path=PATH)",
}


def advice(plan: RecoveryPlan, facts: ShardFacts | None) -> list[str]:
    """Return the lines for the person or the log of the launch script."""
    candidate = plan.candidate
    grid = candidate.grid
    first = f"resume from step {candidate.order.step} (branch {candidate.order.branch}): {candidate.tag}, "
    first += (
        f"ZeRO stage {grid.zero_stage}, saved by {candidate.saved_world_size} ranks, form {plan.form}"
        if grid.has_shards
        else words_of(grid.layout)
    )
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
        lines += [TENSOR_STAGE_3] if grid.zero_stage >= 3 and (grid.tp or 1) > 1 else []
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


def load_line(plan: RecoveryPlan, path: Path) -> str:
    """Return the line of a training script that loads what was restored to `path`."""
    trainer = plan.candidate.layout[0]
    if plan.candidate.grid.is_model_only:
        return f"restored to {path}"
    if trainer is Trainer.HUGGINGFACE and plan.form not in WEIGHTS:
        return f'load it: trainer.train(resume_from_checkpoint="{path}")'
    if plan.form in WEIGHTS:
        return f'load it: AutoModel.from_pretrained("{path}")'
    other = other_layout(plan.candidate.grid.layout)
    if other is not None:
        return f"load it: {other.opened_by.replace('PATH', repr(str(path)))}"
    if trainer in _OPENED_BY:
        return f"load it: {_OPENED_BY[trainer].replace('PATH', repr(str(path)))}"
    return f'load it: engine.load_checkpoint("{path.parent}", "{path.name}")'


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
