"""Optimizers for make_ckpt.py: torch's, DeepSpeed's own on CPU, and two small ones that keep other states."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

DS_TYPES = {"fused_adam": "AdamW", "cpu_adam": "AdamW"}
"""Made by DeepSpeed from its configuration: FusedAdam, and with offload DeepSpeedCPUAdam."""
LEARNING_RATES = {
    "adamw": 1e-3,
    "fused_adam": 1e-3,
    "cpu_adam": 1e-3,
    "group_step_adam": 1e-3,
    "lion": 3e-4,
    "cpu_lion": 3e-4,
    "sgd": 0.3,
    "adagrad": 1e-2,
    "cpu_adagrad": 1e-2,
}
"""By optimizer; large enough that a resume without its states shows in the losses."""


def client_optimizer(name: str, groups: Any) -> torch.optim.Optimizer | None:
    """The optimizer to hand to DeepSpeed; None where its configuration names one."""
    rate = LEARNING_RATES[name]
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=rate),
        "sgd": lambda: torch.optim.SGD(groups, lr=rate, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=rate),
        "lion": lambda: Lion(groups, lr=rate),
        "group_step_adam": lambda: GroupStepAdam(groups, lr=rate),
        "cpu_lion": lambda: _of_deepspeed("lion", "DeepSpeedCPULion", groups, rate),
        "cpu_adagrad": lambda: _of_deepspeed("adagrad", "DeepSpeedCPUAdagrad", groups, rate),
    }
    return None if name in DS_TYPES else made[name]()


def _of_deepspeed(module: str, name: str, groups: Any, rate: float) -> torch.optim.Optimizer:
    of = importlib.import_module(f"deepspeed.ops.{module}")
    made: torch.optim.Optimizer = getattr(of, name)(groups, lr=rate)
    return made


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """Sign of an interpolated momentum; keeps `exp_avg` alone, and no step anywhere."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                mean, grad = state["exp_avg"], p.grad.to(p.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((mean * b1 + grad * (1 - b1)).sign_(), alpha=-group["lr"])
                mean.mul_(b2).add_(grad, alpha=1 - b2)


class GroupStepAdam(torch.optim.Optimizer):  # type: ignore[misc]
    """Adam that counts its steps in the parameter group alone, as Apex's FusedAdam does."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            group["step"] = step = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                grad = p.grad.to(p.dtype)
                state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                root = (state["exp_avg_sq"] / (1 - b2**step)).sqrt_().add_(group["eps"])
                p.addcdiv_(state["exp_avg"] / (1 - b1**step), root, value=-group["lr"])
