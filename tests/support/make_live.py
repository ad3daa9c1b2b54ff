"""Save real DeepSpeed checkpoints together with what the live engine held, read through DeepSpeed's own API.

Ranks of `python -m tests.support.make_live JOBS.json` (tests/support/ranks.py): make_ckpt.py's jobs. Beside a
save lies `<save_dir>/live.pt`: name → state → full tensor, and `buffers` and `frozen` as the model has them.
`python -m tests.support.make_live compare PAIRS` prints, for each [live.pt, dcp folder], what differs when
torch.distributed.checkpoint reads the folder.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.support import make_ckpt
from tests.support.make_dcp import read_folder
from tests.support.make_optimizers import LEARNING_RATES
from tests.support.make_optimizers import client_optimizer as _optimizer

_build = make_ckpt.build
PLAIN_SGD = "plain_sgd"
"""SGD without momentum: it keeps no state at all."""


def client_optimizer(name: str, groups: Any) -> torch.optim.Optimizer | None:
    """Return make_ckpt.py's optimizer, or SGD without momentum."""
    return torch.optim.SGD(groups, lr=LEARNING_RATES[name]) if name == PLAIN_SGD else _optimizer(name, groups)


def build(r: dict[str, Any], config: dict[str, Any], init_seed: int) -> Any:
    """Return the engine, which writes what it holds after each save."""
    engine = _build(r, config, init_seed)
    save = engine.save_checkpoint

    def saving(save_dir: str, **given: Any) -> Any:
        done = save(save_dir, **given)
        held = live(engine)
        if dist.get_rank() == 0:
            torch.save(held, Path(save_dir) / "live.pt")
        return done

    engine.save_checkpoint = saving
    return engine


def live(engine: Any) -> dict[str, Any]:
    """Return what the engine holds: masters and states gathered from all ranks, the rest of this one."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # SGD's momentum is made after they were
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [state for state in inner.state.values() if isinstance(state, dict)]
    keys = sorted({k for state in states for k, v in state.items() if torch.is_tensor(v) and v.numel() > 1})
    steps = {float(state["step"]) for state in states if "step" in state}
    held: dict[str, Any] = {"step": steps.pop() if len(steps) == 1 else None, "trained": {}, "others": {}}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or parameter.numel() == 0:
            with deepspeed.zero.GatheredParameters(parameter):
                held["others"][name] = parameter.detach().clone()
            continue
        found = {"fp32": safe_get_full_fp32_param(parameter)}
        found |= {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        held["trained"][name] = {key: value.detach().clone() for key, value in found.items()}
    held["others"] |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return held


def differences(live_file: str, folder: str) -> list[str]:
    """Return the names whose value in a dcp folder, as torch reads it, is not what the engine held."""
    held = torch.load(live_file, weights_only=True)
    found = read_folder(folder)
    kept = found["optimizer"].get("state", {})
    wrong: list[str] = []
    for name, value in held["others"].items():
        wrong += [] if _same(found["model"].get(name), value) else [f"{name} of the model"]
    for name, states in held["trained"].items():
        wrong += [] if _same(found["model"].get(name), states.pop("fp32")) else [f"{name} fp32"]
        if name not in kept and states and any(_same(found["model"][name], found["model"][n]) for n in kept):
            continue  # another name of a tied parameter, whose state goes by the first
        step = held["step"]
        wrong += [f"{name} {key}" for key, value in states.items() if not _same(kept[name].get(key), value)]
        if step is not None and float(kept[name].get("step", -1)) != step:
            wrong.append(f"{name} step")
    names = [name for group in found["optimizer"]["param_groups"] for name in group["params"]]
    return wrong + sorted(name for name in kept if name not in names)


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one.reshape(-1), other.reshape(-1))


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        print(json.dumps([differences(*pair) for pair in json.loads(sys.argv[2])]))
    else:
        # gloo waits, the shared-memory collective spins: on a busy machine that is most of a run
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        LEARNING_RATES[PLAIN_SGD] = LEARNING_RATES["sgd"]
        make_ckpt.build = build
        make_ckpt.client_optimizer = client_optimizer  # type: ignore[attr-defined]
        make_ckpt.main()
