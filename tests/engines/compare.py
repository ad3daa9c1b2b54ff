"""`python -m tests.engines.compare HELD FORM`: exit 0 if a form has just the values that an engine held."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def main(held: Path, form: Path) -> int:
    """Print the first value that differs."""
    weights = {name: value for path in form.glob("*.safetensors") for name, value in load_file(path).items()}
    count = 0
    for name, states in torch.load(held, weights_only=True).items():
        for key, value in states.items():
            if weights and key != "fp32":
                continue
            found = weights.get(name) if weights else _state(form / "zero" / name / f"{key}.pt")
            if found is None or not torch.equal(found.float().flatten(), value.float().flatten()):
                print(f"{key} of {name} {'is missing' if found is None else 'differs'}")
                return 1
            count += 1
    print(f"{count} tensors are equal")
    return 0 if count else 1


def _state(path: Path) -> Any:
    if not path.exists():
        return None
    value = torch.load(path, weights_only=False)
    return value["param"] if isinstance(value, dict) else value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
