"""Trains a tiny GPT-2 with the real transformers.Trainer and DeepSpeed on CPU; run by torchrun (tests/hf.py).

The data depend on nothing but the sample's number, and the total batch is fixed, so that a run resumed on
another number of processes must show the same losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCAB, SEQ, SAMPLES = 97, 16, 512


class Sentences(Dataset):  # type: ignore[misc]
    """Sample n is made from n alone."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (SEQ,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


class Witness(TrainerCallback):
    """After each save: waits, then notes the SHA-256 of every file as the trainer left it."""

    def __init__(self, seconds: float, notes: str | None) -> None:
        self.seconds = seconds
        self.notes = notes

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)
        if self.notes is None or args.process_index != 0:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        found = {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        Path(self.notes).mkdir(exist_ok=True)
        (Path(self.notes) / f"{folder.name}.json").write_text(json.dumps(found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--out", required=True)
    add("--losses", required=True)
    add("--stage", type=int, default=2)
    add("--steps", type=int, default=6)
    add("--save-steps", type=int, default=2)
    add("--limit", type=int, default=0)
    add("--save-only-model", action="store_true")
    add("--best", action="store_true", help="evaluate at each save and keep the best")
    add("--resume", default=None)
    add("--universal", action="store_true")
    add("--pause", type=float, default=0.0)
    add("--notes", default=None)
    add("--init-seed", type=int, default=7)
    add("--hidden", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(given.init_seed)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": given.stage},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto",
                "betas": "auto",
                "eps": "auto",
                "weight_decay": "auto",
                "torch_adam": True,
            },
        },
    }
    if given.universal:
        config["checkpoint"] = {"load_universal": True}
    more: dict[str, Any] = {}
    if given.best:
        more = {
            "eval_strategy": "steps",
            "eval_steps": given.save_steps,
            "load_best_model_at_end": False,
            "metric_for_best_model": "eval_loss",
        }
    training = TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        save_steps=given.save_steps,
        save_total_limit=given.limit or None,
        save_only_model=given.save_only_model,
        per_device_train_batch_size=8 // world,
        logging_steps=1,
        report_to=[],
        bf16=True,
        use_cpu=True,
        deepspeed=config,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        disable_tqdm=True,
        **more,
    )
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=SEQ,
            n_embd=given.hidden,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    data = Sentences()
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data,
        eval_dataset=data if given.best else None,
        callbacks=[Witness(given.pause, given.notes)],
    )
    trainer.train(resume_from_checkpoint=given.resume)
    if int(os.environ.get("RANK", "0")) == 0:
        rows = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        with open(given.losses, "w") as stream:
            json.dump(rows, stream)


if __name__ == "__main__":
    main()
