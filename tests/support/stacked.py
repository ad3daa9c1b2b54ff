"""Experts stacked by torch, rank by rank, in a child that may import it: a plain reference for conversion.

`python -m tests.support.stacked '[[source, converted, ep, in_blocks], …]'` loads every optimizer shard
whole, joins
what each expert-parallel rank holds of a parameter, stacks the ranks, and prints a JSON list of differences
with the converted folder per item.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.real import run_module


def differences(items: Sequence[tuple[Path, Path, int, bool]]) -> list[list[str]]:
    """What differs in each (source, converted, expert-parallel ranks, in blocks), empty when nothing does."""
    given = json.dumps([[str(a), str(b), n, x] for a, b, n, x in items])
    out = run_module("tests.support.stacked", given)
    found: list[list[str]] = json.loads(out.splitlines()[-1])
    return found


def _compare(source: Path, converted: Path, ep: int, in_blocks: bool) -> list[str]:
    import torch

    model = torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)
    shards = [_shard(source, d) for d in range(model["dp_world_size"])]
    found, seen = [], set()
    for g, shapes in enumerate(model["param_shapes"]):
        group = shards[0]["base_optimizer_state"]["param_groups"][g]
        ranks = ep if group.get("moe") else 1
        for name, shape in shapes.items():
            seen.add(name)
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                parts = [
                    torch.cat([_piece(s, g, name, state) for s in _owned(shards, r, ranks, in_blocks)])
                    for r in range(ranks)
                ]
                wanted: dict[str, Any] = {"param": torch.cat([part.view(tuple(shape)) for part in parts])}
                if ranks > 1:
                    wanted |= {"is_expert_param": True, "ep_num_experts": len(wanted["param"])}
                got = torch.load(converted / "zero" / name / f"{state}.pt", weights_only=False)
                tensor = got.pop("param")
                same = tensor.dtype == wanted["param"].dtype and torch.equal(tensor, wanted.pop("param"))
                if not same or {k: v for k, v in got.items() if k != "cat_dim"} != wanted:
                    found.append(f"{name}: {state} differs, {got}")
    folders = {path.name for path in (converted / "zero").iterdir() if (path / "step.pt").exists()}
    return found + [f"{name} is in one of them alone" for name in folders ^ seen]


def _shard(source: Path, d: int) -> dict[str, Any]:
    import torch

    path = next(source.glob(f"*zero_pp_rank_{d}_mp_rank_00_optim_states.pt"))
    shard: dict[str, Any] = torch.load(path, weights_only=False)["optimizer_state_dict"]
    return shard


def _owned(shards: list[dict[str, Any]], rank: int, ranks: int, in_blocks: bool) -> list[dict[str, Any]]:
    share = len(shards) // ranks
    return shards[rank * share : (rank + 1) * share] if in_blocks else shards[rank::ranks]


def _piece(shard: dict[str, Any], g: int, name: str, state: str) -> Any:
    flat = shard["single_partition_of_fp32_groups"][g]
    if state != "fp32":
        flat = shard["base_optimizer_state"]["state"][g][state]
    place = shard["param_slice_mappings"][g].get(name)
    return flat[:0] if place is None else flat[place.start : place.start + place.numel]


if __name__ == "__main__":
    print(json.dumps([_compare(Path(a), Path(b), ep, x) for a, b, ep, x in json.loads(sys.argv[1])]))
