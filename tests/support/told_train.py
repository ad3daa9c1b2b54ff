"""Trains with ckptd told of each save: DeepSpeed's own loop and Hugging Face's Trainer, run by torchrun.

`python -m torch.distributed.run --nproc_per_node N -m tests.support.told_train JOBS.json OUT.json`: JOBS is a
list of {"kind": "deepspeed" | "huggingface", "save_dir", "wait_seconds", "report_to"}; rank 0 writes for each
what it was answered and its losses, which must not depend on whether anybody heard.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
import wandb
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainingArguments, set_seed

from ckptd.trainer import CkptdCallback, save_checkpoint, wait_committed
from examples.demo.ending import leave
from tests.support.hf_train import BATCH, Sentences, ds_config, tiny_gpt2

STEPS = 2


def plain(save_dir: str, wait_seconds: float, report_to: list[str]) -> dict[str, Any]:
    """A loop as DeepSpeed's users write it: two steps, two saves."""
    assert not report_to
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 4)
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(BATCH // dist.get_world_size(), 8, generator=generator).to(engine.device)
        loss = engine(data.bfloat16()).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        save_checkpoint(engine, save_dir)
    engine.destroy()
    is_first = dist.get_rank() == 0
    return {"committed": is_first and wait_committed(save_dir, STEPS, wait_seconds), "losses": losses}


def trainer(save_dir: str, wait_seconds: float, report_to: list[str]) -> dict[str, Any]:
    """The Trainer with the callback; its own reports make the runs that the callback writes into."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(5)
    callback = CkptdCallback(wait_seconds=wait_seconds, report_to=report_to)
    arguments = TrainingArguments(
        output_dir=save_dir,
        max_steps=STEPS,
        save_steps=1,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        logging_steps=1,
        report_to=report_to,
        bf16=True,
        use_cpu=True,
        deepspeed=ds_config({"stage": 2, "gather": False, "universal": False}),
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    made = Trainer(model=tiny_gpt2(16), args=arguments, train_dataset=Sentences(), callbacks=[callback])
    made.train()
    if report_to:
        wandb.finish()  # `leave` skips what W&B does when a script ends
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return {"committed": callback.is_committed, "losses": losses}


def main() -> None:
    torch.set_num_threads(1)
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    answers = []
    for job in jobs:
        run = {"deepspeed": plain, "huggingface": trainer}[job["kind"]]
        answers.append(run(job["save_dir"], job["wait_seconds"], job["report_to"]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(answers))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
