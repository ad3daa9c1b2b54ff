"""Trains a tiny GPT-2 in a plain Accelerate loop with DeepSpeed on CPU; run by every rank
(tests/support/hf.py).

`python -m tests.support.accelerate_train JOBS.json` in torchrun's environment: JOBS is a list
of the fields of `tests.support.hf.AccelerateRun` with "out", "losses", "notes". With a name, every
`save_state`
goes to `<out>/<name>`, in place again and again; without one Accelerate names `<out>/checkpoint_<n>` itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import set_seed

from examples.demo.ending import leave
from tests.support.hf_train import BATCH, Sentences, note_files, slow_engine, tiny_gpt2


def accelerator_of(job: dict[str, Any]) -> Accelerator:
    """As users set it up; not with `cpu=True`, which turns DeepSpeed off.

    Automatic naming saves below `<project>/checkpoints`, which is `out`.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // int(os.environ["WORLD_SIZE"]),
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": job["stage"]},
        "zero_allow_untested_optimizer": True,
    }
    if job["universal"]:
        config["checkpoint"] = {"load_universal": True}
    out = Path(job["out"])
    project = ProjectConfiguration(
        project_dir=str(out.parent if job["name"] is None else out),
        automatic_checkpoint_naming=job["name"] is None,
        total_limit=job["limit"] or None,
    )
    return Accelerator(
        mixed_precision="bf16",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        project_config=project,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def run(job: dict[str, Any]) -> None:
    """One training run; rank 0 writes {step: loss}."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = accelerator_of(job)
    set_seed(job["init_seed"])
    model = tiny_gpt2(job["hidden"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(Sentences(), batch_size=BATCH // accelerator.num_processes)
    engine, optimizer, data = accelerator.prepare(model, optimizer, data)
    if job["slow_seconds"]:
        slow_engine(engine, job["slow_seconds"])
    first = 1
    if job["resume"]:
        accelerator.load_state(job["resume"])
        first = int(engine.global_steps) + 1
        if job["name"] is None:
            accelerator.project_configuration.iteration = int(Path(job["resume"]).name.split("_")[1]) + 1
    losses: dict[int, float] = {}
    batches = iter(accelerator.skip_first_batches(data, first - 1))
    for step in range(first, job["steps"] + 1):
        loss = engine(**next(batches)).loss
        losses[step] = accelerator.reduce(loss.detach().float(), "mean").item()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % job["save_steps"] == 0:
            save(accelerator, job, step)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(job["losses"]).write_text(json.dumps(losses))


def save(accelerator: Accelerator, job: dict[str, Any], step: int) -> None:
    """`save_state`, then what it left, then the pause."""
    out = Path(job["out"])
    made = accelerator.save_state(None if job["name"] is None else str(out / job["name"]))
    accelerator.wait_for_everyone()
    if job["notes"] is not None and accelerator.is_main_process:
        folder = Path(made) if made else out / job["name"]
        note_files(folder, Path(job["notes"]), f"{folder.name}@{step}")
    accelerator.wait_for_everyone()
    time.sleep(job["pause_seconds"])
    if job["waits_for"] is not None:
        wait_committed(Path(job["waits_for"]), step)


def wait_committed(commits: Path, step: int) -> None:
    """Until the remote holds that step's; the test says what is wrong if it never does."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if any(json.loads(path.read_bytes())["step"] == step for path in commits.glob("*~zero.json")):
            return
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(job)
    leave()


if __name__ == "__main__":
    main()
