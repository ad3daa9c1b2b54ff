"""Which checkpoint is the best: the trainer's word, carried by COMMITs to every node (§5, H37).

trainer_state.json and metrics lie beside one node's shards; what all nodes keep rests on what all can read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.identity import Model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.save import Order


class Best(Model):
    """The metric that a trainer recorded for this checkpoint."""

    metric: str
    value: float
    is_best: bool = False


def best_named(words: Iterable[tuple[Order, str | None]]) -> str | None:
    """The tag that the newest save calls the best so far; `words`: of each save its order and what it names.

    A save that names none (a part without trainer_state.json) says nothing against what an older one named.
    """
    named = [(order, tag) for order, tag in words if tag is not None]
    return max(named)[1] if named else None
