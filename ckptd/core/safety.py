"""The newest checkpoint that is safe, in a COMMIT on every required remote as last observed, and what is here
that would be lost with this node (P17, P2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.backfill import is_in_doubt, to_ship
from ckptd.core.keeping import is_committed, was_committed
from ckptd.core.save import Order
from ckptd.core.view import ZERO

if TYPE_CHECKING:
    from ckptd.core.view import JobView, RemoteCommit, SaveView


def newest_safe(view: JobView, below: Order | None = None) -> RemoteCommit | None:
    """Its COMMIT on the first required remote; None: nothing is safe, or no remote is required."""
    required = [r for r in view.remotes if r.is_required]
    if not required:
        return None
    held = [
        {(c.tag, c.order): c for c in r.commits if c.form == ZERO and not c.is_model_only} for r in required
    ]
    common = set.intersection(*(set(h) for h in held))
    if below is not None:
        common = {key for key in common if key[1] < below}
    return held[0][max(common, key=_order)] if common else None


def _order(key: tuple[str, Order]) -> Order:
    return key[1]


def exposed(view: JobView, safe: RemoteCommit | None) -> SaveView | None:
    """The newest save of this node that is newer than the safe one, or may be; None: there is none.

    Of the safe one's step too: a run that was rewound saves it again, with other weights. There this node's
    own record decides: nodes may count the saves of a step unlike each other.
    """
    saves = (s for s in view.saves if not s.is_model_only and (s.is_intact or s.is_held or s.is_busy))
    return max((s for s in saves if _is_newer(view, s, safe)), key=lambda s: s.order, default=None)


def _is_newer(view: JobView, save: SaveView, safe: RemoteCommit | None) -> bool:
    if safe is None or save.order[:2] > safe.order[:2]:
        return True
    if save.order > safe.order:
        return not is_committed(view, save)
    required = [r.name for r in view.remotes if r.is_required]
    return is_in_doubt(view, save) and to_ship(view, save) and not was_committed(save.ships, required)


def steps_at_risk(view: JobView, save: SaveView) -> int:
    """What is gone if that save is: all since the newest safe one of a lower step in its branch."""
    branch, step = save.order.branch, save.order.step
    below = newest_safe(view, Order(branch, step, 0))
    return max(1, step - (below.step if below is not None and below.branch == branch else 0))
