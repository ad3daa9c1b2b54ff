"""Tell which optimizers have a universal form, and which of these the stock loaders read, by version.

Conversion carries every per-element state under its own name; but DeepSpeed's loaders read less than a
folder may hold, and whoever resumes should know before they do (docs/formats.md §5.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError
from ckptd.formats.torchfile.values import Inert
from ckptd.formats.zero.facts import as_dict, states_of

if TYPE_CHECKING:
    from ckptd.formats.zero.shards import OptimShard, SourceShard


STAGE3_READS = ("exp_avg", "exp_avg_sq")
"""The stage 3 loader reads these two names beside fp32, and `state[0]["step"]`."""

DRIFT_THERE = (
    ", and there with FusedAdam, CPUAdam or one sub-group (it counts each step of a torch optimizer once "
    "per sub-group)"
)
"""Text added where the loader of the release that saved reads no sub-groups, and a newer one miscounts."""


MUON = (
    "Muon's momentum is that of whole matrices: DeepSpeed's loader reads it back on one data-parallel rank; "
    "on several it cuts it at the partitions' borders, and the run stops at its first step"
)


NVME = (
    "the optimizer was offloaded to NVMe, and DeepSpeed so configured loads no universal form: "
    "resume with offload_optimizer on cpu, or without"
)


TENSOR_STAGE_3 = (
    "DeepSpeed's stage 3 loader cuts the parameters for the tensor ranks of AutoTP alone: where an mpu "
    "brings the tensor parallelism, resume in stage 1 or 2, or without tensor parallelism"
)


def refuse_unknown_layout(base: dict[Any, Any], source: SourceShard) -> None:
    """Refuse states of which no group is a dictionary: left out, the run would go on without its moments.

    Raises:
        RefusedError: see above.
    """
    states = base.get("state")
    groups_of = list(states_of(base).values())
    if not isinstance(states, dict | list | None) or (
        groups_of and not any(isinstance(state, dict) for state in groups_of)
    ):
        raise RefusedError(
            f"{source.path} keeps its optimizer's state in a form that ckptd does not know",
            hint="the ZeRO form is safe all the same",
        )


def stray_setting(one: dict[Any, Any], other: dict[Any, Any]) -> tuple[str, Any, Any] | None:
    """Return a plain setting of the parameter groups or the loss scaler in which two ranks of a save differ.

    A learning rate or a loss scaler's count moves with every step, which tells two saves apart even where
    the optimizer keeps no step. Values that are no plain numbers or texts are not compared.

    Returns:
        (its name, the value of `one`, the value of `other`); None when they agree.
    """
    mine, theirs = _settings(one), _settings(other)
    for key in mine:
        if key in theirs and mine[key] != theirs[key]:
            return key, mine[key], theirs[key]
    return None


def _settings(root: dict[Any, Any]) -> dict[str, Any]:
    inner = as_dict(root.get("optimizer_state_dict"))
    base = as_dict(inner.get("base_optimizer_state") or inner.get("optimizer_state_dict"))
    groups = base.get("param_groups")
    found: dict[str, Any] = {}
    for g, group in enumerate(groups if isinstance(groups, list) else []):
        found |= {f"param_groups[{g}] {k}": v for k, v in as_dict(group).items() if _is_plain(v)}
    scaler = inner.get("loss_scaler")
    if isinstance(scaler, Inert):
        found |= {f"loss_scaler {k}": v for k, v in as_dict(scaler.state).items() if _is_plain(v)}
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and value == value


def numbers_of(state: dict[Any, Any], shard: OptimShard) -> dict[str, Any]:
    """Return the step, and other states that are one number, of the first group of rank 0 that keeps a step.

    A group whose parameters never had a gradient has no state; the loader takes one step for all.
    """
    found = next((as_dict(s) for s in state.values() if "step" in as_dict(s)), None)
    if found is None:
        found = as_dict(next(iter(state.values()), None))
    names = {name for group in shard.groups for name in group.scalars}
    return {key: value for key, value in found.items() if key in names}


STAGE3_FORMS_SINCE = (0, 14, 5)
"""First version that loads a universal form in ZeRO stage 3; of one sub-group alone."""
STAGE3_SUB_GROUPS_SINCE = (0, 18, 0)
"""First version that loads one of several parameter groups or sub-groups."""


def version_tuple(text: str) -> tuple[int, ...]:
    """ "0.19.8+abc" → (0, 19, 8); empty when unreadable."""
    numbers: list[int] = []
    for word in text.split("+")[0].split(".")[:3]:
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def stage3_loader_word(ds_version: str | None, groups: int | None) -> str | None:
    """Say why the version that saved cannot load a stage 3 universal form in stage 3; None: it can.

    `groups`: sub-groups of the save, None when they are not known.
    """
    version = version_tuple(ds_version or "")
    if version >= STAGE3_SUB_GROUPS_SINCE or (version >= STAGE3_FORMS_SINCE and groups == 1):
        return None
    saver = (
        f"DeepSpeed {ds_version}, which saved this" if version else "the DeepSpeed that saved this (unknown)"
    )
    what = "a universal form in stage 3"
    if version >= STAGE3_FORMS_SINCE:
        several = "several parameter groups or sub-groups" if groups is None else f"{groups} sub-groups"
        what = f"a stage 3 universal form of {several}"
    return f"{saver}, cannot load {what}: load it with 0.18.3 or newer"
