"""Making way for a save: from its first file event, in every job on the same disk (P11, adr/0141).

A trainer does not mind whose transfers and conversions its disk serves while it saves. Events come first and
say little; the look that follows them decides whether there is a save, and how long it is one.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ckptd.daemon.state import JobState

HINT_SECONDS = 0.3
"""Between an event and the look that it asks for: a save is many events."""
QUIET_SECONDS = 10.0
"""Or twice `settle`: other jobs go on beside a save that has not moved for so long."""


class Way:
    """Which jobs of a daemon save on which disk (`st_dev` of save_dir); called in the deciding thread."""

    def __init__(self) -> None:
        self._places: dict[Hashable, tuple[int, Callable[[], None]]] = {}
        self._saving: set[Hashable] = set()

    def join(self, job: Hashable, device: int, pace: Callable[[], None]) -> None:
        """Its save_dir lies on this disk; `pace` lets it take the pace that is right now."""
        self._places[job] = device, pace

    def leave(self, job: Hashable) -> None:
        """It ended, and nobody waits for its save."""
        self.tell(job, is_saving=False)
        self._places.pop(job, None)

    def is_taken(self, job: Hashable) -> bool:
        """Somebody saves on the disk of this job."""
        return job in self._places and any(
            self._places[other][0] == self._places[job][0] for other in self._saving
        )

    def tell(self, job: Hashable, *, is_saving: bool) -> None:
        """A save begins or ends; who shares the disk takes its new pace at once."""
        if job not in self._places or is_saving == (job in self._saving):
            return
        (self._saving.add if is_saving else self._saving.remove)(job)
        for device, pace in list(self._places.values()):
            if device == self._places[job][0]:
                pace()


class Ear:
    """What one job heard since its last look; `hint` may be called in any thread.

    `post` runs a call in the deciding thread at once, `on_writing` is the call when something is written.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], on_writing: Callable[[], None]) -> None:
        self._post = post
        self._on_writing = on_writing
        self._hinted_at: float | None = None
        self._has_writing = False

    def hint(self, *, is_writing: bool = False) -> None:
        """Something moved; `is_writing`: in a checkpoint, or a folder that may become one."""
        is_first, self._has_writing = is_writing and not self._has_writing, self._has_writing or is_writing
        if self._hinted_at is None:
            self._hinted_at = time.monotonic()
            self._post(lambda: None)
        if is_first:
            self._post(self._on_writing)

    def take(self) -> bool:
        """A look begins: what is heard from now on asks for another; whether something was written."""
        self._hinted_at = None
        had_writing, self._has_writing = self._has_writing, False
        return had_writing

    def seconds_to_look(self, now_seconds: float) -> float:
        """Infinite: nothing was heard."""
        return math.inf if self._hinted_at is None else self._hinted_at + HINT_SECONDS - now_seconds


def is_being_saved(state: JobState, settle_seconds: float, now_seconds: float) -> bool:
    """Whether others make way: for a save that still moves, not for one that its writer left."""
    patience = max(QUIET_SECONDS, 2 * settle_seconds)
    return any(now_seconds - state.quiet[tag].since_seconds < patience for tag in state.in_flight)
