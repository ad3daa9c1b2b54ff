"""Join the tensor-parallel shards of each parameter as `universal_checkpoint_info` prescribes.

The trainer names parameters by patterns; the first rule that matches, in the stock converter's order, gives
a `JoinedParameter`: geometry for the bytes and marks for the header of its files (docs/formats.md §6.1).
One tensor-parallel rank is the simple case of the same rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptd.errors import RefusedError
from ckptd.formats.zero.blocks import Block, Step, along, first_rows, fused, reading, sequence, whole
from ckptd.formats.zero.facts import as_dict, as_int

# --- fused sub-parameters -----------------------------------------------------------------------------
# `parameter_with_sub_params` gives a view of the parameter (query, key and value in one weight) whose
# `partition_dim` is several sub-parameters, each cut over the tensor ranks. From version 0.4 on the widths
# are recorded; before it the cut can only have been even (docs/formats.md §2.5, DeepSpeed PR 8185).

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
    """Make explicit what releases before 0.4 wrote: a plain number at `partition_dim` counts equal
    sub-parameters."""
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


# --- affine maps --------------------------------------------------------------------------------------
# AutoTP records them from DeepSpeed 0.19.8 on: pieces by offset and strides (docs/formats.md §2.5). A map
# overrides every pattern for the parameters that it names. A piece that several ranks hold is taken from the
# first and compared with the others; a scaled piece is refused, since moments would have to be rescaled and
# the optimizer's settings with them.

VERSION = 1
_MAX_PIECES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """One parameter's map: full shape, shard shapes by rank, pieces."""

    shape: tuple[int, ...]
    shards: dict[int, tuple[int, ...]]
    pieces: tuple[Block, ...]

    def blocks(self, shapes: list[tuple[int, ...]]) -> tuple[list[Block], list[tuple[Block, Block]]]:
        """Pieces to use, and pairs of pieces that hold the same elements.

        Raises:
            RefusedError: the map is of other shards, or does not use each element of them once.
        """
        held = {rank: _count(shape) for rank, shape in self.shards.items()}
        if held != {rank: _count(shape) for rank, shape in enumerate(shapes)}:
            raise RefusedError(f"its affine map is of shards {self.shards}, the shards are {shapes}")
        for rank, count in held.items():
            sequence([_turned(piece) for piece in self.pieces if piece.rank == rank], count)
        first: dict[tuple[Any, ...], Block] = {}
        copies: list[tuple[Block, Block]] = []
        for piece in sorted(self.pieces, key=lambda piece: piece.rank):
            place = (piece.out, piece.shape, piece.out_strides)
            if place in first and _count(piece.shape):
                copies.append((first[place], piece))
            else:
                first.setdefault(place, piece)
        return list(first.values()), copies


def _count(shape: tuple[int, ...]) -> int:
    return prod(shape)


def _turned(piece: Block) -> Block:
    """Return the block of the same elements with shard and full parameter swapped."""
    return Block(piece.rank, piece.shape, piece.at, piece.strides, piece.out, piece.out_strides)


class Maps:
    """All maps of a checkpoint, read when a parameter asks."""

    def __init__(self, value: Any) -> None:
        info = as_dict(value)
        version = info.get("version", VERSION)
        if not isinstance(version, int) or version > VERSION:
            raise RefusedError(
                f"the checkpoint's affine map is of format {version}, ckptd knows {VERSION}",
                hint="the ZeRO form is safe all the same; update ckptd",
            )
        try:
            self._params = [(re.compile(str(p)), entry) for p, entry in as_dict(info.get("params")).items()]
        except re.error as error:
            raise RefusedError(f"the affine map holds an invalid pattern ({error})") from error

    def __bool__(self) -> bool:
        return bool(self._params)

    def find(self, name: str) -> Map | None:
        """Return the map of a parameter.

        Raises:
            RefusedError: two match, or it cannot be read.
        """
        found = [entry for pattern, entry in self._params if pattern.match(name)]
        if len(found) > 1:
            raise RefusedError("it matches more than one affine map")
        return _map(as_dict(found[0])) if found else None


def _map(entry: dict[Any, Any]) -> Map:
    shards: dict[int, tuple[int, ...]] = {}
    pieces: list[Block] = []
    for key, value in as_dict(entry.get("ranks")).items():
        rank = int(key) if isinstance(key, str) and key.isdecimal() else as_int(key)
        listed = as_dict(value).get("pieces")
        if rank is None or not isinstance(listed, list) or len(pieces) + len(listed) > _MAX_PIECES:
            raise RefusedError("its affine map is unreadable")
        shards[rank] = _integers(as_dict(value).get("shard_shape"))
        pieces += [_piece(rank, as_dict(piece)) for piece in listed]
    return Map(shape=_integers(entry.get("logical_shape")), shards=shards, pieces=tuple(pieces))


