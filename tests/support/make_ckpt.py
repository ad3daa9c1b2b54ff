"""Real DeepSpeed training on CPU: makes checkpoints and resumes from them for the tests.

Every rank runs `make_ckpt.py JOBS.json` (tests/support/ranks.py, or torchrun): JOBS is a list of
{"out", "recipe", "load": null | "zero" | "universal", "load_optimizer_states", "tag", "steps", "save_at",
"init_seed", "losses"}. Several jobs share one start, because the start costs more than the training. Data
depend on (seed, step, sample) alone, never on the world size, so a run resumed with another one must show
the same losses. Beside the losses lies `*.facts.json`: what the optimizer held after load and at each save.
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
from deepspeed.accelerator import get_accelerator
from torch import nn

from examples.demo.ending import leave
from tests.support.make_optimizers import DS_TYPES, LEARNING_RATES, client_optimizer

UC_KEY = "universal_checkpoint_info"
BATCH, SEQ, SEED = 12, 16, 7


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention; all tensors are (batch, sequence, heads, head size)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same over a sequence that is spread over ranks."""
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    over = DistributedAttention(attention, groups._get_sequence_parallel_group(), 2, 1)
    return over(q.contiguous(), k.contiguous(), v.contiguous(), 0)


class Block(nn.Module):  # type: ignore[misc]
    """One decoder block; with experts its MLP is DeepSpeed's own MoE layer, with sp > 1 it is Ulysses'."""

    def __init__(self, hidden: int, heads: int, experts: int = 0, ep: int = 1, sp: int = 0) -> None:
        super().__init__()
        self.heads, self.sp = heads, sp
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
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, h // self.heads).unbind(2)
        y = ulysses(q, k, v) if self.sp > 1 else attention(q, k, v)
        x = x + self.proj(y.reshape(b, t, h))
        m = self.mlp(self.ln2(x))
        return x + (m[0] if self.is_moe else m)


class Embed(nn.Module):  # type: ignore[misc]
    """Token and position embedding."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, hidden), nn.Embedding(SEQ, hidden)

    def forward(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        return self.tok(ids) + self.pos.weight[first : first + ids.shape[1]]


class TiedEmbed(nn.Module):  # type: ignore[misc]
    """Token embedding that a pipeline's first and last stage both hold."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, hidden) * 0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


def tied_head(module: TiedEmbed, x: torch.Tensor) -> torch.Tensor:
    """The last stage's use of it."""
    return F.linear(x, module.weight)


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
            Block(hidden, r["heads"], r["moe"] if i % 2 else 0, r["ep"], r["sp"]) for i in range(r["layers"])
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

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, first: int = 0) -> torch.Tensor:
        x = self.embed(ids, first)
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
    rate = LEARNING_RATES[r["optimizer"]]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // dp,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_config(r),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": rate}},
        "checkpoint": {"load_universal": universal},
    }
    if r["dtype"] != "fp32":
        config[r["dtype"]] = {"enabled": True}
    if r["dtype"] == "fp16":  # a scale that is seen to grow within the few steps
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2}
    if r["bf16_optimizer_states"]:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if r["grad_accum_dtype"]:
        config["data_types"] = {"grad_accum_dtype": r["grad_accum_dtype"]}
    if r["optimizer"] in DS_TYPES:
        config["optimizer"] = {"type": DS_TYPES[r["optimizer"]], "params": {"lr": rate}}
    if r["tp"]:  # DeepSpeed counts TP ranks in a given train_batch_size
        config["tensor_parallel"] = {"autotp_size": r["tp"]}
    else:
        config["train_batch_size"] = BATCH
    return config


def zero_config(r: dict[str, Any]) -> dict[str, Any]:
    """Its section `zero_optimization`."""
    # Stage 3's own linear layer would stay in this process and change the rounding of the runs after it.
    zero: dict[str, Any] = {"stage": r["stage"], "memory_efficient_linear": False}
    if r["sub_group_size"]:
        zero["sub_group_size"] = r["sub_group_size"]
    if r["round_robin"]:
        zero["round_robin_gradients"] = True
    if r["offload"] or r["optimizer"] == "cpu_adam":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return zero


def network(r: dict[str, Any]) -> nn.Module:
    """The model of a recipe."""
    hidden, vocab, heads = r["hidden"], r["vocab"], r["heads"]
    if r["llama"] or r["tp"]:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": r["layers"]}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=vocab, max_position_embeddings=SEQ, use_cache=False, **shape)
        )
    if not r["pipe"]:
        return Net(r)
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    blocks = [LayerSpec(Block, hidden, heads) for _ in range(r["layers"])]
    ends: tuple[LayerSpec, ...] = (LayerSpec(Embed, vocab, hidden), LayerSpec(Head, vocab, hidden))
    if r["pipe_tied"]:
        tied = ("embed", TiedEmbed, vocab, hidden)
        ends = (TiedLayerSpec(*tied), TiedLayerSpec(*tied, forward_fn=tied_head))
    return PipelineModule(
        [ends[0], *blocks, ends[1]], num_stages=r["pipe"], loss_fn=cross_entropy, partition_method="uniform"
    )


