"""Which of the checkpoints that were found at the first start are sent: `backfill` (H20, docs/adr/0155).

The newest of them is a guess where the run was rewound before the journal was begun: nobody saw it happen.
Whatever may be the newest is sent too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.keeping import may_be_newest, was_committed

if TYPE_CHECKING:
    from ckptd.core.view import JobView, SaveView


def to_ship(view: JobView, save: SaveView) -> bool:
    """Of the saves found at the first start all, those that may be the newest, or none are shipped."""
    if not save.was_found_first or save.is_adopted or view.backfill == "all":
        return True
    if view.backfill == "none":
        return False
    newest = view.newest_found.get(save.is_model_only)
    if newest is None or save.order >= newest or is_in_doubt(view, save):
        return True
    # what was begun while it was in doubt is ended; but for a part: the other nodes may have had no doubt
    is_part = save.save.is_part and save.is_intact
    return save.is_busy or (save.is_held and not is_part)


def is_in_doubt(view: JobView, save: SaveView) -> bool:
    """The trainer's `latest` names it, or nothing proves that what counts as newer is."""
    if not save.is_intact:
        return False
    return save.save.tag == view.latest or may_be_newest(save, view.intact[save.is_model_only])


def unsent(view: JobView) -> tuple[str, ...]:
    """Whole here, not committed, and left to `ckptd adopt`: newest first."""
    required = [r.name for r in view.remotes if r.is_required]
    whole = (s for kind in view.intact.values() for s in kind)
    left = [s for s in whole if not to_ship(view, s) and not was_committed(s.ships, required)]
    return tuple(s.save.tag for s in sorted(left, key=lambda s: s.order, reverse=True))
