"""Yield the disk to a save in flight, from its first file event, in every job on the same disk (P11: training
comes first).

A save is slowed by any I/O on its disk, whichever job causes it. Events come first and say little; the scan
that follows them decides whether there is a save, and how long it lasts.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ckptd.daemon.state.state import JobState

HINT_SECONDS = 0.3
"""Between an event and the look that it asks for: a save is many events."""
QUIET_SECONDS = 10.0
"""Or twice `settle`: other jobs go on beside a save that has not moved for so long."""
NEW_SECONDS = 60.0
"""Writes are heard for so long in a folder that came and has no shard yet."""
LONGEST_SECONDS = 1800.0
"""Other jobs go on beside what looks like a save for longer than that."""


class DiskYield:
    """Record which jobs of a daemon save on which disk (`st_dev` of save_dir); called in the deciding
    thread."""

    def __init__(self) -> None:
        self._places: dict[Hashable, tuple[int, Callable[[], None]]] = {}
        self._saving: dict[Hashable, float] = {}
        """Job that saves → when the save began (monotonic)."""

    def join(self, job: Hashable, device: int, pace: Callable[[], None]) -> None:
        """Register a job whose save_dir lies on `device`; `pace` makes it apply the rate that is right
        now.
        """
        self._places[job] = device, pace

    def leave(self, job: Hashable) -> None:
        """Forget a job that ended; nobody waits for its save."""
        self.set_saving(job, is_saving=False)
        self._places.pop(job, None)

    def jobs_beside(self, job: Hashable) -> list[Hashable]:
        """Other jobs on the disk of this one."""
        if job not in self._places:
            return []
        mine = self._places[job][0]
        return [other for other, (device, _) in self._places.items() if other is not job and device == mine]

    def is_save_beside(self, job: Hashable) -> bool:
        """Tell whether another job saves on the disk of this one."""
        now_seconds = time.monotonic()
        return job in self._places and any(
            self._places[other][0] == self._places[job][0] and now_seconds - since < LONGEST_SECONDS
            for other, since in self._saving.items()
        )

    def is_saving(self, job: Hashable) -> bool:
        """Tell whether the job saves, and others make way for it."""
        return job in self._saving

    def seconds_to_look(self, job: Hashable) -> float:
        """Return the seconds until a saving job looks whether others must still make way; infinite: it does
        not save."""
        return QUIET_SECONDS if self.is_saving(job) else math.inf

    def set_saving(self, job: Hashable, *, is_saving: bool) -> None:
        """A save begins or ends; who shares the disk takes its new pace at once."""
        if job not in self._places or is_saving == (job in self._saving):
            return
        if is_saving:
            self._saving[job] = time.monotonic()
        else:
            del self._saving[job]
        for device, pace in list(self._places.values()):
            if device == self._places[job][0]:
                pace()


class SaveDetector:
    """Detect a save from file events, and confirm it by the next scan; `hint` is called in any thread.

    `post` runs a call in the deciding thread at once, `on_writing` is the call when something is written.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        on_writing: Callable[[], None],
        settle_seconds: float,
    ) -> None:
        self._post = post
        self._on_writing = on_writing
        self._settle_seconds = settle_seconds
        self._hinted_at: float | None = None
        self._has_writing = self._had_writing = False
        self._deaf_until_seconds = -math.inf
        self._came: dict[str, float] | None = None
        """Folders without a shard → when they came; minus infinity: they were there at the first look."""

    def hint(self, *, is_writing: bool = False) -> None:
        """Something moved; `is_writing`: in a checkpoint, or a folder that may become one."""
        now_seconds = time.monotonic()
        is_writing = is_writing and now_seconds >= self._deaf_until_seconds
        is_first = (is_writing and not self._has_writing) or self._hinted_at is None
        self._has_writing |= is_writing
        if self._hinted_at is None:
            self._hinted_at = now_seconds
        if is_first:
            self._post(self._note_writing)

    def _note_writing(self) -> None:
        # a look that came between has seen what was written
        if self._hinted_at is not None and self._has_writing:
            self._on_writing()

    def begin_scan(self) -> bool:
        """A look begins: what is heard from now on asks for another; whether something was written."""
        self._hinted_at = None
        self._had_writing, self._has_writing = self._has_writing, False
        return self._had_writing

    def seconds_to_look(self, now_seconds: float) -> float:
        """Infinite: nothing was heard."""
        return math.inf if self._hinted_at is None else self._hinted_at + HINT_SECONDS - now_seconds

    def detects_save(self, state: JobState, now_seconds: float) -> bool:
        """Tell whether others make way: for a save that still moves, or a folder that came, not for one left.

        Writes that no save comes of (a log in a checkpoint that was sealed) are not heeded for a while.
        """
        bare = state.folders.listing.bare if state.folders.listing is not None else ()
        known = self._came
        begun = -math.inf if known is None else now_seconds
        self._came = {name: (known or {}).get(name, begun) for name in bare}
        patience = max(QUIET_SECONDS, 2 * self._settle_seconds)
        moves = any(
            now_seconds - state.folders.quiet[tag].since_seconds < patience for tag in state.folders.in_flight
        )
        is_saving = moves or any(now_seconds - at < QUIET_SECONDS for at in self._came.values())
        if self._had_writing:
            self._deaf_until_seconds = -math.inf if is_saving else now_seconds + QUIET_SECONDS
        return is_saving

    def newcomers(self, now_seconds: float) -> list[str]:
        """Folders that came lately and have no shard yet: a save begins with its folder."""
        return [name for name, at in (self._came or {}).items() if now_seconds - at < NEW_SECONDS]
