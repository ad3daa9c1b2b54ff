"""A model whose frozen base stays while its adapters change: what each save of a LoRA run writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class AdapterModel:
    """Model states as DeepSpeed writes them, each adapter beside its layer of the base."""

    def __init__(self, base: Mapping[str, torch.Tensor], adapters: Mapping[str, tuple[int, ...]]) -> None:
        """`adapters`: the shape of each; its name begins with that of its layer."""
        self._base, self._adapters = base, adapters
        self._steps = 0

    def save(self, path: Path) -> None:
        """Write the model states after one more step: the same base, other adapters."""
        self._steps += 1
        changed = {name: torch.randn(shape).bfloat16() for name, shape in self._adapters.items()}
        module = dict(sorted({**self._base, **changed}.items()))
        torch.save({"module": module, "global_steps": self._steps}, path)
