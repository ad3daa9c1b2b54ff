"""Checkpoints written again under other names or framing, by torch itself, for the stock converter to read.

`python -m tests.support.disguise '[[source, destination, {"momentum_buffer": "exp_avg"}, zip], …]'` copies a
checkpoint folder; optimizer states get the names given, and whichever of exp_avg and exp_avg_sq is then
missing becomes a copy of the other, or zeros (the stock converter insists on both); null leaves all states as
they are. `zip` false writes the
framing of before torch 1.6.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.real import run_module

Job = tuple[Path, Path, dict[str, str] | None, bool]


def disguise(jobs: Sequence[Job]) -> None:
    """Write all copies, one start for all."""
    given = json.dumps([[str(a), str(b), names, framed] for a, b, names, framed in jobs])
    run_module("tests.support.disguise", given)


def _write(source: Path, destination: Path, names: dict[str, str] | None, framed: bool) -> None:
    import torch

    destination.mkdir(parents=True)
    for path in sorted(source.glob("*.pt")):
        root = torch.load(path, weights_only=False)
        if names is not None and isinstance(root.get("optimizer_state_dict"), dict):
            _rename(root["optimizer_state_dict"], names)
        torch.save(root, destination / path.name, _use_new_zipfile_serialization=framed)


def _rename(inner: dict[str, Any], names: dict[str, str]) -> None:
    import torch

    base = inner.get("base_optimizer_state") or inner["optimizer_state_dict"]
    fp32 = inner.get("single_partition_of_fp32_groups") or inner["fp32_flat_groups"]
    for group, state in base["state"].items():
        for old, new in names.items():
            state[new] = state.pop(old)
        known = state.get("exp_avg", state.get("exp_avg_sq", torch.zeros_like(fp32[group])))
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, known.clone())


if __name__ == "__main__":
    for one, other, renamed, zipped in json.loads(sys.argv[1]):
        _write(Path(one), Path(other), renamed, zipped)
