"""A LightningModule with Lightning's DeepSpeedStrategy and ModelCheckpoint."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
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


class ResumableLoader(DataLoader):  # type: ignore[misc]
    """Goes on after the batch of a save in the middle of an epoch; a plain DataLoader begins anew."""

    done_batches = skipped_batches = 0

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__(), 1):
            if number > self.skipped_batches:
                self.done_batches = number
                yield batch
        self.skipped_batches = 0

    def state_dict(self) -> dict[str, int]:
        """Return what Lightning saves of it."""
        return {"done_batches": self.done_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip the batches that the saved run had."""
        self.skipped_batches = state["done_batches"]


class Model(lightning.LightningModule):  # type: ignore[misc]
    """A tiny GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss, and print its mean over all ranks."""
        loss = self.network(**batch).loss
        mean = self.all_gather(loss.detach().float()).mean().item()
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {mean:.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam of torch."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class OnCpu(DeepSpeedStrategy):  # type: ignore[misc]
    """For a machine without GPUs, which Lightning refuses though DeepSpeed takes it."""

    @property
    def root_device(self) -> torch.device:
        """Return the CPU, with the number that DeepSpeed asks for."""
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        """Skip the check."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Skip the check of device numbers."""
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dirpath", required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4, help="of each process")
    parser.add_argument("--max_steps", type=int, default=400)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--config", default="ds_zero2.json")
    parser.add_argument("--ckpt_path")
    args = parser.parse_args()

    lightning.seed_everything(42)
    has_gpu = torch.cuda.is_available()
    kind = DeepSpeedStrategy if has_gpu else OnCpu
    strategy = kind(config=args.config, **({} if has_gpu else {"process_group_backend": "gloo"}))
    trainer = lightning.Trainer(
        accelerator="gpu" if has_gpu else "cpu",
        devices=args.devices,
        strategy=strategy,
        precision="bf16-true",
        max_steps=args.max_steps,
        callbacks=[ModelCheckpoint(dirpath=args.dirpath, every_n_train_steps=args.save_steps, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
    )
    data = ResumableLoader(Numbers(), batch_size=args.batch_size)
    trainer.fit(Model(), data, ckpt_path=args.ckpt_path)


if __name__ == "__main__":
    main()
