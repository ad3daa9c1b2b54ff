"""Read committed files again at a low rate, those longest unproven first, while nothing else is going on.

In each remote, and on this node as far as a remote says what its files were. A damaged or unreadable one is
a problem that names what to do. As long as it lasts no copy of its checkpoint may be deleted, and the damaged
one counts for no deletion of others. The position is kept in the journal.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from ckptd.base.identity import Model
from ckptd.base.names import ROOT
from ckptd.config.commands import command_for
from ckptd.core.model.generation import order_of
from ckptd.core.model.heartbeat import MOST_DAMAGED
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState
from ckptd.core.policy.view import HERE
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.messages import BadCopy, Scrub, Scrubbed
from ckptd.storage.remote.observe import live_commits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.daemon.state.problems import Code
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
_NOT_KEPT = "not repaired: this node keeps no copy of its documents"
MOST_UNREAD = 64
"""Keys of one COMMIT that are remembered as unreadable; with more of them the reading of it ends there."""


class ScrubProgress(Model):
    """Record in the journal how far one place is scrubbed, by the SHA-256 of COMMITs."""

    proven_at: dict[str, float] = Field(default_factory=dict)
    """Unix seconds."""
    current: str = ""
    after: str = ""
    bad: dict[str, tuple[BadCopy, ...]] = Field(default_factory=dict)
    unread: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Keys that I/O or rights kept from being read: neither good nor bad."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tag of those in `bad` and `unread`: known also while the remote is away."""
    forms: dict[str, str] = Field(default_factory=dict)
    """Form of those, as `tags`; of what an earlier release wrote it is not known."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """COMMITs that some object is bad or unreadable of."""
        return tuple(dict.fromkeys((*self.bad, *self.unread)))

    def keys_of(self, sha: str) -> tuple[str, ...]:
        """Those objects."""
        return (*(copy.key for copy in self.bad.get(sha, ())), *self.unread.get(sha, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Name what is bad of one COMMIT in one place: a remote by its name, or HERE."""

    place: str
    view: m.CommitView
    bad: tuple[BadCopy, ...]