def _piece(rank: int, piece: dict[Any, Any]) -> Block:
    if piece.get("scale", 1.0) != 1.0:
        raise RefusedError(
            "its shards are scaled (a pre-divided bias of a row-parallel layer), and so would be its moments",
            hint="the stock converter refuses it too; the ZeRO form is safe all the same",
        )
    shape = _integers(piece.get("shape"))
    (out, out_strides), (at, strides) = _place(piece.get("source")), _place(piece.get("dest"))
    if len(shape) != len(out_strides) or len(shape) != len(strides):
        raise RefusedError("its affine map has a piece of contradicting dimensions")
    return Block(rank, shape, out, out_strides, at, strides)


def _place(value: Any) -> tuple[int, tuple[int, ...]]:
    if not isinstance(value, list | tuple) or len(value) != 2 or (as_int(value[0]) or 0) < 0:
        raise RefusedError("its affine map has an unreadable piece")
    return as_int(value[0]) or 0, _integers(value[1])


def _integers(value: Any) -> tuple[int, ...]:
    numbers = [as_int(v) for v in value] if isinstance(value, list | tuple) else [None]
    if any(n is None or n < 0 for n in numbers):
        raise RefusedError("its affine map holds a shape or strides that are unreadable")
    return tuple(n for n in numbers if n is not None)


# --- the rule of a parameter --------------------------------------------------------------------------

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
TWO_SUBS = "parameter_with_2_sub_params_cat_dim_0"
BY_ROW = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
_LISTS = (REPLICATED, AVERAGED, TWO_SUBS, BY_ROW, VOCABULARY)
_NAMES_ALL_SINCE = 0.4
"""The version that AutoTP writes: it names every parameter that is not cut along dimension 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedParameter:
    """One parameter of all tensor ranks: full shape, steps in output order, marks of its header.

    `averaged`: each rank's shard is a full parameter and the mean of all counts (`steps` is of rank 0).
    `equal`: pairs of step lists that must hold the same bytes (copies on several ranks).
    `experts`: rows of `shape` that a loader divides by its expert-parallel size; None for other parameters.
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    cat_dim: int | None = 0
    two_sub_params: bool = False
    sub_params: SubParams | None = None
    vocabulary: bool = False
    averaged: bool = False
    equal: tuple[tuple[tuple[Step, ...], tuple[Step, ...]], ...] = ()
    experts: int | None = None


