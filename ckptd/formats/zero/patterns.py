"""Join the tensor-parallel shards of each parameter as `universal_checkpoint_info` prescribes.

The trainer names parameters by patterns; the first rule that matches, in the stock converter's order, gives
a `Join`: geometry for the bytes and marks for the header of the parameter's files (docs/formats.md §6.1).
One tensor-parallel rank is the simple case of the same rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptd.errors import RefusedError
from ckptd.formats.zero import affine
from ckptd.formats.zero.blocks import Block, Step, along, first_rows, fused, reading, sequence, whole
from ckptd.formats.zero.facts import as_dict, as_int
from ckptd.formats.zero.sub_params import Declared, SubParams, declared, resolve

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
TWO_SUBS = "parameter_with_2_sub_params_cat_dim_0"
BY_ROW = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
_LISTS = (REPLICATED, AVERAGED, TWO_SUBS, BY_ROW, VOCABULARY)
_NAMES_ALL_SINCE = 0.4
"""The version that AutoTP writes: it names every parameter that is not cut along dimension 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
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
        self._affine = affine.Maps(info.get("affine_map"))
        self._vocabulary = as_int(info.get("original_vocab_size"))
        self._unmatched = {p.pattern for patterns in self._lists.values() for p in patterns}
        self._unmatched.update(p.pattern for subs in self._subs for p in subs.compiled)

    def join(self, name: str, shapes: list[tuple[int, ...]]) -> Join:
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

    def replicated(self, name: str, shapes: list[tuple[int, ...]]) -> Join:
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

    def _join(self, name: str, shapes: list[tuple[int, ...]]) -> Join:
        """Choose the first rule that matches; an affine map precedes all (and uses their patterns up)."""
        mapped = self._affine.find(name)
        subs = self._sub_params_of(name)
        matched = {key: self._matches(key, name) for key in _LISTS} if mapped else {}
        if mapped is not None:
            blocks, copies = mapped.blocks(shapes)
            steps = sequence(blocks, prod(mapped.shape))
            equal = tuple((reading(a), reading(b)) for a, b in copies)
            return Join(
                shape=mapped.shape, steps=steps, cat_dim=None, vocabulary=matched[VOCABULARY], equal=equal
            )
        if self._matches(REPLICATED, name):
            return self._replicated(shapes)
        if self._matches(AVERAGED, name):
            one = self._replicated(shapes)
            return Join(shape=one.shape, steps=one.steps, cat_dim=None, averaged=len(shapes) > 1)
        if self._matches(TWO_SUBS, name):
            return _two_sub_params(shapes)
        if subs is not None:
            marks, full, blocks = resolve(*subs, shapes)
            return Join(shape=full, steps=sequence(blocks, prod(full)), cat_dim=None, sub_params=marks)
        dim = 1 if self._matches(BY_ROW, name) else 0
        if len(shapes) == 1:
            return Join(shape=shapes[0], steps=sequence([whole(shapes[0], 0)], prod(shapes[0])), cat_dim=dim)
        full, blocks = along(shapes, dim)
        return Join(shape=full, steps=sequence(blocks, prod(full)), cat_dim=dim)

    @staticmethod
    def _replicated(shapes: list[tuple[int, ...]]) -> Join:
        """Return the first rank's copy; the others are compared with it."""
        if any(shape != shapes[0] for shape in shapes):
            raise RefusedError(f"it should be the same on all tensor ranks, but its shapes are {shapes}")
        first = sequence([whole(shapes[0], 0)], prod(shapes[0]))
        equal = tuple(
            (first, sequence([whole(shapes[0], rank)], prod(shapes[0]))) for rank in range(1, len(shapes))
        )
        return Join(shape=shapes[0], steps=first, cat_dim=None, equal=equal)

    def _stripped(self, name: str, join: Join) -> Join:
        """Without the padded rows of a vocabulary."""
        if not (join.vocabulary or self._matches(VOCABULARY, name)):
            return join
        if self._vocabulary is None or self._vocabulary < 0 or len(join.shape) != 2:
            raise RefusedError("a vocabulary parameter of two dimensions and original_vocab_size are needed")
        rows, row = min(self._vocabulary, join.shape[0]), join.shape[1]
        return Join(
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


def _two_sub_params(shapes: list[tuple[int, ...]]) -> Join:
    """Each shard is two halves (gate and up projection); all first halves go before all second ones."""
    if any(not shape or shape[0] < 2 for shape in shapes):
        raise RefusedError(f"it should be two sub-parameters, but its shapes are {shapes}")
    full, _ = along(shapes, 0)
    widths = [[-(-s[0] // 2) for s in shapes], [s[0] // 2 for s in shapes]]
    blocks: list[Block] = fused(full, 0, widths)
    return Join(shape=full, steps=sequence(blocks, prod(full)), two_sub_params=True)


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
