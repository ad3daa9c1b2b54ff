"""Look up saves that a job knows beyond its own disk: orders in remotes, decisions, the first start (P8,
H20).

A save that a COMMIT lists already is recognised by its fingerprints and keeps its order (H49: a restored copy
is not a new save).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckptd.core.completeness.sealing import shards_of
from ckptd.core.model.generation import (
    AlreadyCommitted,
    GenerationChoice,
    GenerationRetired,
    JoinGeneration,
    choose_derived,
    choose_generation,
    is_after,
    order_of,
)
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.model.save import Order
from ckptd.core.policy.view import GenerationAnswer
from ckptd.daemon.intake.decisions import DecisionPublisher, Decisions
from ckptd.daemon.intake.initial_scan import FirstStart
from ckptd.daemon.state.remote_sync import (
    adopt_commits,
    committed_shards,
    forget_gone,
    hear_of_parts,
    is_written_down,
    learn_forms,
    notice_lost,
    unread_manifests,
    unreadable_in,
)
from ckptd.daemon.uploads.shared_dir import look_for_sharer
from ckptd.storage.journal.history import ANY_TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ckptd.core.model.records import SaveRow
    from ckptd.core.model.save import SealedSave
    from ckptd.daemon.intake.initial_scan import PreexistingSaves
    from ckptd.daemon.intake.runs import JobRuns, Ready
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession


log = logging.getLogger("ckptd.knowledge")

_OPEN = (UploadState.NEW, UploadState.FAILED, UploadState.WAITING)


class KnownSaves:
    """The saves that a job's remotes know: asks `sessions`, remembers in `state` and the state directory."""

    def __init__(
        self,
        state: JobState,
        state_dir: Path,
        sessions: Mapping[str, RemoteSession],
        node: str,
        beginning: PreexistingSaves,
        save_spread_seconds: float,
        forms: Mapping[str, tuple[str, ...]],
        wake: Callable[[], None],
        runs: JobRuns,
    ) -> None:
        self._state = state
        self._state_dir = state_dir
        self._sessions = sessions
        self._save_spread_seconds = save_spread_seconds
        self._forms = forms
        self._wake = wake
        self._beginning = beginning
        self._first = FirstStart(beginning, state_dir, sessions, node, wake)
        self._decisions = Decisions(state.journal, state_dir)
        self._publisher = DecisionPublisher(state, sessions, wake)
        self._runs = runs

    @property
    def has_heard_all(self) -> bool:
        """Every remote has been observed since the start; of two that are one place the first."""
        return all(
            session.observation is not None or session.is_duplicate for session in self._sessions.values()
        )

    @property
    def is_rebuilt(self) -> bool:
        """The journal knows all that remotes knew when it was begun: one may be away from here on."""
        return self._state.journal.meta("rebuilt") == "1"

    @property
    def _goes_on_without(self) -> bool:
        """Tell whether a rebuilt journal goes on without the remotes that are away."""
        sessions = self._sessions.values()
        return self.is_rebuilt and all(one.observation or one.is_duplicate or one.is_away for one in sessions)

    def refresh(self) -> bool:
        """Read decisions again: own files, and what the last observations showed; whether any is new.

        What a remote lacks of them is published there again (adr/0165).
        """
        seen = {
            name: session.observation
            for name, session in self._sessions.items()
            if session.observation is not None
        }
        self._state.deletions.note_observed(seen)
        decided = [d for one in seen.values() for d in one.decisions]
        damaged = [d for one in seen.values() for d in one.damaged_pins]
        has_news = self._decisions.refresh(decided, damaged)
        self._publisher.turn(self._decisions.words)
        return has_news

    @property
    def pins(self) -> frozenset[str]:
        """Pinned tags."""
        return self._decisions.pins

    def is_pinned(self, tag: str) -> bool:
        """Tell whether a tag is pinned now: a pin may have come since the last turn (any thread)."""
        return self._decisions.is_pinned(tag)

    @property
    def accepted(self) -> frozenset[tuple[tuple[str, str], ...]]:
        """Fingerprint sets that a person accepted."""
        return self._decisions.accepted

    def adopt(self) -> None:
        """Apply adopt decisions to the journal."""
        for decision in self._decisions.known:
            if decision.kind == "adopt" and self._first.is_meant(decision):
                tags = None if decision.tag == "*" else [decision.tag, *decision.tags]
                rows = self._state.saves.rows.values()
                if any(not r.adopted and (tags is None or r.save.tag in tags) for r in rows):
                    self._state.journal.set_adopted(tags)
                    self._state.load()

    # --- what sealing asks -----------------------------------------------------------------------------

    def is_run_settled(self, ready: Ready) -> bool:
        """Tell whether the run is known: from the content of save_dir, else once every remote has
        answered.
        """
        has_heard_all = self.has_heard_all or self._goes_on_without
        return self._runs.is_settled(ready, has_heard_all=has_heard_all)

    def turn_of_runs(self) -> None:
        """Look at the run's word, and claim it where something is to be sent."""
        self._runs.turn(has_heard_all=self.has_heard_all or self._goes_on_without)

    def may_seal(self, tag: str) -> bool:
        """All remotes observed once (a new journal), and asked about a tag that they know and we do not."""
        if not self.is_rebuilt and not self.has_heard_all:
            return False
        if any(row.save.tag == tag for row in self._state.saves.rows.values()):
            return True
        unasked = [
            session
            for session in self._sessions.values()
            if session.observation is not None
            and tag in session.known_tags()
            and tag not in session.tag_views
        ]
        for session in unasked:
            if session.is_ready:
                session.describe(tag, self._wake)
        return not unasked

    def known_order(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
        """The order in a committed manifest that lists exactly these shards, or that they had here before."""
        if (here := self._state.saves.past_order(tag, fingerprints)) is not None:
            return here
        wanted = set(fingerprints)
        listed = (row for session in self._sessions.values() for row in self._listed(session, tag))
        return next((order for shards, order in listed if shards and shards <= wanted), None)

    def original(
        self, tag: str, fingerprints: tuple[tuple[str, str], ...], shards: frozenset[tuple[str, str]]
    ) -> Order | None:
        """Return the order of the same shards under another tag, from rows, the journal or manifests read;
        asks no remote.
        """
        if not shards:
            return None
        rows = (row.save for row in self._state.saves.rows.values() if row.save.tag != tag)
        orders = [save.order for save in rows if shards_of(save) == shards]
        for session in self._sessions.values():
            others = (one for one in session.tag_views if one != tag)
            orders += [
                order for one in others for held, order in self._listed(session, one) if held == shards
            ]
        past = self._state.journal.past_order(ANY_TAG, fingerprints)
        return max([*orders, *([past] if past is not None else [])], default=None)

    def _listed(self, session: RemoteSession, tag: str) -> Iterator[tuple[frozenset[tuple[str, str]], Order]]:
        """Shards and order of each committed manifest of a tag that was read, of this run."""
        run_id = self._state.run_id
        found = committed_shards(session, tag)
        return ((shards, order) for shards, order, run in found if run_id in (None, run))

    def highest(self) -> Order | None:
        """The highest order of any COMMIT or tombstone."""
        return max((order for _, order in self._committed_orders()), default=None)

    def orders_of(self, tag: str) -> list[Order]:
        """The order of each COMMIT and tombstone of a tag."""
        return [order for known, order in self._committed_orders() if known == tag]

    def _committed_orders(self) -> Iterator[tuple[str, Order]]:
        """Tag and order of each COMMIT and tombstone."""
        for session in self._sessions.values():
            if (seen := session.observation) is not None:
                yield from ((view.commit.tag, order_of(view.commit)) for view in seen.commits)
                yield from ((one.tag, Order(one.branch, one.step, one.save_seq)) for one in seen.retired)

    def may_precede(self, written_ns: int, order: Order) -> bool:
        """Tell whether files were written before a commit's save window ended; nodes' clocks agree to
        `save_spread`.
        """
        seen = [session.observation for session in self._sessions.values() if session.observation]
        commits = [v.commit for one in seen for v in one.commits if order_of(v.commit) == order]
        spread_seconds = self._save_spread_seconds
        return any(not is_after(written_ns, commit, spread_seconds) for commit in commits)

    def found_first(self) -> frozenset[str] | None:
        """Tags found at the first start, recorded as a decision: a lost journal is not a first start."""
        first = self._first.settled(has_heard_all=self.has_heard_all or self._goes_on_without)
        if first is None:
            return None
        # not when they were heard: before what was found is sealed one may be away, and its answer with it
        is_heard = self.has_heard_all and not self.is_rebuilt
        if is_heard and is_written_down(self._state, self._sessions.values(), self.highest()):
            self._state.journal.set_meta("rebuilt", "1")
        return frozenset(first.tags)

    def came_back(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> bool:
        """Tell whether a save found here had a COMMIT of exactly this content before this first start."""
        return self._first.had_commit(tag) and self.known_order(tag, fingerprints) is not None

    # --- generations -----------------------------------------------------------------------------------

    def choose_generations(self) -> None:
        """Turn fresh tag views into generations; recognise what is committed or retired (H16, H49)."""
        for name, session in self._sessions.items():
            self._hear_of_commits(name, session)
            hear_of_parts(self._state, name, session.observation)
            look_for_sharer(self._state, session, self._beginning.now)
        for name, session in self._sessions.items():
            notice_lost(self._state, session, self._forms[name])
        for row in list(self._state.saves.rows.values()):
            if row.state == "present" or row.held:
                for name, session in self._sessions.items():
                    forms = self._forms[name]
                    for form in (ZERO,) if ZERO in forms else forms:
                        self._choose_generation(row, session, form)
        adopt_commits(self._state, self._sessions.values())
        forget_gone(self._state, self._sessions.values())

    def _choose_generation(self, row: SaveRow, session: RemoteSession, form: str) -> None:
        state, key = self._state, (row.id, session.name, form)
        record = state.uploads.record(*key)
        if record.state not in _OPEN or key in state.uploads.generations:
            return
        match choice := self._choose(row.save, session, form):
            case JoinGeneration(generation=g):
                state.uploads.set_generation(key, GenerationAnswer(generation=g, attempt=record.attempt))
            case AlreadyCommitted() as already:
                state.uploads.update(
                    row.id,
                    record,
                    state=UploadState.COMMITTED,
                    generation=already.generation,
                    commit_key=already.commit_key,
                    commit_sha256=already.commit_sha256,
                    unlisted=already.unlisted,
                )
                session.mark_outdated()  # the observation may be older than that COMMIT
                log.info(
                    "%s (%s) is committed on %s already; nothing is sent", row.save.tag, form, session.name
                )
            case GenerationRetired(generation=g):
                state.uploads.update(row.id, record, state=UploadState.DELETED, generation=g)
        if isinstance(choice, AlreadyCommitted | GenerationRetired):
            session.forget_tag(row.save.tag)  # no upload of ours ends it: that of another node was it

    def _hear_of_commits(self, name: str, session: RemoteSession) -> None:
        """Take over what other nodes did: the COMMIT that a part waits for, or a dispute that ends one (H1:
        two nodes may commit at once).
        """
        state, seen = self._state, session.observation
        commits = seen.commits if seen is not None else ()
        made = {(v.commit.tag, v.commit.generation) for v in commits if v.commit.form == ZERO}
        disputed = {v.sha256: v.key for v in commits if v.disputed}
        learn_forms(state, name, self._forms[name], commits)
        update: dict[str, object]
        for row in state.saves.rows.values():
            if row.state != "present" and not row.held:
                continue
            record = state.uploads.record(row.id, name, ZERO)
            if record.state is UploadState.COMMITTED and record.commit_sha256 in disputed:
                reason = f"{disputed[record.commit_sha256]} is disputed"
                log.error("%s: %s; it is uploaded again", row.save.tag, reason)
                gone = {"commit_key": None, "commit_sha256": None}
                update = {"state": UploadState.NEW, **gone, "reason": reason}
            elif record.state is UploadState.WAITING and record.retry_at_seconds:
                if (row.save.tag, record.generation) not in made:
                    continue
                update = {"retry_at_seconds": 0.0}
            else:
                continue
            state.uploads.put(row.id, record.model_copy(update=update))
            session.forget_tag(row.save.tag)

    def _choose(self, save: SealedSave, session: RemoteSession, form: str) -> GenerationChoice | None:
        """The choice on what the session was told of the tag; None while it was not asked."""
        if save.tag not in session.tag_views or session.settings.job_id is None:
            return None
        manifests, commits = session.seen(save.tag)
        view = session.tag_views[save.tag]
        retired, unreadable = view.retired, unreadable_in(view, form)
        if form != ZERO:
            return choose_derived(
                save,
                form,
                manifests=manifests,
                commits=commits,
                tombstones=retired,
                unreadable=unreadable,
                job_id=session.settings.job_id,
                run_id=self._state.run_id,
            )
        return choose_generation(
            save,
            session.settings.job_id,
            manifests=manifests,
            commits=commits,
            tombstones=retired,
            save_spread_seconds=self._save_spread_seconds,
            named=unread_manifests(view),
            unreadable=unreadable,
            run_id=self._state.run_id,
        )
