"""`python -m tests.engines.compare HELD FORM [--close]`: exit 0 if a form has what an engine held."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

EXPERT_RANKS = 2
"""Ranks that share the experts in every row whose weights are compared."""


def main(held: Path, form: Path, *, is_close: bool) -> int:
    """Print the first value that differs; `is_close`: by more than the last bits."""
    alike = _is_close if is_close else torch.equal
    weights = {name: value for path in form.glob("*.safetensors") for name, value in load_file(path).items()}
    count = 0
    for name, states in torch.load(held, weights_only=True).items():
        for key, value in states.items():
            if weights and key != "fp32":
                continue
            found = _weight(weights, name) if weights else _state(form / "zero" / name / f"{key}.pt")
            if found is None or not alike(found.float().flatten(), value.float().flatten()):
                print(f"{key} of {name} {'is missing' if found is None else 'differs'}")
                return 1
            count += 1
    print(f"{count} tensors are equal")
    return 0 if count else 1


def _weight(weights: dict[str, Any], name: str) -> Any:
    """Return a weight; of experts, whose names count through there, all that have one local number."""
    match = re.fullmatch(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)", name)
    if match is None:
        return weights.get(name)
    numbers = (re.fullmatch(re.escape(match[1]) + r"(\d+)" + re.escape(match[3]), n) for n in weights)
    all_of_layer = sorted(int(found[1]) for found in numbers if found)
    held = max(1, len(all_of_layer) // EXPERT_RANKS)
    return torch.cat([weights[f"{match[1]}{n}{match[3]}"] for n in all_of_layer if n % held == int(match[2])])


def _is_close(one: Any, other: Any) -> bool:
    """Tell whether no element differs by more than 1e-5 of the largest."""
    return one.shape == other.shape and float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def _state(path: Path) -> Any:
    if not path.exists():
        return None
    value = torch.load(path, weights_only=False)
    return value["param"] if isinstance(value, dict) else value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), is_close=sys.argv[3:] == ["--close"]))