class Patterns:
    """Matches names; remembers which patterns matched something."""

    def __init__(self, info: dict[Any, Any] | None) -> None:
        info = info or {}
        unsupported = info.get("autotp_unsupported_parameter_patterns")
        if unsupported:
            first = next(iter(as_dict(unsupported).items()), (next(iter(unsupported)), "no reason given"))
            raise RefusedError(
                f"the trainer marked parameters as not convertible: {first[0]} ({first[1]})",
                hint="the ZeRO form is safe all the same",
            )
        self._lists = {key: _compiled(info.get(key), key) for key in _LISTS}
        version = info.get("universal_checkpoint_version")
        self._names_all = (
            isinstance(version, int | float)
            and version >= _NAMES_ALL_SINCE
            and all(info.get(key) is not None for key in (REPLICATED, BY_ROW))
        )
        self._subs = declared(info)
        self._affine = Maps(info.get("affine_map"))
        self._vocabulary = as_int(info.get("original_vocab_size"))
        self._unmatched = {p.pattern for patterns in self._lists.values() for p in patterns}
        self._unmatched.update(p.pattern for subs in self._subs for p in subs.compiled)

    def join(self, name: str, shapes: list[tuple[int, ...]]) -> JoinedParameter:
        """Return the rule for one parameter; `shapes`: its shard's on each tensor-parallel rank.

        Raises:
            RefusedError: the shapes contradict the rule, or no rule can be right.
        """
        try:
            return self._stripped(name, self._join(name, shapes))
        except RefusedError as error:
            raise RefusedError(f"{name}: {error.message}", hint=error.hint) from error

    @property
    def says_anything(self) -> bool:
        """False when no rule is there: then only the default is left, one after another along dimension 0.

        A description that names every replicated and row-parallel parameter says with empty lists that there
        is none.
        """
        return bool(any(self._lists.values()) or self._subs or self._affine or self._names_all)

    def knows(self, name: str) -> bool:
        """Tell whether some rule names it; without one shards are taken to follow one another."""
        lists = (p for patterns in self._lists.values() for p in patterns)
        subs = (p for one in self._subs for p in one.compiled)
        return any(p.match(name) for p in (*lists, *subs)) or self._affine.find(name) is not None

    def replicated(self, name: str, shapes: list[tuple[int, ...]]) -> JoinedParameter:
        """The rule of a tensor that every rank holds whole: the first rank's, compared with the others.

        Raises:
            RefusedError: the shapes differ.
        """
        try:
            return self._replicated(shapes)
        except RefusedError as error:
            raise RefusedError(f"{name}: {error.message}", hint=error.hint) from error

    def unmatched(self) -> list[str]:
        """Patterns that matched no parameter (strict conversion refuses them)."""
        return sorted(self._unmatched)

    def _join(self, name: str, shapes: list[tuple[int, ...]]) -> JoinedParameter:
        """Choose the first rule that matches; an affine map precedes all (and uses their patterns up)."""
        mapped = self._affine.find(name)
        subs = self._sub_params_of(name)
        matched = {key: self._matches(key, name) for key in _LISTS} if mapped else {}
        if mapped is not None:
            blocks, copies = mapped.blocks(shapes)
            steps = sequence(blocks, prod(mapped.shape))
            equal = tuple((reading(a), reading(b)) for a, b in copies)
            return JoinedParameter(
                shape=mapped.shape, steps=steps, cat_dim=None, vocabulary=matched[VOCABULARY], equal=equal
            )
        if self._matches(REPLICATED, name):
            return self._replicated(shapes)
        if self._matches(AVERAGED, name):
            one = self._replicated(shapes)
            return JoinedParameter(shape=one.shape, steps=one.steps, cat_dim=None, averaged=len(shapes) > 1)
        if self._matches(TWO_SUBS, name):
            return _two_sub_params(shapes)
        if subs is not None:
            marks, full, blocks = resolve(*subs, shapes)
            return JoinedParameter(
                shape=full, steps=sequence(blocks, prod(full)), cat_dim=None, sub_params=marks
            )
        dim = 1 if self._matches(BY_ROW, name) else 0
        if len(shapes) == 1:
            return JoinedParameter(
                shape=shapes[0], steps=sequence([whole(shapes[0], 0)], prod(shapes[0])), cat_dim=dim
            )
        full, blocks = along(shapes, dim)
        return JoinedParameter(shape=full, steps=sequence(blocks, prod(full)), cat_dim=dim)

    @staticmethod
    def _replicated(shapes: list[tuple[int, ...]]) -> JoinedParameter:
        """Return the first rank's copy; the others are compared with it."""
        if any(shape != shapes[0] for shape in shapes):
            raise RefusedError(f"it should be the same on all tensor ranks, but its shapes are {shapes}")
        first = sequence([whole(shapes[0], 0)], prod(shapes[0]))
        equal = tuple(
            (first, sequence([whole(shapes[0], rank)], prod(shapes[0]))) for rank in range(1, len(shapes))
        )
        return JoinedParameter(shape=shapes[0], steps=first, cat_dim=None, equal=equal)

    def _stripped(self, name: str, join: JoinedParameter) -> JoinedParameter:
        """Strip the padded rows of a vocabulary."""
        if not (join.vocabulary or self._matches(VOCABULARY, name)):
            return join
        if self._vocabulary is None or self._vocabulary < 0 or len(join.shape) != 2:
            raise RefusedError("a vocabulary parameter of two dimensions and original_vocab_size are needed")
        rows, row = min(self._vocabulary, join.shape[0]), join.shape[1]
        return JoinedParameter(
            shape=(rows, row),
            steps=first_rows(join.steps, rows, row),
            cat_dim=join.cat_dim,
            two_sub_params=join.two_sub_params,
            sub_params=join.sub_params,
            vocabulary=True,
            averaged=join.averaged,
            equal=join.equal,
        )

    def _sub_params_of(self, name: str) -> tuple[Declared, str] | None:
        for subs in self._subs:
            for pattern in subs.compiled:
                if pattern.match(name):
                    self._unmatched.discard(pattern.pattern)
                    return subs, pattern.pattern
        return None

    def _matches(self, key: str, name: str) -> bool:
        matched = [p for p in self._lists[key] if p.match(name)]
        if len(matched) > 1:
            raise RefusedError(f"it matches more than one of {key}")
        self._unmatched.difference_update(p.pattern for p in matched)
        return bool(matched)


def _two_sub_params(shapes: list[tuple[int, ...]]) -> JoinedParameter:
    """Each shard is two halves (gate and up projection); all first halves go before all second ones."""
    if any(not shape or shape[0] < 2 for shape in shapes):
        raise RefusedError(f"it should be two sub-parameters, but its shapes are {shapes}")
    full, _ = along(shapes, 0)
    widths = [[-(-s[0] // 2) for s in shapes], [s[0] // 2 for s in shapes]]
    blocks: list[Block] = fused(full, 0, widths)
    return JoinedParameter(shape=full, steps=sequence(blocks, prod(full)), two_sub_params=True)


def _compiled(value: Any, key: str) -> list[re.Pattern[str]]:
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise RefusedError(f"{key} of universal_checkpoint_info is no list of patterns")
    try:
        return [re.compile(v) for v in value]
    except re.error as error:
        raise RefusedError(
            f"{key} of universal_checkpoint_info holds an invalid pattern ({error})"
        ) from error
