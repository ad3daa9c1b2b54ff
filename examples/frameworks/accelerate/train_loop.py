"""A loop of Accelerate with DeepSpeed and automatic checkpoint naming, as in Accelerate's own examples."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Numbers(Dataset):  # type: ignore[misc]
    """As slow as a data set on a busy file server."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        ids = (index + torch.arange(16) * (1 + index % 3)) % 97
        return {"input_ids": ids, "labels": ids.clone()}


def number_of(folder: Path) -> int:
    """Return n of `checkpoint_n`."""
    return int(folder.name.split("_")[-1])


def main() -> None:
    """Train as the command line says; ZeRO comes from `accelerate launch`'s configuration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--project_dir", required=True)
    parser.add_argument("--batch_size", type=int, default=4, help="of each process")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    project = ProjectConfiguration(project_dir=args.project_dir, automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        mixed_precision="bf16",
        project_config=project,
        kwargs_handlers=[] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")],
    )
    set_seed(42)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(Numbers(), batch_size=args.batch_size)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    done = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        done = (number_of(Path(args.resume_from_checkpoint)) + 1) * args.save_steps
        # Accelerate refuses to save into a folder that is there, as one that a crash cut short
        there = Path(args.project_dir, "checkpoints").glob("checkpoint_*")
        project.iteration = 1 + max(map(number_of, there))
    for step, batch in enumerate(accelerator.skip_first_batches(data, done), start=done + 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach().float(), "mean").item()
        accelerator.print(f"step {step} loss {mean:.6f}", flush=True)
        if step % args.save_steps == 0:
            accelerator.save_state()
        if step == args.max_steps:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
