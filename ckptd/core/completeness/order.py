"""Place a new save among all saves of a job: its order is (branch, step, save_seq) (docs/design.md §3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.save import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def next_order(step: int, highest: Order | None) -> Order:
    """Return the order of a save at `step`, sealed after `highest`, the highest order known anywhere.

    A step below the highest of the current branch starts the next branch (the run was rewound); a re-save at
    the newest step stays in the branch as its next save_seq. A constant-name writer is no special case.

    >>> next_order(5, Order(1, 8, 3))
    Order(branch=2, step=5, save_seq=1)
    """
    if highest is None:
        return Order(1, step, 1)
    if step < highest.step:
        return Order(highest.branch + 1, step, 1)
    return Order(highest.branch, step, highest.save_seq + 1)


def rebuilt_order(step: int, highest: Order | None, former: Iterable[Order] = ()) -> Order:
    """Return the order of a save from before a *new* journal was begun, which no remote knows.

    Below the highest known step it counts as old, not as a rewind: guessing a rewind would let an old save
    pass for the newest. If the run was rewound after all, its next save says so (`next_order`). `former`: all
    that its folder held before; it counts after a save of its step that it was written over.

    >>> rebuilt_order(5, Order(2, 8, 3)), rebuilt_order(5, Order(2, 8, 3), [Order(2, 5, 0)])
    (Order(branch=2, step=5, save_seq=0), Order(branch=2, step=5, save_seq=1))
    """
    if highest is not None and step < highest.step:
        same = [one.save_seq for one in former if (one.branch, one.step) == (highest.branch, step)]
        return Order(highest.branch, step, max(same, default=-1) + 1)
    return next_order(step, highest)


def overtaken_order(step: int, own: Order | None, highest: Order) -> Order:
    """Return the order of a save that lay here unsealed while another node committed up to `highest`.

    What it would have been given in time: after `own`, the highest known here. Where that is not before
    `highest` it counts as any older one does: a guess never makes it the newest by a branch of its own.

    >>> overtaken_order(5, Order(1, 4, 1), Order(1, 9, 3)), overtaken_order(7, Order(1, 6, 1), Order(2, 5, 1))
    (Order(branch=1, step=5, save_seq=2), Order(branch=1, step=7, save_seq=2))
    >>> overtaken_order(5, Order(1, 8, 1), Order(1, 9, 3)), overtaken_order(5, None, Order(1, 9, 3))
    (Order(branch=1, step=5, save_seq=0), Order(branch=1, step=5, save_seq=0))
    """
    in_time = next_order(step, own) if own is not None else highest
    return in_time if in_time < highest else rebuilt_order(step, highest)


def copied_order(step: int, original: Order, highest: Order) -> Order | None:
    """Return the order of a copy of `original` under another name: the same shards, if it is older.

    What is known already shows no rewind, and no going on with a branch that was left. None: it is as new as
    any, perhaps the same state saved under two names.

    >>> copied_order(5, Order(1, 5, 1), Order(1, 9, 3)), copied_order(5, Order(1, 5, 1), Order(2, 3, 1))
    (Order(branch=1, step=5, save_seq=0), Order(branch=1, step=5, save_seq=0))
    >>> copied_order(9, Order(1, 9, 1), Order(1, 9, 1)) is None
    True
    """
    is_left = original.branch < highest.branch and step == original.step
    return Order(original.branch, step, 0) if step < highest.step or is_left else None


def sealing_order(
    steps: Mapping[str, int], latest: str | None, seen_seconds: Mapping[str, float] | None = None
) -> list[str]:
    """Tags of several saves that are sealed in one turn, in the order in which they count as saved.

    First by when the daemon saw their last change (`seen_seconds`, monotonic: what appeared behind its back
    has one time), then by step; but what lies above the trainer's own `latest` goes first: it was saved
    before the run was rewound to below it. A hint of order only, no clock is asked (P9).

    >>> sealing_order({"a": 7, "b": 9, "c": 10}, "a")
    ['b', 'c', 'a']
    >>> sealing_order({"a": 7, "b": 9}, None, {"a": 20.0, "b": 10.0})
    ['b', 'a']
    """
    limit = steps.get(latest) if latest is not None else None
    seen = seen_seconds or {}
    return sorted(
        steps, key=lambda tag: (seen.get(tag, 0.0), limit is None or steps[tag] <= limit, steps[tag], tag)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoexistingSave:
    """Describe a save that another lay beside, unsealed, when it was sealed; or that other one."""

    order: Order
    """The order that was given."""
    seen_seconds: float
    """Monotonic: when this daemon saw its last change."""
    written_ns: int
    """Greatest mtime of its shards. It may raise doubt, never settle it: a clock deletes nothing (P9)."""
    is_latest: bool
    """The trainer's `latest` names it."""


def is_proven(one: CoexistingSave, other: CoexistingSave) -> bool:
    """Tell whether the order given to two saves may be relied on when one of them is to be deleted.

    Seen one after the other: if it was given so. Found at once: unless their times, or `latest`, contradict.
    """
    older, newer = sorted((one, other), key=lambda found: found.order)
    if older.seen_seconds != newer.seen_seconds:
        return older.seen_seconds < newer.seen_seconds
    return older.written_ns <= newer.written_ns and not older.is_latest
