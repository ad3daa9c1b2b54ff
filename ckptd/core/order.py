"""Where a new save stands among all saves of a job: (branch, step, save_seq) (§3 *Order*, P9)."""

from __future__ import annotations

from ckptd.core.save import Order


def next_order(step: int, highest: Order | None) -> Order:
    """The order of a save at `step`, sealed after `highest`, the highest order known anywhere.

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
