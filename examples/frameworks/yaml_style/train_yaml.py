"""What axolotl and LLaMA-Factory make of their YAML: the Hugging Face Trainer with DeepSpeed, perhaps LoRA.

`train_yaml.py FILE [key=value ...]`; both take such changes on the command line too. Neither is used here:
axolotl pins some sixty versions of other packages, LLaMA-Factory needs CUDA builds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

OTHER_NAMES = {"micro_batch_size": "per_device_train_batch_size", "lr_scheduler": "lr_scheduler_type"}
"""axolotl's names of what the Trainer calls otherwise; all others are alike."""
OF_TRAINER = {
    *("output_dir", "deepspeed", "save_steps", "logging_steps", "per_device_train_batch_size", "max_steps"),
    *("gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "bf16", "resume_from_checkpoint"),
}


class Numbers(Dataset):  # type: ignore[misc]
    """As slow as a data set on a busy file server."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        ids = (index + torch.arange(16) * (1 + index % 3)) % 97
        return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    """Train as the file says."""
    given: dict[str, Any] = yaml.safe_load(Path(sys.argv[1]).read_text())
    for change in sys.argv[2:]:
        key, _, value = change.partition("=")
        given[key] = yaml.safe_load(value)
    named = {OTHER_NAMES.get(key, key): value for key, value in given.items()}
    args = TrainingArguments(
        **{key: value for key, value in named.items() if key in OF_TRAINER},
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    set_seed(args.seed)
    model: Any = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    if given.get("adapter") == "lora":
        lora = LoraConfig(
            r=given["lora_r"],
            lora_alpha=given["lora_alpha"],
            lora_dropout=given["lora_dropout"],
            target_modules=given["lora_target_modules"],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
    trainer = Trainer(model=model, args=args, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
