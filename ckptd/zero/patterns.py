"""The patterns of `universal_checkpoint_info`, acting on one tensor-parallel rank (docs/formats.md §6.1).

With one rank every rule is a matter of the header (cat_dim or none, sub-parameter marks) and of dropping
padded vocabulary rows; no byte of the rest moves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ckptd.errors import RefusedError
from ckptd.zero.facts import as_int

_LISTS = (
    "tp_replicated_parameter_patterns",
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_row_parallelism_patterns",
    "vocabulary_parameter_patterns",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter's header looks: `cat_dim` None = none; `rows` = first dimension kept, None = all."""

    cat_dim: int | None = 0
    sub_params: int | None = None
    vocabulary: bool = False
    rows: int | None = None


class Patterns:
    """Matches names; remembers which patterns matched something."""

    def __init__(self, info: dict[Any, Any] | None) -> None:
        info = info or {}
        unsupported = info.get("autotp_unsupported_parameter_patterns")
        if unsupported:
            raise RefusedError(f"the trainer marked parameters as not convertible: {list(unsupported)[:3]}")
        if info.get("parameter_with_sub_params"):
            raise RefusedError(
                "parameters with sub-parameters (fused layers of AutoTP) are not supported yet"
            )
        self._lists = {key: _compiled(info.get(key), key) for key in _LISTS}
        self._vocabulary = as_int(info.get("original_vocab_size"))
        self._unmatched = {p.pattern for patterns in self._lists.values() for p in patterns}

    def rule(self, name: str, shape: tuple[int, ...]) -> Rule:
        """The rule for one parameter, first match as the stock converter has it."""
        vocabulary = self._matches("vocabulary_parameter_patterns", name)
        rows: int | None = None
        if vocabulary:
            if self._vocabulary is None or len(shape) != 2:
                raise RefusedError(f"{name} is a vocabulary parameter without original_vocab_size")
            rows = min(self._vocabulary, shape[0])
        if self._matches("tp_replicated_parameter_patterns", name):
            return Rule(None, None, vocabulary, rows)
        if self._matches("parameter_to_average_patterns", name):
            return Rule(None, None, vocabulary, rows)
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            return Rule(0, 2, vocabulary, rows)
        by_row = self._matches("parameter_with_row_parallelism_patterns", name)
        return Rule(1 if by_row else 0, None, vocabulary, rows)

    def unmatched(self) -> list[str]:
        """Patterns that matched no parameter (strict conversion refuses them)."""
        return sorted(self._unmatched)

    def _matches(self, key: str, name: str) -> bool:
        matched = [p for p in self._lists[key] if p.match(name)]
        if len(matched) > 1:
            raise RefusedError(f"{name} matches more than one of {key}")
        self._unmatched.difference_update(p.pattern for p in matched)
        return bool(matched)


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
