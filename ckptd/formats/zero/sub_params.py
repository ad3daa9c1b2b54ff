"""Fused sub-parameters (query, key and value in one weight): their sizes and how ranks share them.

`parameter_with_sub_params` of universal_checkpoint_info gives a view of the parameter whose `partition_dim`
is several sub-parameters, each cut over the tensor ranks. From version 0.4 on the widths are recorded;
before it the cut can only have been even (docs/formats.md §2.5, DeepSpeed PR 8185).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptd.errors import RefusedError
from ckptd.formats.zero.blocks import Block, fused
from ckptd.formats.zero.facts import as_dict, as_int

WIDTHS_SINCE = 0.4
"""First `universal_checkpoint_version` that records the widths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubParams:
    """The `SubparamShape` of a parameter's files; `shape` holds ints (-1: whatever is left) and tuples."""

    patterns: list[str]
    shape: tuple[Any, ...]
    partition_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One declaration: its patterns, and recorded widths per pattern (None: before version 0.4)."""

    compiled: tuple[re.Pattern[str], ...]
    subs: SubParams
    widths: dict[str, list[list[int]]] | None


def declared(info: dict[Any, Any]) -> list[Declared]:
    """Return all declarations of an info dictionary.

    Raises:
        RefusedError: they cannot be read.
    """
    version = info.get("universal_checkpoint_version", 0.0)
    recorded = isinstance(version, int | float) and version >= WIDTHS_SINCE
    widths = as_dict(info.get("sub_param_shard_widths")) if recorded else None
    entries = info.get("parameter_with_sub_params") or []
    if not isinstance(entries, list | tuple):
        raise RefusedError("parameter_with_sub_params of universal_checkpoint_info is no list")
    return [_declaration(as_dict(entry), widths) for entry in entries]


def _declaration(entry: dict[Any, Any], widths: dict[Any, Any] | None) -> Declared:
    patterns, shape, dim = entry.get("patterns"), entry.get("shape"), as_int(entry.get("partition_dim"))
    good = isinstance(patterns, list | tuple) and all(isinstance(p, str) for p in patterns)
    if not good or not isinstance(shape, list | tuple) or dim is None or not 0 <= dim < len(shape):
        raise RefusedError("an entry of parameter_with_sub_params in universal_checkpoint_info is unreadable")
    assert isinstance(patterns, list | tuple)
    if not all(as_int(d) is not None or _sizes(d) is not None for d in shape):
        raise RefusedError(f"parameter_with_sub_params has an unreadable shape for {patterns[:1]}")
    try:
        compiled = tuple(re.compile(p) for p in patterns)
    except re.error as error:
        raise RefusedError(f"parameter_with_sub_params holds an invalid pattern ({error})") from error
    subs = SubParams(patterns=list(patterns), shape=tuple(shape), partition_dim=dim)
    kept = None if widths is None else {p: _widths(widths[p]) for p in patterns if p in widths}
    return Declared(compiled=compiled, subs=subs, widths=kept)


def _sizes(value: Any) -> list[int] | None:
    if not isinstance(value, list | tuple):
        return None
    sizes = [as_int(v) for v in value]
    return [s for s in sizes if s is not None and s >= 0] if all(s is not None for s in sizes) else None


def _widths(value: Any) -> list[list[int]]:
    rows = [_sizes(row) for row in value] if isinstance(value, list | tuple) else [None]
    if any(row is None for row in rows):
        raise RefusedError("sub_param_shard_widths of universal_checkpoint_info is unreadable")
    return [row for row in rows if row is not None]


def resolve(
    found: Declared, pattern: str, shapes: list[tuple[int, ...]]
) -> tuple[SubParams, tuple[int, ...], list[Block]]:
    """Marks, full (view) shape and blocks of a parameter whose shards have these shapes.

    Raises:
        RefusedError: widths are missing, contradict the shapes, or cannot have been cut evenly.
    """
    subs, ranks = found.subs, len(shapes)
    dim = subs.partition_dim
    if found.widths is not None:
        sizes = _sizes(subs.shape[dim])
        widths = found.widths.get(pattern)
        if sizes is None or widths is None:
            raise RefusedError("universal_checkpoint_info records no widths of its sub-parameters")
    else:
        subs, sizes = _legacy(subs, shapes)
        uneven = [size for size in sizes if size % ranks]
        if uneven:
            raise RefusedError(
                f"its sub-parameters of sizes {uneven} were cut over {ranks} tensor ranks and no widths are "
                f"recorded (universal_checkpoint_version before {WIDTHS_SINCE})"
            )
        widths = [[size // ranks] * ranks for size in sizes]
    if len(widths) != len(sizes) or any(
        len(w) != ranks or sum(w) != size for w, size in zip(widths, sizes, strict=False)
    ):
        raise RefusedError(f"its recorded widths {widths} do not add up to sub-parameters of sizes {sizes}")
    full = _view(subs.shape, dim, sum(sizes), sum(prod(shape) for shape in shapes))
    for rank, shape in enumerate(shapes):
        held = prod((*full[:dim], sum(w[rank] for w in widths), *full[dim + 1 :]))
        if held != prod(shape):
            raise RefusedError(
                f"tensor rank {rank} holds {prod(shape)} elements, its recorded widths need {held}"
            )
    return subs, full, fused(full, dim, widths)


def _legacy(subs: SubParams, shapes: list[tuple[int, ...]]) -> tuple[SubParams, list[int]]:
    """Before 0.4 a plain number at `partition_dim` is a count of equal sub-parameters: made explicit."""
    dim = subs.partition_dim
    sizes = _sizes(subs.shape[dim])
    if sizes is not None:
        return subs, sizes
    count = as_int(subs.shape[dim]) or 0
    if any(len(shape) <= dim for shape in shapes):
        raise RefusedError(f"its shards have no dimension {dim} to find sub-parameters in")
    total = sum(shape[dim] for shape in shapes)
    if count <= 0 or total % count:
        raise RefusedError(f"{count} equal sub-parameters do not divide a dimension of {total}")
    sizes = [total // count] * count
    return replace(subs, shape=(*subs.shape[:dim], tuple(sizes), *subs.shape[dim + 1 :])), sizes


def _view(shape: tuple[Any, ...], dim: int, width: int, numel: int) -> tuple[int, ...]:
    """Return the view's shape with `partition_dim` and one placeholder resolved."""
    sizes = [sum(d) if isinstance(d, list | tuple) else int(as_int(d) or 0) for d in shape]
    sizes[dim] = width
    open_dims = [i for i, n in enumerate(sizes) if n < 0]
    known = prod(n for n in sizes if n >= 0)
    if len(open_dims) > 1 or (open_dims and (known == 0 or numel % known)):
        raise RefusedError(f"its sub-parameter shape {shape} cannot be resolved for {numel} elements")
    for i in open_dims:
        sizes[i] = numel // known
    return tuple(sizes)