def build(r: dict[str, Any], config: dict[str, Any], init_seed: int) -> Any:
    """The engine of a recipe."""
    torch.manual_seed(init_seed)
    model = network(r)
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
    optimizer = client_optimizer(r["optimizer"], groups)
    given: dict[str, Any] = {"model_parameters": groups} if optimizer is None else {"optimizer": optimizer}
    if r["sp"]:
        given["mpu"] = sequence_groups(r["sp"])
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    return engine


def sequence_groups(sp: int) -> Any:
    """DeepSpeed's process groups of Ulysses, which exist once per process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(sp)
    return parallel_state_sp


def optimizer_facts(engine: Any) -> dict[str, Any]:
    """Steps, names and settings that the optimizer inside DeepSpeed's own holds."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [s for s in inner.state.values() if isinstance(s, dict)]
    return {
        "steps": sorted({float(s["step"]) for s in states if "step" in s}),
        "states": sorted({key for s in states for key in s}),
        "param_groups": [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in inner.param_groups
        ],
    }


def loss_of(
    engine: Any, r: dict[str, Any], ids: torch.Tensor, labels: torch.Tensor, seq: int
) -> torch.Tensor:
    """One global step; `seq` is this rank's part of the sequence (Ulysses)."""
    if r["pipe"]:
        return engine.train_batch(iter([(ids, labels)]))
    if r["llama"] or r["tp"]:
        loss = cross_entropy(engine(input_ids=ids).logits, labels)
    elif r["sp"]:
        per = SEQ // r["sp"]
        ids, labels = (x[:, seq * per : (seq + 1) * per].contiguous() for x in (ids, labels))
        loss = engine(ids, labels, seq * per)
    else:
        loss = engine(ids, labels)
    engine.backward(loss)
    engine.step()
    return loss


def run(job: dict[str, Any]) -> tuple[dict[int, float], dict[str, Any]]:
    """One training run; returns {global step: mean loss over the global batch} and optimizer facts."""
    r = job["recipe"]
    world, rank = dist.get_world_size(), dist.get_rank()
    apart = max(r["pipe"], r["tp"], r["sp"], 1)
    dp = world // apart
    engine = build(r, ds_config(r, dp, universal=job["load"] == "universal"), job["init_seed"])
    facts: dict[str, Any] = {}
    if job["load"]:
        path, _ = engine.load_checkpoint(
            job["out"], tag=job["tag"], load_optimizer_states=job.get("load_optimizer_states", True)
        )
        if path is None:
            raise SystemExit(f"{job['out']}/{job['tag']} was not loaded")
        facts["loaded"] = optimizer_facts(engine)
    losses: dict[int, float] = {}
    first, per = engine.global_steps, BATCH // dp
    # The ranks of a pipeline stage follow each other; with tensor and sequence parallelism a replica's do.
    replica = rank // apart if r["tp"] or r["sp"] else rank % dp
    for step in range(first, first + job["steps"]):
        ids, labels = batch_for(r["vocab"], step, replica * per, (replica + 1) * per)
        mean = loss_of(engine, r, ids, labels, rank % apart).detach().float().clone()
        dist.all_reduce(mean)
        losses[step + 1] = mean.item() / world
        if step + 1 in job["save_at"]:
            client: dict[str, Any] = {"iteration": step + 1}
            if r["universal_info"] and not r["moe"]:
                client[UC_KEY] = {"universal_checkpoint_version": 0.2}
            engine.save_checkpoint(job["out"], client_state=client)
            facts[f"saved{step + 1}"] = optimizer_facts(engine)
    engine.destroy()
    return losses, facts


def main() -> None:
    """Run every job of the list; rank 0 writes losses beside each save_dir, or where `losses` says."""
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    # DeepSpeed refuses fp16 on a CPU without fast fp16; slow fp16 is as good for a checkpoint.
    get_accelerator().is_fp16_supported = lambda: True
    for job in json.loads(Path(sys.argv[1]).read_text()):
        losses, facts = run(job)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(job["losses"]).write_text(json.dumps(losses))
            Path(job["losses"]).with_suffix(".facts.json").write_text(json.dumps(facts))
    leave()


if __name__ == "__main__":
    main()
