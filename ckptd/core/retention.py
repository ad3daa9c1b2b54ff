"""Which checkpoints a policy keeps, and why: a pure function of an ordered list (§5 *Retention*).

Keeps join by union; every kept item carries its reasons, an item without one may go. The same function
serves the node's disk and each remote, so that both explain themselves in the same words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.identity import Model
from ckptd.core.save import Order

if TYPE_CHECKING:
    from collections.abc import Sequence


class RetentionPolicy(Model):
    """Keys of `[local]` and `[[remote]]`; all unset: nothing is deleted."""

    save_total_limit: int | None = None
    keep_every_steps: int | None = None
    keep_steps: tuple[int, ...] = ()

    @property
    def deletes(self) -> bool:
        """True when the policy lets anything go at all."""
        return self.save_total_limit is not None or self.keep_every_steps is not None or bool(self.keep_steps)


class Item(Model):
    """A committed checkpoint as the policy sees it."""

    key: str
    order: Order
    pinned: bool = False


def keep_reasons(items: Sequence[Item], policy: RetentionPolicy) -> dict[str, tuple[str, ...]]:
    """Reasons to keep, by key; an empty tuple means that the policy lets it go.

    Newest is by (branch, step, save_seq), so a rewound run's new saves count before the abandoned ones (P9).
    The newest item is always kept.
    """
    newest_first = sorted(items, key=lambda item: item.order, reverse=True)
    reasons: dict[str, tuple[str, ...]] = {}
    for rank, item in enumerate(newest_first, start=1):
        why: list[str] = []
        if not policy.deletes:
            why.append("nothing is deleted: no retention key is set")
        if policy.save_total_limit is not None and rank <= policy.save_total_limit:
            why.append(f"save_total_limit: {rank} of {policy.save_total_limit}")
        if policy.keep_every_steps and item.order.step % policy.keep_every_steps == 0:
            why.append(f"keep_every_steps {policy.keep_every_steps}")
        if item.order.step in policy.keep_steps:
            why.append(f"keep_steps {item.order.step}")
        if item.pinned:
            why.append("pinned")
        if rank == 1:
            why.append("newest committed")
        reasons[item.key] = tuple(why)
    return reasons
