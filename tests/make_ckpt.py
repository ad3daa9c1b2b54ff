"""Real DeepSpeed training on CPU, run by torchrun: makes checkpoints and resumes from them for the tests.

`python -m torch.distributed.run --standalone --nproc_per_node N make_ckpt.py JOBS.json`: JOBS is a list of
{"out", "recipe", "load": null | "zero" | "universal", "tag", "steps", "save_at", "init_seed"}. Several jobs
share one start, because the start costs more than the training. Data depend on (seed, step, sample) alone,
never on the world size, so a run resumed with another one must show the same losses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

UC_KEY = "universal_checkpoint_info"
BATCH, SEQ, SEED = 8, 16, 7


class Block(nn.Module):  # type: ignore[misc]
    """One decoder block; with experts its MLP is DeepSpeed's own MoE layer."""

    def __init__(self, hidden: int, heads: int, experts: int = 0, ep: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.is_moe = experts > 0
        if self.is_moe:
            from deepspeed.moe.layer import MoE

            self.mlp = MoE(hidden, expert=self.mlp, num_experts=experts, ep_size=ep, k=1, min_capacity=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.proj(y)
        m = self.mlp(self.ln2(x))
        return x + (m[0] if self.is_moe else m)


class Embed(nn.Module):  # type: ignore[misc]
    """Token and position embedding."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, hidden), nn.Embedding(SEQ, hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tok(ids) + self.pos.weight[: ids.shape[1]]


class Head(nn.Module):  # type: ignore[misc]
    """Norm and projection to the vocabulary."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.ln, self.lm = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm(self.ln(x))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Net(nn.Module):  # type: ignore[misc]
    """A tiny GPT; `odd` adds a parameter of 7 elements and one of none at all."""

    def __init__(self, r: dict[str, Any]) -> None:
        super().__init__()
        hidden, vocab = r["hidden"], r["vocab"]
        self.embed = Embed(vocab, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, r["heads"], r["moe"] if i % 2 else 0, r["ep"]) for i in range(r["layers"])
        )
        self.head = Head(vocab, hidden)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("positions", torch.arange(5))
        if r["odd"]:
            self.odd = nn.Parameter(torch.linspace(-1, 1, 7))
        if r["tie"]:
            self.head.lm.weight = self.embed.tok.weight
        if r["freeze"]:
            self.embed.pos.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if hasattr(self, "odd"):
            x = x + self.odd.sum()
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), labels)


def batch_for(vocab: int, step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples [first, last) of a step."""
    rows = []
    for i in range(first, last):
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + (step % 4) * 997 + i)
        rows.append(torch.randint(0, vocab, (SEQ + 1,), generator=generator))
    tokens = torch.stack(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ds_config(r: dict[str, Any], dp: int, *, universal: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe."""
    zero: dict[str, Any] = {"stage": r["stage"]}
    if r["sub_group_size"]:
        zero["sub_group_size"] = r["sub_group_size"]
    if r["round_robin"]:
        zero["round_robin_gradients"] = True
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dp,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3}},
        "checkpoint": {"load_universal": universal},
    }
    if r["dtype"] != "fp32":
        config[r["dtype"]] = {"enabled": True}
    if r["grad_accum_dtype"]:
        config["data_types"] = {"grad_accum_dtype": r["grad_accum_dtype"]}
    return config


def build(r: dict[str, Any], config: dict[str, Any], init_seed: int) -> Any:
    """The engine of a recipe."""
    torch.manual_seed(init_seed)
    model: nn.Module
    if r["pipe"]:
        from deepspeed.pipe import LayerSpec, PipelineModule

        blocks = [LayerSpec(Block, r["hidden"], r["heads"]) for _ in range(r["layers"])]
        specs = [LayerSpec(Embed, r["vocab"], r["hidden"]), *blocks, LayerSpec(Head, r["vocab"], r["hidden"])]
        model = PipelineModule(specs, num_stages=r["pipe"], loss_fn=cross_entropy, partition_method="uniform")
    else:
        model = Net(r)
    if r["moe"]:  # with MoE layers the key is reserved: it must come from the module
        setattr(model, UC_KEY, {"universal_checkpoint_version": 0.2})
    wanted = [p for p in model.parameters() if p.requires_grad]
    groups: Any = wanted
    if r["two_groups"]:
        groups = [
            {"params": [p for p in wanted if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in wanted if p.dim() <= 1], "weight_decay": 0.0},
        ]
    if r["moe"]:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer({"params": wanted, "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    return engine


def run(job: dict[str, Any]) -> dict[int, float]:
    """One training run; returns {global step: mean loss over the global batch}."""
    r = job["recipe"]
    world, rank = dist.get_world_size(), dist.get_rank()
    dp = world // r["pipe"] if r["pipe"] else world
    engine = build(r, ds_config(r, dp, universal=job["load"] == "universal"), job["init_seed"])
    if job["load"]:
        path, _ = engine.load_checkpoint(job["out"], tag=job["tag"])
        if path is None:
            raise SystemExit(f"{job['out']}/{job['tag']} was not loaded")
    losses: dict[int, float] = {}
    first, per = engine.global_steps, BATCH // dp
    for step in range(first, first + job["steps"]):
        ids, labels = batch_for(r["vocab"], step, (rank % dp) * per, (rank % dp + 1) * per)
        if r["pipe"]:
            loss = engine.train_batch(iter([(ids, labels)]))
        else:
            loss = engine(ids, labels)
            engine.backward(loss)
            engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses[step + 1] = mean.item() / world
        if step + 1 in job["save_at"]:
            client: dict[str, Any] = {"iteration": step + 1}
            if r["universal_info"] and not r["moe"]:
                client[UC_KEY] = {"universal_checkpoint_version": 0.2}
            engine.save_checkpoint(job["out"], client_state=client)
    engine.destroy()
    return losses


def main() -> None:
    """Run every job of the list; rank 0 writes losses beside each save_dir, or where `losses` says."""
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        losses = run(job)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(job["losses"]).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
