"""That shards are of one save, and what their model states say of shapes (docs/design.md §3, P4, P15)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError
from ckptd.zero.facts import as_dict, numel, shown
from ckptd.zero.optimizers import stray_setting

MOST_NAME_BYTES = 255

if TYPE_CHECKING:
    from ckptd.zero.shards import Opened
    from ckptd.zero.stage12 import Shapes


def differs(what: str, one: Opened, mine: Any, other: Opened, theirs: Any) -> RefusedError:
    """The refusal of shards that say different things."""
    return RefusedError(
        f"{one.source.path} has {what} {shown(mine)}, {other.source.path} has {shown(theirs)}: "
        "shards of two saves",
        hint="mixing saves trains wrongly without a warning, so nothing was converted",
    )


def agree_optims(shard: Opened, first: Opened, *, same_rank: bool, same_stage: bool) -> None:
    """Refuse optimizer shards of two saves; a pipeline's stages may have other groups, not other ranks.

    Raises:
        RefusedError: version, stage, step, settings or partitioning differ.
    """
    if same_stage and (other := stray_setting(shard.root, first.root)) is not None:
        raise differs(other[0], shard, other[1], first, other[2])
    for what in ("ds_version", "zero_stage", "optimizer_step"):
        mine, theirs = getattr(shard.facts, what), getattr(first.facts, what)
        if mine != theirs and not (what == "optimizer_step" and None in (mine, theirs)):
            raise differs(what, shard, mine, first, theirs)
    counts, of_first = shard.facts.partition_count, first.facts.partition_count
    if (counts != of_first) if same_rank else max(counts, default=0) != max(of_first, default=0):
        raise differs("partition_count", shard, counts, first, of_first)


def agree_models(shard: Opened, first: Opened, *, same_rank: bool) -> None:
    """Refuse model states of two saves; shapes are compared within one model-parallel rank.

    Raises:
        RefusedError: version, grid, step or shapes differ.
    """
    for what in ("ds_version", "dp_world_size", "global_steps", "tp", "pp"):
        mine, theirs = getattr(shard.facts, what), getattr(first.facts, what)
        if mine != theirs:
            raise differs(what, shard, mine, first, theirs)
    if same_rank and shard.root is not first.root and _shape_digest(shard) != _shape_digest(first):
        raise differs("param_shapes of digest", shard, _shape_digest(shard), first, _shape_digest(first))


def shapes_of(model: Opened) -> Shapes:
    """Return `param_shapes`, checked: real shapes, names that are text, each once.

    Raises:
        RefusedError: otherwise.
    """
    shapes = model.root.get("param_shapes")
    if not isinstance(shapes, list):
        raise RefusedError(
            f"{model.source.path} has no param_shapes, which say how large each parameter is "
            "(DeepSpeed writes them for native MoE since 0.19.4)",
            hint="bf16 without ZeRO (stage 0) saves none; train with stage 1. "
            "The ZeRO form is safe all the same: DeepSpeed loads it with the same number of ranks",
        )
    checked: Shapes = []
    seen: set[str] = set()
    for group in shapes:
        current: dict[str, tuple[int, ...]] = {}
        for name, shape in as_dict(group).items():
            if numel(shape) is None or not _is_text(name):
                raise RefusedError(f"{model.source.path} names {shown(name)}, which can be no parameter")
            if name in seen:
                raise RefusedError(f"{model.source.path} lists {name} twice in param_shapes")
            seen.add(name)
            current[name] = tuple(shape)
        checked.append(current)
    return checked


def _is_text(name: Any) -> bool:
    return isinstance(name, str) and name != "" and not any("\ud800" <= c <= "\udfff" for c in name)


def refuse_folder_name(name: str, path: str) -> None:
    """Refuse a tensor's name that cannot be a folder below `zero/`; `a/b` is two nested ones, as in stock.

    Raises:
        RefusedError: it would lead out of `zero/` (P15), or no file system takes it.
    """
    parts = name.split("/")
    reason = None
    if any(part in ("", ".", "..") for part in parts):
        reason = "which is no path below zero/"
    elif any(c in name for c in "\0\n") or any("\ud800" <= c <= "\udfff" for c in name):
        reason = "which can be no folder"
    elif any(len(part.encode()) > MOST_NAME_BYTES for part in parts):
        reason = f"longer than a folder's name may be ({MOST_NAME_BYTES} bytes)"
    elif parts[0] == "optimizer_state.pt" or any(".pt" in part for part in parts[1:]):
        reason = "which the loader would take for a file of optimizer state"
    if reason is not None:
        raise RefusedError(
            f"{path} names a tensor {shown(name)}, {reason}: it has no place in a universal form",
            hint="--form weights exports it; the ZeRO form is safe all the same",
        )


def _shape_digest(model: Opened) -> str:
    return hashlib.sha256(repr(shapes_of(model)).encode("utf-8", "surrogatepass")).hexdigest()[:12]
