"""A script of the Hugging Face Trainer, as there are thousands: a tiny GPT-2 that learns numbers by heart."""

from __future__ import annotations

import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


class Numbers(Dataset):  # type: ignore[misc]
    """As slow as a data set on a busy file server."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        ids = (index + torch.arange(16) * (1 + index % 3)) % 97
        return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    """Train as the command line says."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()  # type: ignore[arg-type]
    set_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
