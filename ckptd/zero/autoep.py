"""AutoEP: experts that DeepSpeed itself spreads over ranks, one tensor of rows per layer and weight.

The trainer's metadata say which parameters they are and which rank has which rows. Where every rank has the
next equal run of rows, stacking the ranks gives the whole layer, which loads with any expert-parallel size;
any other placement is refused (docs/formats.md §7.1, ADR 0085).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError
from ckptd.zero.facts import as_dict, as_int, numel, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.zero.shards import Opened

SAFE = "the ZeRO form is safe all the same"
_WEIGHTS = ("w1", "w2", "w3")


def layers(model: Opened) -> list[dict[Any, Any]]:
    """What the model states say of each AutoEP layer; empty when there is none."""
    found = model.root.get("ds_autoep_layers") or model.root.get("autoep_layers") or []
    return [as_dict(layer) for layer in found] if isinstance(found, list) else [{}]


def check(model: Opened, ep: int, groups: Iterable[int]) -> None:
    """Refuse what stacking the `ep` ranks of the expert `groups` would not make whole.

    Raises:
        RefusedError: metadata that contradict the shards, rows placed otherwise, or experts of another kind.
    """
    shapes = model.root.get("param_shapes")
    held: dict[str, Any] = {}
    for g in groups:
        held |= as_dict(shapes[g]) if isinstance(shapes, list) and g < len(shapes) else {}
    for layer in layers(model):
        prefix, count = layer.get("expert_key_prefix"), as_int(layer.get("num_experts"))
        where = f"{model.source.path}: AutoEP layer {shown(layer.get('module_path') or prefix or '?')}"
        if not isinstance(prefix, str) or not count:
            raise RefusedError(
                f"{where} does not say which parameters it has, or how many experts", hint=SAFE
            )
        if as_int(layer.get("ep_size")) != ep or count % ep:
            raise RefusedError(
                f"{where} of {count} experts is for {shown(layer.get('ep_size'))} ranks, the shards for {ep}"
            )
        _check_placement(where, layer.get("expert_placement"), count, ep)
        for name in (f"{prefix}.{weight}" for weight in _WEIGHTS):
            shape = held.pop(name, None)
            if numel(shape) is None or not shape or shape[0] * ep != count:
                raise RefusedError(f"{where}: {name} of shape {shown(shape)} is no part of {count} experts")
    if held:
        raise RefusedError(f"{next(iter(held))} is an expert's parameter and of no AutoEP layer", hint=SAFE)


def _check_placement(where: str, placement: Any, count: int, ep: int) -> None:
    """Rank r must have the r-th run of `count / ep` experts; older versions say nothing and do that."""
    if placement is None:
        return
    share = count // ep
    ranks = as_dict(placement).get("ranks")
    given = [as_dict(rank) for rank in ranks] if isinstance(ranks, list) else []
    as_wanted = len(given) == ep and all(
        rank.get("rank") == r and _is_run(rank.get("experts"), r * share, share)
        for r, rank in enumerate(given)
    )
    if not as_wanted:
        raise RefusedError(
            f"{where} has its experts on ranks in an order of their own, which is not converted",
            hint="DeepSpeed's own converter may know the order; " + SAFE,
        )


def _is_run(values: Any, begin: int, count: int) -> bool:
    """True for a list of `count` numbers in order from `begin`."""
    if not isinstance(values, list | tuple) or len(values) != count:
        return False
    return all(value == begin + i for i, value in enumerate(values))
