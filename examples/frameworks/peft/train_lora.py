"""LoRA with PEFT and the Hugging Face Trainer: only the adapter trains, only the adapter is saved."""

from __future__ import annotations

import time

import torch
from peft import LoraConfig, get_peft_model
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
    base = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    trainer = Trainer(model=model, args=args, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
