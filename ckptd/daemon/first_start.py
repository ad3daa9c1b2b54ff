"""The first start of a daemon over a directory: a decision on what is not rotated until it is adopted (H20).

The state directory and every remote have it, so that neither a lost journal nor a lost state directory is a
first start. It is of one directory: another of the same node's name has a first start of its own (adr/0159).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptd.core.decision import Decision
from ckptd.core.view import ZERO
from ckptd.daemon.decisions import read_decisions, write_decision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ckptd.daemon.beginning import Beginning
    from ckptd.daemon.links import RemoteLink


class FirstStart:
    """That of one job; settled once every remote was heard, or where it is recorded already."""

    def __init__(
        self,
        beginning: Beginning,
        state_dir: Path,
        links: Mapping[str, RemoteLink],
        node: str,
        wake: Callable[[], None],
    ) -> None:
        self._beginning = beginning
        self._state_dir = state_dir
        self._links = links
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
        """Whether an `adopt` was said after this first start: one before it was of another."""
        return self._settled is not None and adopt.at not in self._settled.adopted

    def had_commit(self, tag: str) -> bool:
        """Whether a remote had a COMMIT of that name when the first start was recorded."""
        return self._settled is not None and tag in self._settled.committed

    def _recorded_here(self) -> Decision | None:
        recorded = read_decisions(self._state_dir, ("first-start",))
        return self._newest(recorded, is_any_place=self._beginning.holds_state)

    def _recorded_in_remote(self) -> Decision | None:
        seen = [link.observation for link in self._links.values() if link.observation is not None]
        newest = self._newest(d for one in seen for d in one.decisions if d.by == self._node)
        if newest is not None:
            write_decision(self._state_dir, newest)
        return newest

    def _newest(self, decisions: Iterable[Decision], *, is_any_place: bool = False) -> Decision | None:
        starts = [decision for decision in decisions if decision.kind == "first-start"]
        here = [one for one in starts if is_any_place or self._beginning.is_of_here(one)]
        return max(here, key=lambda decision: decision.serial, default=None)

    def _record(self) -> Decision:
        seen = [link.observation for link in self._links.values() if link.observation is not None]
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
