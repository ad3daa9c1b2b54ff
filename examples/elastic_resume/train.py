"""A small GPT under DeepSpeed ZeRO: the user's side of the example, an ordinary training script.

Started by torchrun from run.py with a JSON list of runs, each {"name", "load": null | "zero" | "universal",
"tag", "save_at", "steps", "accumulation", "stage", "save_dir", "losses"}; several runs share one start.
Sample i of step s is the same whoever reads it, so runs of any shape see the same global batches.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

GLOBAL_BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 16, 32, 64, 64, 4, 2


class Block(nn.Module):  # type: ignore[misc]
    """A decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(y.reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):  # type: ignore[misc]
    """Next-token loss of a batch of token sequences, shape (samples, LENGTH + 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        x = self.tokens(sequences[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())


def samples(step: int, first: int, count: int) -> torch.Tensor:
    """Sequences of a fixed noisy rule: mostly the successor of a token, sometimes any token."""
    rows = []
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(1_000_003 * step + i)
        noise = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        is_noise = torch.rand(LENGTH + 1, generator=generator) < 0.1
        row = [int(noise[0])]
        for place in range(1, LENGTH + 1):
            row.append(int(noise[place]) if is_noise[place] else (row[-1] * 5 + 3) % VOCABULARY)
        rows.append(row)
    return torch.tensor(rows)


def ds_config(run: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration; `load_universal` is all that a resume on other ranks needs."""
    return {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": run["accumulation"],
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": run["stage"]},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": run["load"] == "universal"},
    }


def train(run: dict[str, Any]) -> dict[int, float]:
    """One run; returns {step: mean loss over the global batch}."""
    world, rank = dist.get_world_size(), dist.get_rank()
    per_rank = GLOBAL_BATCH // world
    micro_batch = per_rank // run["accumulation"]
    # A resumed run starts from other weights: what it goes on with comes from the checkpoint alone.
    torch.manual_seed(99 if run["load"] else 7)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(run, micro_batch))
    if run["load"]:
        path, _ = engine.load_checkpoint(run["save_dir"], tag=run["tag"])
        if path is None:
            raise SystemExit(f"{run['save_dir']}/{run['tag']} was not loaded")
    losses: dict[int, float] = {}
    for step in range(engine.global_steps, run["steps"]):
        total = torch.zeros((), device=engine.device)
        for micro in range(run["accumulation"]):
            batch = samples(step, rank * per_rank + micro * micro_batch, micro_batch)
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / run["accumulation"]
        dist.all_reduce(total)
        losses[step + 1] = total.item() / world
        if step + 1 == run["save_at"]:
            engine.save_checkpoint(run["save_dir"])
    engine.destroy()
    return losses


def main() -> None:
    """Every run of the list, in order."""
    deepspeed.init_distributed()
    torch.set_num_threads(1 if get_accelerator().device_name() == "cpu" else torch.get_num_threads())
    for run in json.loads(Path(sys.argv[1]).read_text()):
        losses = train(run)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(run["losses"]).write_text(json.dumps(losses))
    dist.destroy_process_group()
    # On a CPU torch's threads may abort an interpreter that takes itself apart.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
