"""Shims that let old releases of DeepSpeed run over today's torch, outside their checkpoint code.

This folder goes on PYTHONPATH before a release (see ../__main__.py); Python imports this file in each process
before anything else. Nothing here touches how a checkpoint is written, converted or loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.support.changed_modules import change_modules

# torch 2.6 made weights_only the default; releases up to 0.16 call torch.load for their own classes.
os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
# Releases up to 0.14 ask numactl how many ranks a machine has unless this says so.
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _collectives(module: ModuleType) -> None:
    """Leave out the shared-memory collective, which each release would compile first, for half a minute.

    And gather without autograd: torch 2.13 refuses to write into views of one buffer, as 0.14 to 0.19.2 do
    after a step.
    """
    import torch

    vars(module)["build_shm_op"] = lambda: None
    backend = vars(module)["TorchBackend"]
    backend.all_gather_into_tensor = torch.no_grad()(backend.all_gather_into_tensor)


def _any_version(module: ModuleType) -> None:
    """transformers up to 4.44 wants numpy below 2, which today's torch does without."""
    for name in ("require_version", "require_version_core"):
        vars(module)[name] = lambda *_: None


def _without_peft(module: ModuleType) -> None:
    """The environment's peft is too new for an older accelerate; nothing here adapts a model."""
    vars(module)["is_peft_available"] = lambda: False


def _deepspeed_on_cpu(module: ModuleType) -> None:
    """accelerate up to 0.33 forgets DeepSpeed where it is told to use the CPU, as newer ones do not."""
    state, kinds = vars(module)["AcceleratorState"], vars(module)["DistributedType"]
    initialise = state.__init__

    def initialised(self: Any, *given: Any, **named: Any) -> None:
        initialise(self, *given, **named)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            self.distributed_type = kinds.DEEPSPEED

    state.__init__ = initialised


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "deepspeed.comm.torch": _collectives,
    "transformers.utils.versions": _any_version,
    "transformers.utils.import_utils": _without_peft,
    "accelerate.utils.imports": _without_peft,
    "accelerate.state": _deepspeed_on_cpu,
}

change_modules(CHANGES)
