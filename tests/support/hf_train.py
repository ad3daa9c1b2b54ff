"""Trains a tiny GPT-2 with the real transformers.Trainer and DeepSpeed on CPU; every rank runs it (hf.py).

`python -m tests.support.hf_train JOBS.json` in torchrun's environment: JOBS is a list of the fields
of `tests.support.hf.HfRun` with "out", "losses", "notes". Several jobs share one start, because the start
costs more
than the training. Data depend on the sample's number alone and the total batch is fixed, so a run resumed on
another number of processes must show the same losses.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from examples.demo.ending import leave

VOCAB, SEQ, SAMPLES, BATCH = 97, 16, 512, 8


class Sentences(Dataset):  # type: ignore[misc]
    """Sample n is made from n alone."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (SEQ,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def tiny_gpt2(hidden: int) -> GPT2LMHeadModel:
    """From its configuration: nothing is downloaded; no dropout, so that losses can be compared."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=SEQ,
            n_embd=hidden,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def note_files(folder: Path, notes: Path, name: str) -> None:
    """What the trainer left: SHA-256 and last write of each file of a save."""
    found = {
        str(path.relative_to(folder)): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "mtime_ns": path.stat().st_mtime_ns,
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    notes.mkdir(exist_ok=True)
    partial = notes / f".{name}.json"
    partial.write_text(json.dumps(found))
    partial.rename(notes / f"{name}.json")


def slow_engine(engine: Any, seconds: float) -> None:
    """The other ranks' optimizer shards come late, as on a busy disk: after `latest`, which rank 0 writes."""
    write = engine._save_zero_checkpoint

    def late(*arguments: Any, **named: Any) -> Any:
        if dist.get_rank() != 0:
            time.sleep(seconds)
        return write(*arguments, **named)

    engine._save_zero_checkpoint = late


class SlowTrainer(Trainer):
    """The Trainer with pauses between the parts of a save; their order is its own."""

    slow_seconds = 0.0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        engine = self.model_wrapped
        if self.slow_seconds and not hasattr(engine, "was_slowed"):
            slow_engine(engine, self.slow_seconds)
            engine.was_slowed = True
        super().save_model(output_dir, _internal_call)
        time.sleep(self.slow_seconds)

    def _save_rng_state(self, output_dir: str) -> None:
        time.sleep(self.slow_seconds * (1 + 2 * self.args.process_index))
        super()._save_rng_state(output_dir)


class Witness(TrainerCallback):
    """After each save, once every rank has written: notes what is there, then waits; perhaps for a hold."""

    def __init__(self, pause_seconds: float, notes: str | None, *, waits_for_hold: bool) -> None:
        self.pause_seconds = pause_seconds
        self.notes = notes
        self.waits_for_hold = waits_for_hold

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dist.barrier()
        if self.notes is not None and args.process_index == 0:
            name = f"checkpoint-{state.global_step}"
            note_files(Path(args.output_dir) / name, Path(self.notes), name)
        time.sleep(self.pause_seconds)
        holds = Path(args.output_dir) / "_ckptd" / "hold"
        deadline = time.monotonic() + 200
        while self.waits_for_hold and not any(holds.glob(f"checkpoint-{state.global_step}.*.json")):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        dist.barrier()


def ds_config(job: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration of a job, as users of the Trainer write it."""
    zero: dict[str, Any] = {"stage": job["stage"]}
    if job["gather"]:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
    }
    if job["universal"]:
        config["checkpoint"] = {"load_universal": True}
    return config


def run(job: dict[str, Any]) -> None:
    """One training run; rank 0 writes {step: loss}."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(job["init_seed"])
    more: dict[str, Any] = {}
    if job["best"]:  # the greatest loss is called the best: that is an early checkpoint, not the newest
        more = {
            "eval_strategy": "steps",
            "eval_steps": job["save_steps"],
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
        }
    arguments = TrainingArguments(
        output_dir=job["out"],
        max_steps=job["steps"],
        save_steps=job["save_steps"],
        save_total_limit=job["limit"] or None,
        save_only_model=job["save_only_model"],
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        logging_steps=1,
        report_to=[],
        bf16=True,
        use_cpu=True,
        deepspeed=ds_config(job) if job["deepspeed"] else None,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        disable_tqdm=True,
        **more,
    )
    data = Sentences()
    trainer = SlowTrainer(
        model=tiny_gpt2(job["hidden"]),
        args=arguments,
        train_dataset=data,
        eval_dataset=data if job["best"] else None,
        callbacks=[Witness(job["pause_seconds"], job["notes"], waits_for_hold=job["waits_for_hold"])],
    )
    trainer.slow_seconds = job["slow_seconds"]
    trainer.train(resume_from_checkpoint=job["resume"])
    if job["final_save"]:
        trainer.save_model()
    dist.barrier()
    if dist.get_rank() == 0:
        rows = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        Path(job["losses"]).write_text(json.dumps(rows))


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(job)
    leave()


if __name__ == "__main__":
    main()
