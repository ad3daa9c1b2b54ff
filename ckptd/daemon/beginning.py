"""What lay in save_dir before us: when this daemon first looked, and when the first one did (H20, adr/0157).

The first start is settled once every remote has answered. That may take days and restarts; what was saved
meanwhile was not found.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.journal_tables import AT_BEGIN
from ckptd.local.run_file import place_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.core.decision import Decision
    from ckptd.core.listing import SaveDirListing
    from ckptd.journal import Journal


@dataclass(frozen=True, slots=True)
class Beginning:
    """Tags, with and without a complete checkpoint below them."""

    now: frozenset[str]
    """There when this daemon first looked."""
    first: frozenset[str]
    """There when the journal was begun over this very directory."""
    place: str = ""
    """Of this directory, as a `first-start` notes it."""
    holds_state: bool = False
    """The state directory lies in it, moves and goes with it: what that has noted is of this directory."""
    since_ns: int = field(default=1 << 63, compare=False)
    """When the journal was begun over it (Unix); what is decided later on this node is of it."""

    def is_of_here(self, decision: Decision) -> bool:
        """Whether a recorded first start was over this directory; not over another of that node's name."""
        return decision.place in ("", self.place)


class FirstLook:
    """What lay in save_dir when this daemon first looked: what the trainer saved before us."""

    def __init__(self) -> None:
        self._born_ns = time.time_ns()
        self._is_awaited = False
        self._tags: frozenset[str] | None = None

    @property
    def tags(self) -> frozenset[str]:
        """There already; none before it was looked at."""
        return self._tags or frozenset()

    def awaits(self) -> None:
        """save_dir is missing, or another directory than the one that was looked at (adr/0159)."""
        self._tags, self._is_awaited = None, True

    def look(self, listing: SaveDirListing) -> bool:
        """Settle it, once; whether this was that look.

        In a directory that was awaited what was written since this daemon began is the trainer's new save.
        """
        if self._tags is not None:
            return False
        folders = listing.folders
        if self._is_awaited:
            born = self._born_ns
            folders = tuple(f for f in folders if any(file.identity.mtime_ns < born for file in f.files))
        self._tags = frozenset(folder.tag for folder in folders)
        return True


def beginning(
    journal: Journal, save_dir: str, inode: int, now: frozenset[str], *, holds_state: bool = False
) -> Beginning:
    """What the journal noted; else what is noted now: a new journal, one of a release that noted nothing, or
    another directory than before, of which nothing is known.
    """
    text = journal.meta(AT_BEGIN)
    known: Mapping[str, object] = json.loads(text) if text is not None else {}
    where = {"save_dir": save_dir, "inode": inode}
    place = place_of(save_dir, inode)
    tags, now_ns = known.get("tags"), time.time_ns()
    if not isinstance(tags, list) or any(known.get(key) != value for key, value in where.items()):
        journal.set_meta(AT_BEGIN, json.dumps(where | {"tags": sorted(now), "since_ns": now_ns}))
        return Beginning(now, now, place, holds_state, now_ns)
    since_ns = known.get("since_ns")
    since_ns = since_ns if isinstance(since_ns, int) else now_ns  # noted by a release without it
    return Beginning(now, frozenset(tags), place, holds_state, since_ns)
