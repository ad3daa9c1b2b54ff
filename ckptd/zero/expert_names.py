"""Names of native experts: optimizer shards know them by local number, weights by global one.

Every expert-parallel rank calls its experts 0, 1, … (docs/formats.md §7.1); the model-states files of experts
and a model without expert parallelism count through: global = rank × experts per rank + local.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


class ExpertNames:
    """Knows how many experts of each layer a rank holds, from all local names."""

    def __init__(self, names: Iterable[str]) -> None:
        found = (match for name in names if (match := _EXPERT.fullmatch(name)))
        self._locals: dict[str, set[int]] = {}
        for match in found:
            self._locals.setdefault(match[1], set()).add(int(match[2]))

    def globally(self, name: str, rank: int) -> str | None:
        """The global name of expert-parallel rank `rank`'s parameter `name`; None: it is no expert's."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        return f"{match[1]}{rank * len(self._locals[match[1]]) + int(match[2])}{match[3]}"
