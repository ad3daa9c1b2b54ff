"""`_ckptd/readers/<id>.json`: somebody reads checkpoints of a remote, and retention there waits for it.

Its age is by the store's clock; how long it has been held, by the reader's own monotonic clock, so that no
clock that is wrong makes a lease last. Whoever may not write there reads without one.
"""

from __future__ import annotations

from ckptd.base.names import ROOT
from ckptd.core.model.manifest import Document

READERS = f"{ROOT}/readers/"
RENEW_SECONDS = 120.0
SILENT_SECONDS = 600.0
"""A lease that was not renewed for so long is over: its reader was killed."""
MOST_SECONDS = 86400.0
"""So long retention waits for one reader at most, however often it renews its lease."""
SKEW_SECONDS = 3600.0
"""Difference that two nodes' clocks may have, where the store tells no times."""


class Reader(Document):
    """One reader of one checkpoint."""

    tag: str
    what: str
    """Command that reads: restore, resume, verify, convert, ckptd://."""
    host: str
    begun: str
    """RFC 3339, UTC, by the reader's clock, as is the next: for people, and where a store has no times."""
    renewed: str
    held_seconds: float
    """From the one to the other, by its monotonic clock."""

    def is_live(self, seconds_ago: float, *, is_store_time: bool) -> bool:
        """Tell whether retention waits for it; `seconds_ago`: since it was renewed."""
        patience = SILENT_SECONDS if is_store_time else SILENT_SECONDS + SKEW_SECONDS
        held = self.held_seconds + max(0.0, seconds_ago)
        is_told = is_store_time or seconds_ago > -SKEW_SECONDS
        return is_told and seconds_ago < patience and held < MOST_SECONDS
