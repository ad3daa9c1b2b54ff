"""Shards that an earlier run left in a folder under names that the run which counts does not use.

The daemon's verdict and the conversion ask the same function: they never judge one folder differently.
Nothing but the standard library is imported: the conversion's restricted children have no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """Describe a shard by what decides its layout; `stage` and `dtype` are its pickle's, None if unknown."""

    path: str
    is_optimizer: bool
    """True: optimizer states; False: model states."""
    is_ranked: bool
    """True: its name has a data-parallel rank."""
    stage: int | None
    dtype: str | None
    written_ns: int

    @property
    def prefix(self) -> str:
        """`bf16_` where bf16 was on when it was written."""
        return "bf16_" if self.path.rpartition("/")[2].startswith("bf16_") else ""


def stale_layout(shards: Iterable[WrittenShard]) -> frozenset[str]:
    """Return the shards of one folder that an earlier run left there with another ZeRO stage or precision.

    Their names differ from those of the run that counts, so it wrote beside them. Which one counts is proven
    by metadata: optimizer shards tell their stage, model states the precision and so the optimizer shards'
    prefix. Where that leaves both, the one counts whose optimizer shards were written last. Empty where there
    is one layout, or where nothing tells them apart: the contradiction is then the caller's.
    """
    rows = list(shards)
    optim = [s for s in rows if s.is_optimizer]
    model = [s for s in rows if not s.is_optimizer]
    prefixes, kinds = {s.prefix for s in optim}, {s.is_ranked for s in model}
    if len(prefixes) < 2 and len(kinds) < 2:
        return frozenset()
    found: dict[tuple[bool, str], int] = {}
    for is_ranked in kinds:
        dtype = next((s.dtype for s in model if s.is_ranked is is_ranked and s.dtype), None)
        for prefix in prefixes:
            own = [s for s in optim if s.prefix == prefix and s.stage in (None, *_stages(is_ranked))]
            if own and (dtype is None or (dtype == "bf16") is (prefix == "bf16_")):
                found[is_ranked, prefix] = max(s.written_ns for s in own)
    newest = [layout for layout, at in found.items() if at == max(found.values())]
    if len(newest) != 1:
        return frozenset()
    (is_ranked, prefix) = newest[0]
    stale = {s.path for s in optim if s.prefix != prefix}
    return frozenset(stale | {s.path for s in model if s.is_ranked is not is_ranked})


def _stages(is_ranked: bool) -> tuple[int, ...]:
    """Stages whose model states are named by rank, or are not."""
    return (3,) if is_ranked else (0, 1, 2)
