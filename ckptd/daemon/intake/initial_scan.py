"""Record what lay in save_dir before ckptd: at this daemon's first listing, and at the first start ever.

The first start is settled once every remote has answered. That may take days and restarts; what was saved
meanwhile does not count as found: without `existing = "all"`, only what was found stays unsent.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.core.model.decision import Decision
from ckptd.core.model.records import ZERO
from ckptd.daemon.intake.decisions import read_decisions, write_decision
from ckptd.storage.journal.schema import AT_BEGIN
from ckptd.storage.local.run_file import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ckptd.core.model.listing import SaveDirListing
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.journal.journal import Journal


@dataclass(frozen=True, slots=True)
class PreexistingSaves:
    """Tags, with and without a complete checkpoint below them."""

    now: frozenset[str]
    """There when this daemon first looked."""
    first: frozenset[str]
    """There when the journal was begun over this very directory."""
    place: str = ""
    """Identity of this directory, as a `first-start` notes it."""
    holds_state: bool = False
    """The state directory lies in it, moves and goes with it: what that has noted is of this directory."""
    since_ns: int = field(default=1 << 63, compare=False)
    """When the journal was begun over it (Unix); what is decided later on this node is of it."""

    def is_of_here(self, decision: Decision) -> bool:
        """Tell whether a recorded first start was over this directory, not over another of the same node."""
        return decision.place in ("", self.place)


class InitialScan:
    """Remember the tags that lay in save_dir when this daemon first listed it."""

    def __init__(self) -> None:
        self._born_ns = time.time_ns()
        self._is_awaited = False
        self._tags: frozenset[str] | None = None

    @property
    def tags(self) -> frozenset[str]:
        """Return the tags that were there at first; none before the first look."""
        return self._tags or frozenset()

    def awaits(self) -> None:
        """save_dir is missing, or another directory than the one that was looked at."""
        self._tags, self._is_awaited = None, True

    def record_first_listing(self, listing: SaveDirListing) -> bool:
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
) -> PreexistingSaves:
    """Return what lay in save_dir at the first start, from the journal, else from now.

    It is recorded now for a new journal, for one of a release that did not record it, and for another
    directory than before, of which nothing is known.
    """
    text = journal.meta(AT_BEGIN)
    known: Mapping[str, object] = json.loads(text) if text is not None else {}
    where = {"save_dir": save_dir, "inode": inode}
    place = place_of(save_dir, inode)
    tags, now_ns = known.get("tags"), time.time_ns()
    if not isinstance(tags, list) or any(known.get(key) != value for key, value in where.items()):
        journal.set_meta(AT_BEGIN, json.dumps(where | {"tags": sorted(now), "since_ns": now_ns}))
        return PreexistingSaves(now, now, place, holds_state, now_ns)
    since_ns = known.get("since_ns")
    since_ns = since_ns if isinstance(since_ns, int) else now_ns  # noted by a release without it
    return PreexistingSaves(now, frozenset(tags), place, holds_state, since_ns)


# --- The first start: what it found is not deleted until a person adopts it ------------------------------
# The state directory and every remote have it, so that neither a lost journal nor a lost state directory is a
# first start. It is of one directory: another of the same node's name has a first start of its own.


class FirstStart:
    """Decide which saves count as found at the first start, once every remote has answered or recorded it."""

    def __init__(
        self,
        beginning: PreexistingSaves,
        state_dir: Path,
        sessions: Mapping[str, RemoteSession],
        node: str,
        wake: Callable[[], None],
    ) -> None:
        self._beginning = beginning
        self._state_dir = state_dir
        self._sessions = sessions
        self._node = node
        self._wake = wake
        self._settled: Decision | None = None

    def settled(self, *, has_heard_all: bool) -> Decision | None:
        """The decision; None: a remote may have it and has not answered.

        Raises:
            OSError: it may be recorded here, and that cannot be read now.
        """
        if self._settled is None:
            self._settled = self._recorded_here()
        if self._settled is None and has_heard_all:
            self._settled = self._recorded_in_remote() or self._record()
        return self._settled

    def is_meant(self, adopt: Decision) -> bool:
        """Tell whether an `adopt` was said after this first start: one before it was of another."""
        return self._settled is not None and adopt.at not in self._settled.adopted

    def had_commit(self, tag: str) -> bool:
        """Tell whether a remote had a COMMIT of that name when the first start was recorded."""
        return self._settled is not None and tag in self._settled.committed

    def _recorded_here(self) -> Decision | None:
        recorded = read_decisions(self._state_dir, ("first-start",))
        return self._newest(recorded, is_any_place=self._beginning.holds_state)

    def _recorded_in_remote(self) -> Decision | None:
        seen = [session.observation for session in self._sessions.values() if session.observation is not None]
        newest = self._newest(d for one in seen for d in one.decisions if d.by == self._node)
        if newest is not None:
            write_decision(self._state_dir, newest)
        return newest

    def _newest(self, decisions: Iterable[Decision], *, is_any_place: bool = False) -> Decision | None:
        starts = [decision for decision in decisions if decision.kind == "first-start"]
        here = [one for one in starts if is_any_place or self._beginning.is_of_here(one)]
        return max(here, key=lambda decision: decision.serial, default=None)

    def _record(self) -> Decision:
        seen = [session.observation for session in self._sessions.values() if session.observation is not None]
        own = read_decisions(self._state_dir, ("adopt",))
        known = [*own, *(d for one in seen for d in one.decisions)]
        # said here while remotes were waited for: of what is recorded now
        meant = {one.at for one in own if one.serial > self._beginning.since_ns}
        committed = {
            view.commit.tag
            for one in seen
            for view in one.commits
            if not view.disputed and view.commit.form == ZERO
        }
        decision = Decision(
            kind="first-start",
            tag="*",
            tags=tuple(sorted(self._beginning.first)),
            committed=tuple(sorted(self._beginning.first & committed)),
            place=self._beginning.place,
            adopted=tuple(sorted({one.at for one in known if one.kind == "adopt" and one.at} - meant)),
            by=self._node,
            serial=time.time_ns(),
        )
        write_decision(self._state_dir, decision)
        self._wake()  # the next turn publishes it
        return decision
