"""Real saves by optimizers whose states are not those of Adam: 8-bit codes with a scale per block, as
bitsandbytes keeps them, and Adafactor of transformers and of torch, which factors matrices.

Two ranks of `python -m tests.support.make_blockwise OUT` (tests/support/ranks.py) write OUT/z2/step and
OUT/z3/step by the first; OUT/transformers0 … OUT/torch2 by the others, at the stage that the name ends with.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from examples.demo.ending import leave
from tests.support.make_ckpt import batch_for, ds_config, network
from tests.support.real import Recipe

BLOCK = 64


class BlockwiseSgd(torch.optim.Optimizer):  # type: ignore[misc]
    """SGD that keeps what 8-bit Adam keeps: a code per element, a table of codes, a scale per block."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["state1"] = torch.zeros(p.numel(), dtype=torch.uint8)
                    state["qmap1"] = torch.arange(256.0) / 255
                    state["absmax1"] = torch.zeros(-(-p.numel() // BLOCK))
                state["step"] += 1
                state["state1"].add_(1)
                p.add_(p.grad.to(p.dtype), alpha=-group["lr"])


def made_by(name: str, parameters: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer that a folder's name begins with."""
    if name == "transformers":
        made: Any = importlib.import_module("transformers.optimization").Adafactor
        rates = {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9}
        factored: torch.optim.Optimizer = made(parameters, **rates)
        return factored
    return torch.optim.Adafactor(parameters, lr=1e-2) if name == "torch" else BlockwiseSgd(parameters)


def main() -> None:
    """Two steps each, then a save."""
    import deepspeed  # after make_ckpt, which chooses the accelerator
    import deepspeed.comm as dist

    deepspeed.init_distributed()
    out = Path(sys.argv[1])
    for name in ("z2", "z3", "transformers0", "transformers1", "torch0", "torch2"):
        stage = int(name[-1])
        recipe = asdict(Recipe(stage=stage, world_size=2, freeze=True))
        torch.manual_seed(7)
        model = network(recipe)
        optimizer = made_by(name[:-1], [p for p in model.parameters() if p.requires_grad])
        config = ds_config(recipe, 2, universal=False)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        for step in range(2):
            ids, labels = batch_for(recipe["vocab"], step, 4 * dist.get_rank(), 4 * dist.get_rank() + 4)
            engine.backward(engine(ids, labels))
            engine.step()
        engine.save_checkpoint(str(out / name), tag="step")
        engine.destroy()
    leave()


if __name__ == "__main__":
    main()
