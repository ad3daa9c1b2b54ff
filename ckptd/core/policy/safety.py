"""Choose the saves to upload; find the newest safe one: with a COMMIT on every required remote, as last seen.

What is newer than the safe save would be lost with this node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.records import ZERO
from ckptd.core.model.save import Order
from ckptd.core.policy.local import is_committed, may_be_newest, was_committed

if TYPE_CHECKING:
    from ckptd.core.policy.view import JobView, RemoteCommit, SaveView


# --- Which saves from before the first start are uploaded: `existing` (ADR 0102) -------------------------
# If the run was rewound before the journal began, nobody saw it, and the newest of those saves is a guess.
# So every save that may be the newest is uploaded too.


def is_to_upload(view: JobView, save: SaveView) -> bool:
    """Tell whether a save is uploaded; of those found at the first start `existing` selects.

    It selects all of them, those that may be the newest, or none.
    """
    if not save.was_found_first or save.is_adopted or view.existing == "all":
        return True
    if view.existing == "none":
        return False
    newest = view.newest_found.get(save.is_model_only)
    if newest is None or save.order >= newest or is_in_doubt(view, save):
        return True
    # what was begun while it was in doubt is ended; but for a part: the other nodes may have had no doubt
    is_part = save.save.is_part and save.is_intact
    return save.is_busy or (save.is_held and not is_part)


def is_in_doubt(view: JobView, save: SaveView) -> bool:
    """Tell whether `latest` names it, or nothing proves that the saves that count as newer are."""
    if not save.is_intact:
        return False
    return save.save.tag == view.latest or may_be_newest(save, view.intact[save.is_model_only])


def unsent(view: JobView) -> tuple[str, ...]:
    """Whole here, not committed, and left to `ckptd accept --existing`: newest first."""
    required = [r.name for r in view.remotes if r.is_required]
    whole = (s for kind in view.intact.values() for s in kind)
    left = [s for s in whole if not is_to_upload(view, s) and not was_committed(s.uploads, required)]
    return tuple(s.save.tag for s in sorted(left, key=lambda s: s.order, reverse=True))


# --- The newest safe save --------------------------------------------------------------------------------


def newest_safe(view: JobView, below: Order | None = None) -> RemoteCommit | None:
    """Return the newest save on all required remotes, as its COMMIT on the first; None: there is none."""
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
    """Return the newest save of this node that is newer than the safe one, or may be; None: there is none.

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
    return is_in_doubt(view, save) and is_to_upload(view, save) and not was_committed(save.uploads, required)


def steps_at_risk(view: JobView, save: SaveView) -> int:
    """Return the steps lost with that save: those since the newest safe save of its branch below it."""
    branch, step = save.order.branch, save.order.step
    below = newest_safe(view, Order(branch, step, 0))
    return max(1, step - (below.step if below is not None and below.branch == branch else 0))
