"""A tiny GPT whose matrices are split over tensor-parallel ranks, with an mpu of Megatron's kind beside it.

Every kind of split that Megatron's own model has: a vocabulary with padded rows, by columns with and without
two halves (gate and up projection), by rows with a bias that every rank holds, and replicated parameters.
DeepSpeed is told nothing but the mpu; `UNIVERSAL_INFO` is what Megatron-DeepSpeed says of its model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed.comm as dist
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

COLUMNS = r".*\.qkv\.(weight|bias)$"
HALVES, ROWS, VOCABULARY = r".*\.up\.weight$", r".*\.(down|proj)\.weight$", r".*\btok\.weight$"
REPLICATED = r".*(\bln\d?\.(weight|bias)|\bpos\.weight|\blm\.weight|\b(down|proj)\.bias|\bgate\.wg\.weight)$"
SEQ = 16


def universal_info(vocab: int) -> dict[str, Any]:
    """Return the description that the trainer gives in client_state."""
    return {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [REPLICATED],
        "parameter_with_row_parallelism_patterns": [ROWS],
        "parameter_with_2_sub_params_cat_dim_0": [HALVES],
        "vocabulary_parameter_patterns": [VOCABULARY],
        "original_vocab_size": vocab,
    }


class Mpu:
    """Process groups of `tp` neighbouring ranks, as Megatron numbers them; the others are data parallel."""

    def __init__(self, tp: int) -> None:
        world, rank = int(dist.get_world_size()), int(dist.get_rank())
        self.tp, self.dp = tp, world // tp
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        self.tp_ranks = [[d * tp + t for t in range(tp)] for d in range(self.dp)]
        self.dp_ranks = [[d * tp + t for d in range(self.dp)] for t in range(tp)]
        made = [dist.new_group(ranks) for ranks in (*self.tp_ranks, *self.dp_ranks)]
        self.tp_group, self.dp_group = made[self.dp_rank], made[self.dp + self.tp_rank]

    def __deepcopy__(self, _: Any) -> Mpu:
        return self  # experts are copies of one module, the process groups are not

    def get_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.tp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self.tp_ranks[self.dp_rank][0]

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_data_parallel_group(self) -> Any:
        return self.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_ranks[self.tp_rank]


class _Copy(torch.autograd.Function):  # type: ignore[misc]
    """Forward as it is; the gradients of all tensor ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mpu: Mpu) -> torch.Tensor:
        ctx.mpu = mpu
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.mpu.tp_group)
        return grad, None


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    """The values of all tensor ranks added up; each has the whole gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, mpu: Mpu) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=mpu.tp_group)
        return x

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _split(weight: torch.Tensor, dim: int, mpu: Mpu | None, halves: int = 1) -> nn.Parameter:
    """Return this rank's part of a matrix that all ranks made alike."""
    if mpu is None:
        return nn.Parameter(weight.detach().clone())
    parts = [half.chunk(mpu.tp, dim)[mpu.tp_rank] for half in weight.detach().chunk(halves, dim)]
    made = nn.Parameter(torch.cat(parts, dim).clone())
    made.model_parallel = made.tensor_model_parallel = True  # DeepSpeed's norm counts others once
    return made


class Columns(nn.Module):  # type: ignore[misc]
    """A linear layer whose outputs are split."""

    def __init__(self, width: int, outputs: int, mpu: Mpu | None, halves: int = 1) -> None:
        super().__init__()
        whole, self.mpu = nn.Linear(width, outputs), mpu
        self.weight = _split(whole.weight, 0, mpu, halves)
        self.bias = _split(whole.bias, 0, mpu) if halves == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_Copy.apply(x, self.mpu) if self.mpu else x, self.weight, self.bias)


class Rows(nn.Module):  # type: ignore[misc]
    """A linear layer whose inputs are split; every rank has the whole bias."""

    def __init__(self, width: int, outputs: int, mpu: Mpu | None) -> None:
        super().__init__()
        whole, self.mpu = nn.Linear(width, outputs), mpu
        self.weight, self.bias = _split(whole.weight, 1, mpu), nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        return (_Sum.apply(y, self.mpu) if self.mpu else y) + self.bias


class Vocabulary(nn.Module):  # type: ignore[misc]
    """An embedding whose rows are split, padded to as many for each rank."""

    def __init__(self, vocab: int, hidden: int, mpu: Mpu | None) -> None:
        super().__init__()
        whole, self.mpu = nn.Embedding(vocab, hidden).weight, mpu
        self.weight = _split(F.pad(whole, (0, 0, 0, -vocab % (mpu.tp if mpu else 1))), 0, mpu)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.mpu is None:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        here = ids - self.mpu.tp_rank * rows
        inside = (here >= 0) & (here < rows)
        found = F.embedding(here.clamp(0, rows - 1), self.weight) * inside.unsqueeze(-1)
        return _Sum.apply(found, self.mpu)


class Mlp(nn.Module):  # type: ignore[misc]
    """Gate and up projection in one matrix, and down."""

    def __init__(self, hidden: int, mpu: Mpu | None) -> None:
        super().__init__()
        self.up, self.down = Columns(hidden, 4 * hidden, mpu, 2), Rows(2 * hidden, hidden, mpu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):  # type: ignore[misc]
    """One decoder block; a head's query, key and value are neighbours, so that ranks follow one another."""

    def __init__(self, r: dict[str, Any], mpu: Mpu | None, *, is_moe: bool) -> None:
        super().__init__()
        hidden, self.size, self.is_moe = r["hidden"], r["hidden"] // r["heads"], is_moe
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = Columns(hidden, 3 * hidden, mpu), Rows(hidden, hidden, mpu)
        self.mlp: nn.Module = Mlp(hidden, mpu if not is_moe or r["expert_tp"] else None)
        if is_moe:
            from deepspeed.moe.layer import MoE

            self.mlp = MoE(
                hidden,
                expert=self.mlp,
                num_experts=r["moe"],
                ep_size=r["ep"],
                capacity_factor=r["moe"],  # as many as there are tokens: none is dropped, by chance or not
                use_rts=False,
                enable_expert_tensor_parallelism=bool(r["expert_tp"]),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, -1, 3 * self.size).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(y.reshape(b, t, -1))
        m = self.mlp(self.ln2(x))
        return x + (m[0] if self.is_moe else m)


class Embed(nn.Module):  # type: ignore[misc]
    """Token and position embedding."""

    def __init__(self, r: dict[str, Any], mpu: Mpu | None) -> None:
        super().__init__()
        self.tok, self.pos = Vocabulary(r["vocab"], r["hidden"], mpu), nn.Embedding(SEQ, r["hidden"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tok(ids) + self.pos.weight


class Head(nn.Module):  # type: ignore[misc]
    """Norm and projection to the vocabulary, which every rank has whole."""

    def __init__(self, r: dict[str, Any], _: Mpu | None) -> None:
        super().__init__()
        self.ln, self.lm = nn.LayerNorm(r["hidden"]), nn.Linear(r["hidden"], r["vocab"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm(self.ln(x))


class SplitNet(nn.Module):  # type: ignore[misc]
    """The model; `r["moe"]` experts in every second block."""

    def __init__(self, r: dict[str, Any], mpu: Mpu | None) -> None:
        super().__init__()
        self.embed, self.head = Embed(r, mpu), Head(r, mpu)
        self.blocks = nn.ModuleList(
            Block(r, mpu, is_moe=bool(r["moe"] and i % 2)) for i in range(r["layers"])
        )

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=self.head(x))
