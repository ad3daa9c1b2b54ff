"""Read committed objects again at a low rate, those longest unproven first, while nothing else is going on.

A damaged or unreadable object is a problem that names what to do. As long as it lasts its checkpoint is
treated as pinned: this node's copy may be the last good one. The position is kept in the journal.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from ckptd.base.identity import Model
from ckptd.config.commands import command_for
from ckptd.core.model.generation import order_of
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.messages import BadCopy, Scrub, Scrubbed
from ckptd.storage.remote.observe import live_commits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.config.schema import JobConfig
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession

log = logging.getLogger("ckptd.scrub")

LEAST_BYTES = 4 << 20
"""Less is not worth an order."""
MOST_SECONDS = 3600.0
"""Credit that is saved up while something else is under way."""
AGAIN_SECONDS = 86400.0
"""No COMMIT is read twice in so short a time."""
RECHECK_SECONDS = 30.0
"""Between looks at what is known to be bad: repaired, it is no problem any more."""
MOST_UNREAD = 64
"""Keys of one COMMIT that are remembered as unreadable; with more of them the reading of it ends there."""


class ScrubProgress(Model):
    """Record in the journal how far one remote is scrubbed, by the SHA-256 of COMMITs."""

    proven_at: dict[str, float] = Field(default_factory=dict)
    """Unix seconds."""
    current: str = ""
    after: str = ""
    bad: dict[str, tuple[BadCopy, ...]] = Field(default_factory=dict)
    unread: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Keys that I/O or rights kept from being read: neither good nor bad."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Key → tag of those in `bad` and `unread`: known also while the remote is away."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """COMMITs that some object is bad or unreadable of."""
        return tuple(dict.fromkeys((*self.bad, *self.unread)))

    def keys_of(self, sha: str) -> tuple[str, ...]:
        """Those objects."""
        return (*(copy.key for copy in self.bad.get(sha, ())), *self.unread.get(sha, ()))


class Scrubber:
    """Schedule the scrubbing of one job's remotes; every method is called in the deciding thread."""

    def __init__(self, config: JobConfig, state: JobState, sessions: Mapping[str, RemoteSession]) -> None:
        self._config = config
        self._state = state
        self._sessions = sessions
        self._rates = {
            remote.name: remote.scrub_bytes_per_day / 86400
            for remote in config.remotes
            if remote.scrub_bytes_per_day
        }
        self._credit = dict.fromkeys(self._rates, 0.0)
        self._filled_at = time.monotonic()
        self._rechecked_at: dict[str, float] = {}
        self._rechecks = 0
        self._damaged: frozenset[str] = frozenset()
        self._progress = {name: self._read(name) for name in self._rates}

    @property
    def damaged_tags(self) -> frozenset[str]:
        """Checkpoints that some remote holds damaged or unreadable, as far as known: no other copy may go."""
        return frozenset(
            progress.tags[sha]
            for progress in self._progress.values()
            for sha in progress.suspects
            if sha in progress.tags
        )

    def turn(self, *, is_wanted: bool = True) -> bool:
        """Go on where that is allowed, stop where it is not; whether what is damaged is other than before."""
        now = time.monotonic()
        passed, self._filled_at = now - self._filled_at, now
        is_quiet = is_wanted and self._is_quiet()
        for name, rate in self._rates.items():
            session = self._sessions[name]
            self._credit[name] = min(self._credit[name] + passed * rate, rate * MOST_SECONDS)
            if session.observation is None:
                continue
            self._forget(name)
            if session.scrub is not None:
                if not is_quiet:
                    session.cancel_scrub()
            elif is_quiet and session.is_ready:
                self._go_on(name, session, now)
        before, self._damaged = self._damaged, self.damaged_tags
        return before != self._damaged

    def _is_quiet(self) -> bool:
        state = self._state
        is_moving = (
            state.uploads.progress
            or state.saves.conversion
            or state.folders.in_flight
            or state.deletions.asking
        )
        if is_moving or state.is_first_scan or state.plan is None:
            return False
        return not state.plan.actions and not any(
            session.is_transferring for session in self._sessions.values()
        )

    def _views(self, name: str) -> tuple[m.CommitView, ...]:
        seen = self._sessions[name].observation if name in self._sessions else None
        return live_commits(seen) if seen is not None else ()

    def _forget(self, name: str) -> None:
        """COMMITs that do not count any more; then the problem is what is left."""
        known = {view.sha256 for view in self._views(name)}
        old = self._progress[name]
        kept = old.model_copy(
            update={
                what: {sha: value for sha, value in getattr(old, what).items() if sha in known}
                for what in ("proven_at", "bad", "unread")
            }
        )
        tags = {v.sha256: v.commit.tag for v in self._views(name) if v.sha256 in kept.suspects}
        kept = kept.model_copy(update={"tags": tags})
        if kept != old:
            self._keep(name, kept)
        self._say(name)

    def _go_on(self, name: str, session: RemoteSession, now: float) -> None:
        progress = self._progress[name]
        views = {view.sha256: view for view in self._views(name)}
        suspects = [sha for sha in progress.suspects if sha in views]
        is_due = now - self._rechecked_at.get(name, -RECHECK_SECONDS) >= RECHECK_SECONDS
        if suspects and is_due and self._credit[name] > 0:
            self._rechecked_at[name] = now
            self._rechecks += 1
            bad = suspects[self._rechecks % len(suspects)]
            self._order(
                name,
                session,
                views[bad],
                Scrub(
                    commit_key=views[bad].key,
                    commit_sha256=bad,
                    limit_bytes=1 << 62,
                    only=progress.keys_of(bad),
                ),
            )
            return
        if self._credit[name] < min(LEAST_BYTES, self._rates[name] * MOST_SECONDS):
            return
        view = views.get(progress.current) or self._next(name, views)
        if view is not None:
            after = progress.after if view.sha256 == progress.current else ""
            self._order(
                name,
                session,
                view,
                Scrub(
                    commit_key=view.key,
                    commit_sha256=view.sha256,
                    after=after,
                    limit_bytes=max(1, int(self._credit[name])),
                ),
            )

    def _next(self, name: str, views: Mapping[str, m.CommitView]) -> m.CommitView | None:
        """The one longest unproven; None: each was read lately, or is looked at for what it hides."""
        progress = self._progress[name]
        proven = progress.proven_at
        readable = [v for v in views.values() if v.sha256 not in progress.unread]
        due = [v for v in readable if time.time() - proven.get(v.sha256, 0.0) >= AGAIN_SECONDS]
        return min(due, key=lambda v: (proven.get(v.sha256, 0.0), order_of(v.commit)), default=None)

    def _order(self, name: str, session: RemoteSession, view: m.CommitView, order: Scrub) -> None:
        def done(answer: m.Answer) -> None:
            if isinstance(answer, Scrubbed):
                self._scrubbed(name, view, order, answer)
            elif isinstance(answer, m.Failed) and answer.error != "SourceChanged":
                log.warning("scrub of %s: %s", name, answer.message)
                self._credit[name] = 0.0

        session.start_scrub(order, done)

    def _scrubbed(self, name: str, view: m.CommitView, order: Scrub, answer: Scrubbed) -> None:
        self._credit[name] -= answer.read_bytes
        old = self._progress[name]
        if answer.is_gone:
            update: dict[str, object] = {"current": "", "after": ""}
        else:
            update = self._found(old, view, order, answer)
        self._keep(name, old.model_copy(update=update))
        self._say(name)

    def _found(
        self, old: ScrubProgress, view: m.CommitView, order: Scrub, answer: Scrubbed
    ) -> dict[str, object]:
        """Return the fields of the progress that one answer changes."""
        sha, keys = view.sha256, {copy.key for copy in answer.bad}
        # a disk that fails answers with errors: what it could not read was not found good
        stay = set(answer.unread)
        before = [c for c in old.bad.get(sha, ()) if c.key not in keys and (not order.only or c.key in stay)]
        bad = (*before, *answer.bad)
        # the keys of one pass add up; those that were asked for alone are all that is left
        hidden = [] if order.only or not order.after else list(old.unread.get(sha, ()))
        known = {copy.key for copy in bad}
        unread = tuple(dict.fromkeys(k for k in (*hidden, *answer.unread) if k not in known))
        update: dict[str, object] = {
            "bad": {k: v for k, v in old.bad.items() if k != sha} | ({sha: bad} if bad else {}),
            "unread": {k: v for k, v in old.unread.items() if k != sha}
            | ({sha: unread[:MOST_UNREAD]} if unread else {}),
            "tags": old.tags | {sha: view.commit.tag},
        }
        if not order.only:
            is_whole = answer.next_after is None
            ends = is_whole or len(unread) > MOST_UNREAD
            update |= {"current": "" if ends else sha, "after": "" if ends else answer.next_after or ""}
            if is_whole and not unread:
                update["proven_at"] = old.proven_at | {sha: time.time()}
        return update

    def _say(self, name: str) -> None:
        """Report at most two problems of a remote: the first bad and the first unreadable object."""
        self._say_unread(name)
        see = self._state.problems
        views = {view.sha256: view for view in self._views(name)}
        rows = [
            (views[s], copy)
            for s, copies in self._progress[name].bad.items()
            if s in views
            for copy in copies
        ]
        if not rows:
            see.clear("remote-object-damaged", name)
            return
        view, copy = rows[0]
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        text = f"{name}: {copy.key} is {copy.found}, committed was {copy.expected}{more}"
        step = command_for(self._config, "verify", view.commit.tag, "--repair", "--read-data")
        see.put("remote-object-damaged", name, text, step)

    def _say_unread(self, name: str) -> None:
        see = self._state.problems
        unread = self._progress[name].unread
        rows = [(view, key) for view in self._views(name) for key in unread.get(view.sha256, ())]
        if not rows:
            see.clear("remote-object-unreadable", name)
            return
        view, key = rows[0]
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        text = f"{name}: {key} cannot be read, so nobody knows whether it is as it was committed{more}"
        step = command_for(self._config, "verify", view.commit.tag, "--read-data")
        see.put("remote-object-unreadable", name, text, f"{step} says why")

    # --- journal ---------------------------------------------------------------------------------------

    def _read(self, name: str) -> ScrubProgress:
        try:
            return ScrubProgress.model_validate_json(self._state.journal.meta(f"scrub:{name}") or "{}")
        except ValidationError:
            return ScrubProgress()

    def _keep(self, name: str, progress: ScrubProgress) -> None:
        self._progress[name] = progress
        self._state.journal.set_meta(f"scrub:{name}", progress.model_dump_json())
