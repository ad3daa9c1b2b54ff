"""Supervised fine-tuning with TRL, as in its quick start, of a model and a data set on the disk."""

from __future__ import annotations

import time
from typing import Any

from datasets import load_dataset
from transformers import TrainerCallback
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser


class Slow(TrainerCallback):
    """As slow as a larger model."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait."""
        time.sleep(0.2)


def main() -> None:
    """Train as the command line says."""
    script, args, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    data = load_dataset("json", data_files=f"{script.dataset_name}/train.json", split="train")
    trainer = SFTTrainer(model=model.model_name_or_path, args=args, train_dataset=data, callbacks=[Slow()])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
