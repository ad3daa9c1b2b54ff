"""Optimizers other than Adam: what has no universal form, and what the stock loaders make of the rest.

Conversion carries every per-element state under its own name; but DeepSpeed's loaders read less than a
folder may hold, and whoever resumes should know before they do (docs/formats.md §5.1, docs/adr/0080).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError
from ckptd.zero.facts import as_dict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.zero.shards import OptimShard, Source

STAGE3_READS = ("exp_avg", "exp_avg_sq")
"""The stage 3 loader reads these two names beside fp32, and `state[0]["step"]`."""


def refuse_unknown_layout(base: dict[Any, Any], source: Source) -> None:
    """Refuse optimizers whose state is not one value per element of the rank's flat partition.

    Raises:
        RefusedError: Muon. At stages 1 and 2 it keeps the momentum of whole matrices on every rank that
            holds a piece of them (docs/formats.md §2.5), and no stage of the stock loader reads it back.
    """
    groups = base.get("param_groups")
    for group in groups if isinstance(groups, list) else []:
        if as_dict(group).get("use_muon") is True:
            raise RefusedError(
                f"{source.path} is of the Muon optimizer, whose momentum has no universal form",
                hint="resume it on the number of ranks that saved it; the ZeRO form is safe all the same",
            )


def notes(shards: Sequence[OptimShard]) -> tuple[str, ...]:
    """Sentences about what a resumed run will find; empty for Adam and its like.

    `shards`: one of each model-parallel rank.
    """
    found: list[str] = []
    groups = [group for shard in shards for group in shard.groups]
    lacking = sorted({name for group in groups for name in STAGE3_READS if name not in group.states})
    stepless = not any("step" in group.scalars for group in groups)
    if lacking or stepless:
        words = [*lacking, *(["step"] if stepless else [])]
        found.append(
            f"loads in stages 1 and 2; DeepSpeed's stage 3 loader wants {', '.join(words)} "
            "of every parameter, which this optimizer does not keep"
        )
    others = sorted({name for group in groups for name in group.states} - {"fp32", *STAGE3_READS})
    if others and not (lacking or stepless):
        found.append(f"DeepSpeed's stage 3 loader leaves {', '.join(others)} unread")
    numbers = sorted({name for group in groups for name in group.scalars} - {"step"})
    if numbers:
        found.append(
            f"{', '.join(numbers)} (one number per group) begins anew: DeepSpeed's loaders take none but step"
        )
    return tuple(found)


def numbers_of(state: dict[Any, Any], shard: OptimShard) -> dict[str, Any]:
    """The step, and other states that are one number, of the first group of rank 0 that keeps a step.

    A group whose parameters never had a gradient has no state; the loader takes one step for all.
    """
    found = next((as_dict(s) for s in state.values() if "step" in as_dict(s)), None)
    if found is None:
        found = as_dict(next(iter(state.values()), None))
    names = {name for group in shard.groups for name in group.scalars}
    return {key: value for key, value in found.items() if key in names}
