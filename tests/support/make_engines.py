"""Real DeepSpeed saves through its other engines and options, with what the engine itself held.

Ranks of `python -m tests.support.make_engines JOBS.json` (tests/support/ranks.py): make_ckpt.py's jobs, each
with a `setting` that is merged into DeepSpeed's configuration. Beside a save lies `<save_dir>/held.pt`:
every parameter's master and optimizer states as DeepSpeed gathers them from the live engine, which is what a
conversion must give.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import deepspeed.comm.torch
import deepspeed.io.fast_file_writer
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.support import make_ckpt
from tests.support.make_optimizers import LEARNING_RATES
from tests.support.make_optimizers import client_optimizer as _optimizer

_config, _build, _run = make_ckpt.ds_config, make_ckpt.build, make_ckpt.run
setting: dict[str, Any] = {}
has_held = True


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
    """Return make_ckpt.py's configuration with the job's setting."""
    return merged(_config(r, dp, universal=universal), setting)


def build(r: dict[str, Any], config: dict[str, Any], init_seed: int) -> Any:
    """Return the engine, which notes what it holds after each save."""
    accelerator = get_accelerator()
    if is_partial():  # DeepSpeed tells its two optimizers apart by the device, and here both are this one
        accelerator._name = "cpu:0"
    try:
        engine = _build(r, config, init_seed)
    finally:
        accelerator._name = "cpu"
    if not has_held:
        return engine
    save = engine.save_checkpoint

    def saving(save_dir: str, **given: Any) -> Any:
        done = save(save_dir, **given)
        held = held_by(engine)
        if dist.get_rank() == 0:
            torch.save(held, Path(save_dir) / "held.pt")
        return done

    engine.save_checkpoint = saving
    return engine


def is_partial() -> bool:
    """Tell whether a part of the optimizer stays on the GPU (`offload_optimizer.ratio`)."""
    offload = setting.get("zero_optimization", {}).get("offload_optimizer", {})
    return bool(offload.get("ratio", 1) < 1)


def held_by(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return name → state → full tensor of every trained parameter."""
    if engine.zero_optimization_stage() == 0:
        return _unsharded(engine)
    if engine.zero_optimization_stage() in (1, 2):
        return _joined(engine, {name: p for name, p in engine.module.named_parameters() if p.requires_grad})
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            is_muon = getattr(parameter, "use_muon", False)
            keys = ["momentum_buffer"] if is_muon else ["exp_avg", "exp_avg_sq"]
            if is_partial():  # DeepSpeed asks one of the two optimizers alone
                keys = []
            states = {"fp32": safe_get_full_fp32_param(parameter)}
            states |= {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
            found[name] = {key: value.detach().clone().float() for key, value in states.items()}
    return found


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


def _joined(engine: Any, parameters: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the same at stages 1 and 2, out of the pieces of every rank, as the engine's addresses say."""
    zero, names = engine.optimizer, {parameter: name for name, parameter in parameters.items()}
    mine: list[tuple[str, str, int, torch.Tensor]] = []
    for g, group in enumerate(zero.optimizer.param_groups):
        flat = group["params"][0]
        state = {
            key: value for key, value in zero.optimizer.state.get(flat, {}).items() if torch.is_tensor(value)
        }
        momentum, at = state.pop("momentum_buffer", None), 0
        for parameter in zero.params_in_partition[g] if momentum is not None else ():
            count = parameter.numel()
            mine.append((names[parameter], "momentum_buffer", -1, momentum[at : at + count].clone()))
            at += count
        for parameter in zero.bit16_groups[g]:
            if (mapped := parameter._hp_mapping) is None:
                continue
            here, there = mapped.hp_fragment_address, mapped.lp_fragment_address.start
            for key, value in {"fp32": flat, **state}.items():
                if value.shape == flat.shape:
                    piece = value.detach()[here.start : here.start + here.numel].clone()
                    mine.append((names[parameter], key, there, piece))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    for name, key, at, piece in (row for rows in every for row in rows):
        whole = found[name].setdefault(key, torch.zeros(parameters[name].numel()))
        if at >= 0:
            whole[at : at + piece.numel()] = piece
        else:  # of every rank with a piece of it
            assert not whole.any() or torch.equal(whole, piece.float()), f"ranks differ in {name}"
            whole.copy_(piece)
    return found


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
    make_ckpt.client_optimizer = client_optimizer  # type: ignore[attr-defined]
    LEARNING_RATES["muon"] = 0.01
    make_ckpt.main()