class Scrubber:
    """Schedule the scrubbing of one job's places; every method is called in the deciding thread."""

    def __init__(self, config: JobConfig, state: JobState, sessions: Mapping[str, RemoteSession]) -> None:
        self._config = config
        self._state = state
        self._sessions = sessions
        amounts = {remote.name: remote.scrub_bytes_per_day for remote in config.remotes}
        amounts[HERE] = config.local.scrub_bytes_per_day
        self._rates = {place: amount / 86400 for place, amount in amounts.items() if amount}
        self._credit = dict.fromkeys(self._rates, 0.0)
        self._filled_at = time.monotonic()
        self._rechecked_at: dict[str, float] = {}
        self._rechecks = 0
        self._damaged: frozenset[tuple[str, str, str]] = frozenset()
        self._progress = {place: self._read(place) for place in self._rates}
        self._repairs: dict[tuple[str, str], str] = {}
        """(place, digest of the COMMIT) → what came of its repair."""
        self.is_quiet = False
        """Nothing else was going on at the last turn."""

    @property
    def damaged(self) -> frozenset[tuple[str, str, str]]:
        """(place, tag, form) of what is damaged or unreadable there, as far as known."""
        return frozenset(
            (place, progress.tags[sha], progress.forms.get(sha, ZERO))
            for place, progress in self._progress.items()
            for sha in progress.suspects
            if sha in progress.tags
        )

    def damaged_commits(self, remote: str) -> tuple[str, ...]:
        """Return the digests of COMMITs of which something is damaged in a remote, for other nodes."""
        return tuple(self._progress[remote].bad)[:MOST_DAMAGED] if remote in self._progress else ()

    def faults(self) -> list[Fault]:
        """Return what is known to be bad where a COMMIT says what it should be, oldest finding first."""
        return [
            Fault(place=place, view=view, bad=objects)
            for place, progress in self._progress.items()
            for sha, copies in progress.bad.items()
            if (objects := tuple(copy for copy in copies if not _is_document(copy)))
            for _, view in self._views(place)
            if view.sha256 == sha
        ]

    def take_repaired(self) -> list[tuple[str, list[str]]]:
        """Return the documents that were written again since the last call, by remote."""
        found = [(name, session.repaired) for name, session in self._sessions.items() if session.repaired]
        for name, _ in found:
            self._sessions[name].repaired = []
        return found

    def note_repair(self, fault: Fault, text: str) -> None:
        """Note what came of a repair; what it repaired is read again at once."""
        self._repairs[fault.place, fault.view.sha256] = text
        self._rechecked_at.pop(fault.place, None)

    def turn(self, *, is_wanted: bool = True) -> bool:
        """Go on where that is allowed, stop where it is not; whether what is damaged is other than before."""
        now = time.monotonic()
        passed, self._filled_at = now - self._filled_at, now
        self.is_quiet = is_wanted and self._is_quiet()
        if not self.is_quiet:
            for session in self._sessions.values():
                session.cancel_scrub()
        for place, rate in self._rates.items():
            self._credit[place] = min(self._credit[place] + passed * rate, rate * MOST_SECONDS)
            if place != HERE and self._sessions[place].observation is None:
                continue
            self._forget(place)
            if self.is_quiet:
                self._go_on(place, now)
        before, self._damaged = self._damaged, self.damaged
        return before != self._damaged

    def _is_quiet(self) -> bool:
        plan = self._state.plan
        return not self.is_disturbed() and plan is not None and not plan.actions

    def is_disturbed(self, by_all_but: str = "") -> bool:
        """Tell whether something moves or is saved, other than the folder of one tag."""
        state = self._state
        is_moving = (
            state.uploads.progress
            or state.saves.conversion
            or state.folders.in_flight - {by_all_but}
            or state.deletions.asking
            or state.is_first_scan
        )
        return bool(is_moving) or any(session.is_transferring for session in self._sessions.values())

    def _views(self, place: str) -> list[tuple[RemoteSession, m.CommitView]]:
        """COMMITs of what lies in a place, each with the session that tells of it."""
        if place != HERE:
            session = self._sessions.get(place)
            seen = session.observation if session is not None else None
            return [(session, view) for view in live_commits(seen)] if session and seen else []
        known = self._committed_here()
        found: dict[tuple[str, str], tuple[RemoteSession, m.CommitView]] = {}
        for session in self._sessions.values():
            for view in live_commits(session.observation) if session.observation else ():
                if view.sha256 in known:
                    found.setdefault((view.commit.tag, view.commit.form), (session, view))
        return list(found.values())

    def _committed_here(self) -> set[str]:
        """Digests of all COMMITs of forms that this node has, which say what their files here should be."""
        found = set()
        for row in self._state.saves.rows.values():
            forms = {ZERO} if row.state == "present" else set()
            forms |= {UNIVERSAL} if row.derived.state is DerivedState.READY else set()
            if forms:
                records = self._state.uploads.of(row.id).items()
                found |= {r.commit_sha256 for (_, form), r in records if form in forms and r.commit_sha256}
        return found

    def _forget(self, place: str) -> None:
        """COMMITs that do not count any more; then the problem is what is left."""
        views = [view for _, view in self._views(place)]
        known = self._committed_here() if place == HERE else {view.sha256 for view in views}
        old = self._progress[place]
        kept = old.model_copy(
            update={
                what: {sha: value for sha, value in getattr(old, what).items() if sha in known}
                for what in ("proven_at", "bad", "unread")
            }
        )
        seen = {view.sha256: view.commit for view in views if view.sha256 in kept.suspects}
        tags = {sha: tag for sha, tag in old.tags.items() if sha in kept.suspects}
        tags |= {sha: commit.tag for sha, commit in seen.items()}
        forms = {sha: form for sha, form in old.forms.items() if sha in kept.suspects}
        forms |= {sha: commit.form for sha, commit in seen.items()}
        kept = kept.model_copy(update={"tags": tags, "forms": forms})
        if kept != old:
            self._keep(place, kept)
        self._say(place)

    def _go_on(self, place: str, now: float) -> None:
        progress = self._progress[place]
        ready = {view.sha256: (session, view) for session, view in self._views(place) if _is_free(session)}
        suspects = [sha for sha in progress.suspects if sha in ready]
        is_due = now - self._rechecked_at.get(place, -RECHECK_SECONDS) >= RECHECK_SECONDS
        if suspects and is_due and self._credit[place] > 0:
            self._rechecked_at[place] = now
            self._rechecks += 1
            bad = suspects[self._rechecks % len(suspects)]
            self._order(place, *ready[bad], limit_bytes=1 << 62, only=progress.keys_of(bad))
            return
        if self._credit[place] < min(LEAST_BYTES, self._rates[place] * MOST_SECONDS):
            return
        current = ready.get(progress.current)
        if current is not None:
            self._order(place, *current, after=progress.after, limit_bytes=max(1, int(self._credit[place])))
            return
        due = self._next(place, [view for _, view in ready.values()])
        if due is not None:
            self._order(place, *ready[due.sha256], limit_bytes=max(1, int(self._credit[place])))

    def _next(self, place: str, views: Sequence[m.CommitView]) -> m.CommitView | None:
        """The one longest unproven; None: each was read lately, or is looked at for what it hides."""
        progress = self._progress[place]
        proven = progress.proven_at
        readable = [v for v in views if v.sha256 not in progress.unread]
        due = [v for v in readable if time.time() - proven.get(v.sha256, 0.0) >= AGAIN_SECONDS]
        return min(due, key=lambda v: (proven.get(v.sha256, 0.0), order_of(v.commit)), default=None)

    def _order(
        self,
        place: str,
        session: RemoteSession,
        view: m.CommitView,
        *,
        limit_bytes: int,
        after: str = "",
        only: tuple[str, ...] = (),
    ) -> None:
        order = Scrub(
            place="here" if place == HERE else "remote",
            commit_key=view.key,
            commit_sha256=view.sha256,
            after=after,
            limit_bytes=limit_bytes,
            only=only,
        )

        def done(answer: m.Answer) -> None:
            if isinstance(answer, Scrubbed):
                session.repaired += answer.repaired
                self._scrubbed(place, view, order, answer)
            elif isinstance(answer, m.Failed) and answer.error != "SourceChanged":
                log.warning("scrub of %s: %s", _named(place), answer.message)
                self._credit[place] = 0.0

        session.start_scrub(order, done)

    def _scrubbed(self, place: str, view: m.CommitView, order: Scrub, answer: Scrubbed) -> None:
        self._credit[place] -= answer.read_bytes
        old = self._progress[place]
        if answer.is_gone:
            update: dict[str, object] = {"current": "", "after": ""}
        else:
            update = self._found(old, view, order, answer)
        self._keep(place, old.model_copy(update=update))
        self._say(place)

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
            "forms": old.forms | {sha: view.commit.form},
        }
        if not order.only:
            is_whole = answer.next_after is None
            ends = is_whole or len(unread) > MOST_UNREAD
            update |= {"current": "" if ends else sha, "after": "" if ends else answer.next_after or ""}
            if is_whole and not unread:
                update["proven_at"] = old.proven_at | {sha: time.time()}
        return update

    def _say(self, place: str) -> None:
        """Report at most two problems of a place: the first bad and the first unreadable file."""
        code: Code = "local-file-damaged" if place == HERE else "remote-object-damaged"
        progress, where = self._progress[place], _named(place)
        rows = [(sha, copy) for sha, copies in progress.bad.items() for copy in copies]
        if rows:
            sha, copy = rows[0]
            text = f"{where}: {copy.key} is {copy.found}, committed was {copy.expected}{_more(rows)}"
            repair = _NOT_KEPT if _is_document(copy) else self._repairs.get((place, sha))
            step = command_for(self._config, "verify", progress.tags[sha], "--repair", "--read-data")
            self._state.problems.put(code, where, f"{text}; {repair}" if repair else text, step)
        else:
            self._state.problems.clear(code, where)
        code = "local-file-unreadable" if place == HERE else "remote-object-unreadable"
        hidden = [(sha, key) for sha, keys in progress.unread.items() for key in keys]
        if hidden:
            sha, key = hidden[0]
            unknown = "cannot be read, so nobody knows whether it is as it was committed"
            step = command_for(self._config, "verify", progress.tags[sha], "--read-data")
            text = f"{where}: {key} {unknown}{_more(hidden)}"
            self._state.problems.put(code, where, text, f"{step} says why")
        else:
            self._state.problems.clear(code, where)

    # --- journal ---------------------------------------------------------------------------------------

    def _read(self, place: str) -> ScrubProgress:
        try:
            return ScrubProgress.model_validate_json(self._state.journal.meta(f"scrub:{place}") or "{}")
        except ValidationError:
            return ScrubProgress()

    def _keep(self, place: str, progress: ScrubProgress) -> None:
        self._progress[place] = progress
        self._state.journal.set_meta(f"scrub:{place}", progress.model_dump_json())


def _is_document(copy: BadCopy) -> bool:
    return copy.key.startswith(f"{ROOT}/commits/")


def _is_free(session: RemoteSession) -> bool:
    return session.is_ready and session.scrub is None


def _named(place: str) -> str:
    return "this node" if place == HERE else place


def _more(rows: Sequence[object]) -> str:
    return f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
