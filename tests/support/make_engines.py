"""Real DeepSpeed saves through its other engines and options, with what the engine itself held.

Ranks of `python -m tests.support.make_engines JOBS.json` (tests/support/ranks.py): make_ckpt.py's jobs, each
with a `setting` that is merged into DeepSpeed's configuration, and make_experts.py's keys of a recipe.
`split` trains split_net.py's model, with an mpu where `tp` is set too (then `sp` is set alike: make_ckpt.py
gives an mpu for it); `expert_tp` splits its experts as well. Beside a save lies `<save_dir>/held.pt`: every
parameter's master and optimizer states as DeepSpeed gathers them from the live engine, which is what a
conversion must give; of several tensor ranks each rank's, joined by what the model itself knows of its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import deepspeed.comm.torch
import deepspeed.io.fast_file_writer
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.support import make_ckpt, make_experts, split_net
from tests.support.make_optimizers import LEARNING_RATES
from tests.support.make_optimizers import client_optimizer as _optimizer

_gather = deepspeed.comm.all_gather_into_tensor
_config, _build, _run = make_experts.ds_config, make_ckpt.build, make_ckpt.run
COLUMNS_OF_LLAMA, ROWS_OF_LLAMA = (
    r".*\.(q|k|v|gate|up)_proj\.weight|lm_head\.weight",
    r".*\.(o|down)_proj\.weight",
)
setting: dict[str, Any] = {}
has_held = True
mpu: split_net.Mpu | None = None


def merged(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`config` with the values of `more`, section by section."""
    made = dict(config)
    for key, value in more.items():
        inner = made.get(key)
        made[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return made


def client_optimizer(name: str, groups: Any) -> torch.optim.Optimizer | None:
    """Return make_ckpt.py's optimizer, or DeepSpeed's Muon: matrices by it, the rest by its own Adam."""
    if name != "muon":
        return _optimizer(name, groups)
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for parameter in groups:
        parameter.use_muon = parameter.dim() == 2
    halves = [
        {"params": [p for p in groups if p.use_muon], "use_muon": True, "momentum": 0.95},
        {
            "params": [p for p in groups if not p.use_muon],
            "use_muon": False,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
        },
    ]
    return MuonWithAuxAdam([half | {"lr": 0.01, "weight_decay": 0.0} for half in halves])


def ds_config(r: dict[str, Any], dp: int, *, universal: bool) -> dict[str, Any]:
    """Return make_ckpt.py's configuration with the job's setting; with an mpu nothing of AutoTP."""
    config = merged(_config(r, dp, universal=universal), setting)
    if r["split"]:
        config.pop("tensor_parallel", None)
    return config


def network(r: dict[str, Any]) -> torch.nn.Module:
    """Return make_ckpt.py's model, make_experts.py's or the split one."""
    global mpu
    if r["pipe"] and r["moe"]:
        return pipeline_of_experts(r)
    if not r["split"]:
        return make_experts.network(r)
    mpu = split_net.Mpu(r["tp"]) if r["tp"] > 1 else None
    return split_net.SplitNet(r, mpu)


def given_mpu(sp: int) -> Any:
    """Return the mpu that the model was made with."""
    return mpu


def pipeline_of_experts(r: dict[str, Any]) -> torch.nn.Module:
    """Return the split model as a pipeline, without tensor parallelism."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    blocks = [LayerSpec(split_net.Block, r, None, is_moe=bool(i % 2)) for i in range(r["layers"])]
    embed, head = (LayerSpec(layer, r, None) for layer in (split_net.Embed, split_net.Head))
    return PipelineModule(
        [embed, *blocks, head],
        num_stages=r["pipe"],
        loss_fn=make_ckpt.cross_entropy,
        partition_method="uniform",
    )


def all_gather_into_tensor(output: Any, given: Any, *group: Any, **more: Any) -> Any:
    """Gather as DeepSpeed's experts do; gloo takes a flat buffer for flat tensors alone."""
    return _gather(output.view(-1), given.reshape(-1), *group, **more)


def build(r: dict[str, Any], config: dict[str, Any], init_seed: int) -> Any:
    """Return the engine, which notes what it holds after each save."""
    accelerator = get_accelerator()
    if is_partial():  # DeepSpeed tells its two optimizers apart by the device, and here both are this one
        accelerator._name = "cpu:0"
    try:
        engine = _build(r, config, init_seed)
    finally:
        accelerator._name = "cpu"
    save = engine.save_checkpoint
    info = split_net.universal_info(r["vocab"]) if r["split"] else None
    if r["split"] and r["moe"]:  # with MoE layers the key is reserved
        setattr(engine.module, make_ckpt.UC_KEY, info)

    def saving(save_dir: str, **given: Any) -> Any:
        if info is not None and not r["moe"]:
            given["client_state"][make_ckpt.UC_KEY] = info
        done = save(save_dir, **given)
        held = held_by(engine, r) if has_held else {}
        if has_held and dist.get_rank() == 0:
            torch.save(held, Path(save_dir) / "held.pt")
        return done

    engine.save_checkpoint = saving
    return engine


def is_partial() -> bool:
    """Tell whether a part of the optimizer stays on the GPU (`offload_optimizer.ratio`)."""
    offload = setting.get("zero_optimization", {}).get("offload_optimizer", {})
    return bool(offload.get("ratio", 1) < 1)


Part = tuple[str, int, int]
"""A parameter's name, its tensor rank and its expert-parallel rank."""


def held_by(engine: Any, r: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return name → state → full tensor of every trained parameter, of all ranks, on rank 0.

    Experts of several expert-parallel ranks follow one another along dimension 0.
    """
    if engine.zero_optimization_stage() == 0:
        return _unsharded(engine)
    parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    places = {name: _part(name, p, r) for name, p in parameters.items()}
    is_cut = engine.zero_optimization_stage() in (1, 2)
    mine = list(_pieces(engine, parameters) if is_cut else _gathered(parameters))
    every: list[Any] = [None] * dist.get_world_size()
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    dist.all_gather_object(every, (places, shapes, mine))
    parts: dict[Part, dict[str, torch.Tensor]] = {}
    for of_rank, shapes, rows in every:
        for name, key, at, piece in rows:
            shape = shapes[name]
            whole = parts.setdefault(of_rank[name], {}).setdefault(key, torch.zeros(shape)).view(-1)
            if at >= 0:
                whole[at : at + piece.numel()] = piece.float()
            else:  # of every rank with a piece of it
                assert not whole.any() or torch.equal(whole, piece.float()), f"ranks differ in {name}"
                whole.copy_(piece)
    return _joined(parts, r)


def _unsharded(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the same without ZeRO: of the wrapper's masters, or of the trainer's own optimizer."""
    held, names = engine.optimizer, {p: name for name, p in engine.module.named_parameters()}
    inner = getattr(held, "optimizer", held)
    masters: list[tuple[Any, torch.Tensor, dict[str, Any]]] = []
    for g, group in enumerate(inner.param_groups):
        if hasattr(held, "fp32_groups_flat"):
            flat, at = held.fp32_groups_flat[g], 0
            for parameter in held.fp16_groups[g]:
                here = slice(at, at + parameter.numel())
                state = {k: v[here] for k, v in inner.state[flat].items() if torch.is_tensor(v) and v.dim()}
                masters.append((parameter, flat[here], state))
                at += parameter.numel()
        else:
            own = held.fp16_groups[g] if hasattr(held, "fp16_groups") else group["params"]
            masters += [(p, m, inner.state[m]) for p, m in zip(own, group["params"], strict=True)]
    return {
        names[parameter]: {"fp32": master.detach().clone().float()}
        | {k: v.detach().clone().float() for k, v in state.items() if torch.is_tensor(v) and v.dim()}
        for parameter, master, state in masters
    }


def _part(name: str, parameter: Any, r: dict[str, Any]) -> Part:
    """Return which part of a parameter this rank has a piece of."""
    tp, ep = dist.get_rank() % max(r["tp"], 1), 0
    if not getattr(parameter, "allreduce", True):
        ep = groups._get_expert_parallel_rank(parameter.group_name)
        tp = tp if r["expert_tp"] else 0
    return name, tp, ep


def _gathered(parameters: dict[str, Any]) -> Iterator[tuple[str, str, int, torch.Tensor]]:
    """Yield the states of stage 3 as DeepSpeed itself gathers them."""
    for name, parameter in parameters.items():
        is_muon = getattr(parameter, "use_muon", False)
        keys = ["momentum_buffer"] if is_muon else ["exp_avg", "exp_avg_sq"]
        if is_partial():  # DeepSpeed asks one of the two optimizers alone
            keys = []
        states = {"fp32": safe_get_full_fp32_param(parameter)}
        states |= {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        for key, value in states.items():
            yield name, key, 0, value.detach().clone().float().flatten()


def _pieces(engine: Any, parameters: dict[str, Any]) -> Iterator[tuple[str, str, int, torch.Tensor]]:
    """Yield this rank's pieces at stages 1 and 2, as the engine's addresses say; -1: a whole parameter."""
    zero, names = engine.optimizer, {parameter: name for name, parameter in parameters.items()}
    for g, group in enumerate(zero.optimizer.param_groups):
        flat = group["params"][0]
        state = {
            key: value for key, value in zero.optimizer.state.get(flat, {}).items() if torch.is_tensor(value)
        }
        momentum, at = state.pop("momentum_buffer", None), 0
        for parameter in zero.params_in_partition[g] if momentum is not None else ():
            count = parameter.numel()
            yield names[parameter], "momentum_buffer", -1, momentum[at : at + count].clone()
            at += count
        for parameter in zero.bit16_groups[g]:
            if (mapped := parameter._hp_mapping) is None:
                continue
            here, there = mapped.hp_fragment_address, mapped.lp_fragment_address.start
            for key, value in {"fp32": flat, **state}.items():
                if value.shape == flat.shape:
                    piece = value.detach()[here.start : here.start + here.numel].clone()
                    yield names[parameter], key, there, piece


def _joined(parts: dict[Part, dict[str, torch.Tensor]], r: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of each parameter: experts along dimension 0, then tensor ranks as the model splits."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in dict.fromkeys(name for name, _, _ in parts):
        tps = sorted({tp for n, tp, _ in parts if n == name})
        eps = sorted({ep for n, _, ep in parts if n == name})
        for key in parts[name, tps[0], eps[0]]:
            by_expert = [_of_tensor_ranks(name, [parts[name, tp, ep][key] for tp in tps], r) for ep in eps]
            found.setdefault(name, {})[key] = torch.cat(by_expert) if len(eps) > 1 else by_expert[0]
    return found


def _of_tensor_ranks(name: str, parts: list[torch.Tensor], r: dict[str, Any]) -> torch.Tensor:
    """Join one state of a parameter as the model splits it."""
    columns, rows = (split_net.COLUMNS, split_net.ROWS) if r["split"] else (COLUMNS_OF_LLAMA, ROWS_OF_LLAMA)
    if len(parts) == 1:
        return parts[0]
    if re.fullmatch(rows, name):
        return torch.cat(parts, 1)
    if r["split"] and re.fullmatch(split_net.HALVES, name):
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
    if r["split"] and re.fullmatch(split_net.VOCABULARY, name):
        return torch.cat(parts)[: r["vocab"]]
    if re.fullmatch(columns, name):
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), f"tensor ranks differ in {name}"
    return parts[0]


class _NoUtils:
    """The op that casts storages to bytes, which only a changed torch.save calls."""

    cast_to_byte_tensor = None

    def load(self) -> _NoUtils:
        return self


def run(job: dict[str, Any]) -> Any:
    """Run one job with its setting; `has_held` false: DeepSpeed cannot gather the states, as of pipelined
    swapping."""
    global has_held
    has_held = job.get("has_held", True)
    setting.clear()
    setting.update(job.get("setting", {}))
    return _run(job)


def patch() -> None:
    """Let DeepSpeed's writers run without a device."""
    # gloo waits, the shared-memory collective spins: on a busy machine that is most of a run
    deepspeed.comm.torch.build_shm_op = lambda: None
    # FastPersist's writer pins its buffer for a device, and asks for an op that it calls with another torch
    deepspeed.io.fast_file_writer.UtilsBuilder = _NoUtils
    torch.Tensor.pin_memory = lambda self, *_: self


if __name__ == "__main__":
    patch()
    make_ckpt.ds_config, make_ckpt.build, make_ckpt.run = ds_config, build, run
    deepspeed.comm.all_gather_into_tensor = all_gather_into_tensor
    make_ckpt.network, make_ckpt.sequence_groups = network, given_mpu
    make_ckpt.client_optimizer = client_optimizer  # type: ignore[attr-defined]
    LEARNING_RATES["muon"] = 0.01
    make_ckpt.main()
