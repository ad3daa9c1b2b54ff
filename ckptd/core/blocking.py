"""Why nothing leaves the node although it should, or although the disk is short: for people (P17).

A pure function beside the planner: it decides nothing, and says what the planner found in its way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.deriving import is_open, stays_for_want_of
from ckptd.core.keeping import is_committed
from ckptd.core.keeping_remote import is_configured_otherwise, to_retire
from ckptd.core.ladder import GONE
from ckptd.core.optout import unheard
from ckptd.core.pruning import victims
from ckptd.core.view import UNIVERSAL, DerivedState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized

    from ckptd.core.ladder import Fate
    from ckptd.core.view import JobView, RemoteView, SaveView

SOON_SECONDS = 120.0
LONG_SECONDS = 900.0
"""Longer than any save takes: the trainer hangs in it, or something else writes in its folder."""
_NO_ROOM = "whole because there is no room to make the universal form that the ladder leaves instead"
_NO_FORM = "whole because the ladder leaves a universal form instead, and it has none"
_GOES_ON = "nothing to do; if this was meant, it goes on within the hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """What holds retention up; worth a word once it has lasted `patience_seconds`."""

    what: str
    """Stays the same while the same thing is in the way."""
    text: str
    next_step: str
    patience_seconds: float
    is_told_at_once: bool = False
    """Say as a note that more lies here than the policy keeps, until that patience is over."""


def blocked(view: JobView, fates: dict[int, Fate]) -> Blocked | None:
    """The first thing in the way of what may go; else, on a short disk, why nothing may."""
    if view.tenure is not None and not view.tenure.holds_lease:
        return None  # another host's business (adr/0110)
    may_go = victims(view, fates)
    if not may_go:
        return _all_kept(view, fates) if view.disk.is_short else None
    due = [save for save in may_go if save.id not in view.not_to_prune]
    if not due:
        return None  # each has a `prune-blocked` of its own
    names = f"{due[0].save.tag} may go and stays{_with(due)}"
    for is_so, what, next_step, patience in _obstacles(view, due[0]):
        if is_so:
            return Blocked(
                what=what,
                text=f"{names}: {what}",
                next_step=next_step,
                patience_seconds=patience,
                # one that waits for the end of a save is what every save brings
                is_told_at_once=patience == LONG_SECONDS and len(due) > 1,
            )
    return None


def blocked_there(view: JobView, remote: RemoteView, fates: Mapping[tuple[str, str], Fate]) -> Blocked | None:
    """The seat belt of a remote, once it has held up for a while what may go there."""
    rests = view.is_first_scan or not view.may_delete or not remote.is_attached
    if rests or remote.retirements_left > 0:
        return None
    begin = view.now_seconds - SOON_SECONDS
    due = [
        c
        for c in to_retire(view, remote, fates)
        if view.due_since_seconds.get((remote.name, c.key), view.now_seconds) <= begin
    ]
    if not due:
        return None
    first = min(due, key=lambda c: c.order)
    what = "as many as are allowed in an hour were removed there (the seat belt)"
    return Blocked(
        what=what,
        text=f"{first.tag} may go from {remote.name} and stays{_with(due)}: {what}",
        next_step=_GOES_ON,
        patience_seconds=0.0,
    )


def _with(due: Sized) -> str:
    return f" (with {len(due) - 1} more)" if len(due) > 1 else ""


def _obstacles(view: JobView, first: SaveView) -> list[tuple[bool, str, str, float]]:
    """In the order in which the planner meets them; rights and a changed device have codes of their own."""
    away = [r.name for r in view.remotes if r.is_required and not r.is_attached]
    silent = unheard(view)
    needs_remote = bool(away) and view.unuploaded != "delete"
    needs_commit = view.unuploaded != "delete" or (not away and is_committed(view, first))
    return [
        (view.is_paused, "the job is paused", "`ckptd unpause`", SOON_SECONDS),
        (not view.may_delete, "ckptd may not delete here", "see the other problems", SOON_SECONDS),
        (
            any(is_configured_otherwise(view, remote) for remote in view.remotes),
            "the nodes of this job are configured differently",
            "give all of them one job file; see config-differs",
            SOON_SECONDS,
        ),
        (
            view.is_save_in_flight,
            "a save is in flight, and nothing is removed during one",
            "they go in the next pause between two saves (save less often); or does the trainer hang in it?",
            LONG_SECONDS,
        ),
        (
            view.deletions_left <= 0,
            "as many as are allowed in an hour were removed (the seat belt)",
            _GOES_ON,
            SOON_SECONDS,
        ),
        (
            needs_remote,
            f"required remote {', '.join(away)} is not attached, and its COMMIT is read before a removal",
            "bring the remote back",
            SOON_SECONDS,
        ),
        (
            bool(silent) and not needs_remote,
            f"required remote {', '.join(silent)} did not answer since the start, so its pins are not known",
            "bring the remote back",
            SOON_SECONDS,
        ),
        (
            needs_commit and first.id not in view.confirmations,
            "its COMMIT is not confirmed by every required remote",
            "`ckptd verify` shows what the remote holds; see the log",
            SOON_SECONDS,
        ),
    ]


def _all_kept(view: JobView, fates: dict[int, Fate]) -> Blocked | None:
    here = [s for s in view.saves if s.is_present]
    if not here:
        return None
    why = {s.id: _strongest(view, s, fates[s.id]) for s in here}
    counted = ", ".join(f"{count} {reason}" for reason, count in Counter(why.values()).most_common())
    left = _left_by_a_ladder(view)
    beside = f", and {left} universal form{'s' if left > 1 else ''} that the ladder left" if left else ""
    others = "`ckptd status --retention` names each; unpin, lower the limit, or free space"
    ending = _ending(view, [s for s in here if why[s.id] == _NO_ROOM], left)
    return Blocked(
        what="all are kept",
        text=f"the disk is short, and every checkpoint here is kept: {counted}{beside}",
        next_step=f"{adopting(view)}{ending}{others}",
        patience_seconds=SOON_SECONDS,
    )


def _left_by_a_ladder(view: JobView) -> int:
    ready = (s for s in view.saves if s.is_pruned and s.universal.state is DerivedState.READY)
    return sum(1 for _ in ready) if view.local_retention.has_rung(UNIVERSAL) else 0


def _ending(view: JobView, waiting: list[SaveView], left: int) -> str:
    """What helps where a ladder keeps more than the disk holds: its end; "" where it keeps nothing."""
    if not waiting and not left:
        return ""
    ends = view.local_retention.has_rung(GONE)
    word = 'lower `after` of its form "gone"' if ends else 'end it by { after = N, form = "gone" }'
    tenths = -(-_room_to_make(view, waiting) // 10**8)  # rounded up: so much is enough
    made = f", or free {tenths / 10:.1f} GB: then those forms are made" if waiting else ""
    return f"the ladder in [local] keeps more than this disk holds: {word}{made}; "


def _room_to_make(view: JobView, waiting: list[SaveView]) -> int:
    """Bytes to free before the first of these gets its form; the newest save gets its own before."""
    whole = (s for s in view.saves if s.is_intact and s.is_convertible)
    newest = max(whole, key=lambda s: s.order, default=None)
    is_first = newest is not None and is_open(newest.universal, view.now_seconds) and newest not in waiting
    wanted = [max((s.save.total_bytes for s in waiting), default=0)]
    wanted += [newest.save.total_bytes] if newest is not None and is_first else []
    return view.disk.reserve_bytes - view.disk.free_bytes + (0 if view.disk.can_clone else sum(wanted))


def unadopted(view: JobView) -> list[SaveView]:
    """What lies here from before the first start: neither a limit nor an opt-out ever lets it go."""
    return [s for s in view.saves if s.is_present and not s.is_adopted and not s.is_pinned]


def adopting(view: JobView) -> str:
    """The first step where such checkpoints hold the room, "" elsewhere; without a key none is rotated."""
    count = len(unadopted(view)) if view.local_retention.deletes else 0
    return f"`ckptd adopt` has the {count} found at the first start sent and rotated; " if count else ""


def _strongest(view: JobView, save: SaveView, fate: Fate) -> str:
    """The one reason that a person would have to change first."""
    if not save.is_adopted:
        return "found at the first start"
    if not is_committed(view, save):
        return "not committed yet"
    if save.is_pinned:
        return "pinned"
    if save.has_unlisted:
        return "with files that no COMMIT lists"
    if fate.awaits == UNIVERSAL and len(fate.keeps) == 1:
        may_be_made = stays_for_want_of(save, fate) and UNIVERSAL in view.local_forms
        is_tried = save.universal.state in (DerivedState.NONE, DerivedState.CONVERTING)
        return _NO_ROOM if may_be_made and is_tried else _NO_FORM
    return "within the policy" if fate.keeps else "free to go"
