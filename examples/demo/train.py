"""The quickstart's trainer: a small GPT under real DeepSpeed on CPU; it knows nothing of ckptd.

It exists so that ckptd is shown on what DeepSpeed really writes. Data depend only on (seed, step, sample
index), never on the world size, so a run resumed on another number of ranks must show the same losses.
Right after each save_checkpoint rank 0 records the SHA-256 of every file: what the judge compares with.
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

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as functional
from torch import nn

from examples.demo.ending import leave


def arguments() -> argparse.Namespace:
    """What a run is: where it saves, its records, its shape and the faults it plays."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--save-dir", type=Path, required=True)
    add("--records", type=Path, required=True, help="folder for train-<run>.jsonl")
    add("--name", required=True, help="of this run in the records")
    add("--stage", type=int, choices=(1, 2, 3), default=2)
    add("--last-step", type=int, required=True)
    add("--save-every", type=int, default=0, help="0: never")
    add("--load", choices=("none", "universal"), default="none")
    add("--tear-at", type=int, default=0, help="rank 1 delays its shard of the save at this step")
    add("--tear-seconds", type=float, default=300.0)
    add("--in-background", action="store_true", help="take the processor time that others leave")
    add("--step-seconds", type=float, default=0.0, help="least duration of a step")
    add("--init-seed", type=int, default=7)
    add("--hidden", type=int, default=192)
    add("--layers", type=int, default=6)
    add("--heads", type=int, default=6)
    add("--vocab", type=int, default=2048)
    add("--sequence", type=int, default=32)
    add("--batch", type=int, default=16, help="of all ranks together")
    return parser.parse_args()


class Block(nn.Module):  # type: ignore[misc]
    """Pre-norm attention and MLP; (batch, sequence, hidden) in and out."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Any) -> Any:
        """One layer."""
        batch, length, hidden = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.mlp(self.norm2(x))


class SmallGpt(nn.Module):  # type: ignore[misc]
    """Token ids and labels, both (batch, sequence) int64, to the mean cross entropy (a scalar)."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(a.vocab, a.hidden), nn.Embedding(a.sequence, a.hidden)
        self.blocks = nn.ModuleList(Block(a.hidden, a.heads) for _ in range(a.layers))
        self.norm, self.head = nn.LayerNorm(a.hidden), nn.Linear(a.hidden, a.vocab, bias=False)

    def forward(self, ids: Any, labels: Any) -> Any:
        """The loss."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch_for(a: argparse.Namespace, step: int, low: int, high: int) -> tuple[Any, Any]:
    """Samples low..high-1 of `step`: (ids, labels), each (high - low, sequence) int64."""
    rows = []
    for index in range(low, high):
        generator = torch.Generator().manual_seed(1_000_003 + (step % 16) * 997 + index)
        rows.append(torch.randint(0, a.vocab, (a.sequence + 1,), generator=generator))
    both = torch.stack(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def deepspeed_config(a: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """The ds_config: bf16, AdamW without JIT; gradients are reduced in fp32 so that rank counts compare."""
    return {
        "train_batch_size": a.batch,
        "train_micro_batch_size_per_gpu": max(1, a.batch // world_size),
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": a.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-4}},
        "checkpoint": {"load_universal": a.load == "universal"},
    }


class Records:
    """Append-only JSON lines of one rank; each line reaches the file before the next step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, kind: str, **fields: Any) -> None:
        """One line; `at` is unix time in seconds."""
        self._file.write(json.dumps({"at": time.time(), "kind": kind, **fields}) + "\n")


def described(path: Path, name: str) -> tuple[str, int, str]:
    """(name, bytes, SHA-256) of a file."""
    with path.open("rb") as source:
        return name, path.stat().st_size, hashlib.file_digest(source, "sha256").hexdigest()


def files_with_sha256(folder: Path) -> list[tuple[str, int, str]]:
    """(name, bytes, SHA-256) of every file of a checkpoint folder, sorted."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return [described(p, str(p.relative_to(folder))) for p in files]


def delay_shard(a: argparse.Namespace, records: Records) -> None:
    """From here on torch.save of this rank's optimizer shard waits: the save stays torn."""
    write = torch.save

    def slow(obj: Any, target: Any, *rest: Any, **named: Any) -> None:
        if "optim_states" in str(target):
            records.write("tearing", tag=f"global_step{a.tear_at}", file=Path(str(target)).name)
            time.sleep(a.tear_seconds)
        write(obj, target, *rest, **named)

    torch.save = slow


def save(a: argparse.Namespace, engine: Any, step: int, records: Records) -> None:
    """One save_checkpoint, then the record of what it wrote (rank 0)."""
    if step == a.tear_at and dist.get_rank() == 1:
        delay_shard(a, records)
    begin = time.time()
    if dist.get_rank() == 0:
        records.write("save-begin", step=step, tag=f"global_step{step}")
    client_state = {"iteration": step, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(str(a.save_dir), client_state=client_state)
    dist.barrier()
    if dist.get_rank() == 0:
        end = time.time()
        files = files_with_sha256(a.save_dir / f"global_step{step}")
        beside = [p for p in a.save_dir.iterdir() if p.is_file() and not p.name.startswith("latest")]
        records.write(
            "saved",
            step=step,
            tag=f"global_step{step}",
            begin=begin,
            seconds=end - begin,
            files=files,
            beside=[described(p, p.name) for p in sorted(beside)],
        )


def train(a: argparse.Namespace, engine: Any, records: Records) -> None:
    """Steps up to `last_step`, with saves on the way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    per_rank = a.batch // world_size
    for step in range(engine.global_steps, a.last_step):
        begin = time.monotonic()
        ids, labels = batch_for(a, step, rank * per_rank, (rank + 1) * per_rank)
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        if rank == 0:
            seconds = time.monotonic() - begin
            records.write("step", step=step + 1, loss=mean.item() / world_size, seconds=seconds)
        if a.save_every and (step + 1) % a.save_every == 0:
            save(a, engine, step + 1, records)
        time.sleep(max(0.0, a.step_seconds - (time.monotonic() - begin)))


def main() -> None:
    """One rank."""
    a = arguments()
    deepspeed.init_distributed(verbose=False)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(a.init_seed)
    model = SmallGpt(a)
    engine, *_ = deepspeed.initialize(
        model=model, config=deepspeed_config(a, world_size), model_parameters=list(model.parameters())
    )
    if a.in_background:
        os.nice(19)
    records = Records(a.records / (f"train-{a.name}.jsonl" if rank == 0 else f"rank{rank}-{a.name}.jsonl"))
    loaded = None
    if a.load == "universal":
        loaded, _ = engine.load_checkpoint(str(a.save_dir))
        if loaded is None:
            raise SystemExit(f"nothing to load in {a.save_dir}")
    if rank == 0:
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        records.write(
            "start",
            stage=a.stage,
            world_size=world_size,
            parameters=parameters,
            first_step=engine.global_steps,
            loaded=loaded and str(loaded),
        )
    train(a, engine, records)
    if rank == 0:
        records.write("end", step=engine.global_steps)
    leave()


if __name__ == "__main__":
    main()
