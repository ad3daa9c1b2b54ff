"""Which uploads that failed are tried again once their time has come: what `--once` waits for.

Not every failed one: of a save that went meanwhile, that nobody wants sent any more, or whose universal form
a newer one replaced, nothing is tried again, and a run that waited for it would never end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.backfill import to_ship
from ckptd.core.deriving import is_streamed, to_derive
from ckptd.core.planner import let_go
from ckptd.core.view import ZERO, DerivedState, ShipState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.core.ladder import Fate
    from ckptd.core.view import JobView, RemoteView, SaveView, ShipRecord


def tried_again(view: JobView, fates: dict[int, Fate]) -> list[ShipRecord]:
    """Failed uploads to attached remotes that are wanted still, whenever they are due."""
    loose = let_go(view, fates)
    return [
        record
        for remote in view.remotes
        if remote.is_attached
        for form in remote.forms
        for save in _wanted(view, remote, form)
        if save.id not in loose
        if (record := save.ship(remote.name, form)).state is ShipState.FAILED
    ]


def _wanted(view: JobView, remote: RemoteView, form: str) -> Iterator[SaveView]:
    if form != ZERO:
        # what is neither here nor made as it is sent waits for its conversion, not for a try
        for save in to_derive(view, remote, form):
            is_here = save.derived(form).state is DerivedState.READY
            if is_here or is_streamed(view, save, form, is_now=False):
                yield save
        return
    yield from (s for s in view.saves if (s.is_intact or s.is_held) and to_ship(view, s))
