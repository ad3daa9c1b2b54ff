"""What a job knows beyond its own disk: decisions, first start, orders recorded in remotes (P8, H20).

Decisions live as files in the state directory and as objects in the remote; the journal only mirrors them.
A save that a COMMIT lists already is recognised by its fingerprints and keeps its order (H49).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core import manifest as mf
from ckptd.core.coverage import order_of
from ckptd.core.generation import (
    Already,
    GenerationChoice,
    Retired,
    Use,
    choose_derived,
    choose_generation,
)
from ckptd.core.layouts import Role
from ckptd.core.manifest import Decision
from ckptd.core.save import Order
from ckptd.core.trainers import is_in_roots, layout_of
from ckptd.core.view import ZERO, GenerationAnswer, ShipState
from ckptd.daemon.recogniser import Recogniser
from ckptd.daemon.seen import adopt_commits, is_written_down, learn_forms, named_in
from ckptd.daemon.sharing import look_for_sharer
from ckptd.daemon.waiting import hear_of_parts
from ckptd.errors import CkptdError
from ckptd.place import opened_ours
from ckptd.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ckptd.core.save import SealedSave
    from ckptd.daemon.links import RemoteLink
    from ckptd.daemon.state import JobState
    from ckptd.journal import SaveRow

log = logging.getLogger("ckptd.knowledge")

DECISIONS = "decisions"
_DECISION_LIMIT_BYTES = 16 << 20
_BESIDE = (Role.SIDE, Role.EXTRA)
_OPEN = (ShipState.NEW, ShipState.FAILED, ShipState.WAITING)
_SETTLED_NS = 2_000_000_000
"""A folder that changed later than this before it was read may change again under the same time."""


def read_decisions(state_dir: Path) -> list[Decision]:
    """Decision files of the state directory; an unreadable one is left out (its remote copy counts)."""
    found: list[Decision] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), opened_ours(state_dir / DECISIONS) as fd:
        for name in sorted(os.listdir(fd)):
            if name.endswith(".json") and not name.startswith("."):
                with contextlib.suppress(CkptdError, OSError):
                    data = files.read_beneath(fd, name, limit_bytes=_DECISION_LIMIT_BYTES)
                    found.append(mf.parse(Decision, data, name))
    return found


def write_decision(state_dir: Path, decision: Decision) -> None:
    """Put a decision into the state directory, durable when it returns."""
    name = f"{decision.kind}~{mf.encode_name(decision.tag)}~{decision.serial}.json"
    with opened_ours(state_dir) as state_fd:
        os.close(files.open_dir_beneath(state_fd, DECISIONS, create_mode=0o777, is_durable=True))
        with files.opened_dir(DECISIONS, state_fd) as fd:
            files.write_atomic(fd, name, mf.to_bytes(decision))


def pinned_tags(decisions: Iterable[Decision]) -> frozenset[str]:
    """Tags whose newest pin or unpin is a pin."""
    newest: dict[str, Decision] = {}
    for decision in decisions:
        old = newest.get(decision.tag, decision)
        if decision.kind in ("pin", "unpin") and decision.serial >= old.serial:
            newest[decision.tag] = decision
    return frozenset(tag for tag, decision in newest.items() if decision.kind == "pin")


class Knowledge(Recogniser):
    """The `Recogniser` of one job: asks `links`, remembers in `state` and the state directory."""

    def __init__(
        self,
        state: JobState,
        state_dir: Path,
        links: Mapping[str, RemoteLink],
        node: str,
        tags_at_start: frozenset[str],
        save_spread_seconds: float,
        forms: Mapping[str, tuple[str, ...]],
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._state_dir = state_dir
        self._links = links
        self._node = node
        self._save_spread_seconds = save_spread_seconds
        self._forms = forms
        self._wake = wake
        self._first: frozenset[str] | None = None
        self.tags_at_start = tags_at_start
        self.decisions: tuple[Decision, ...] = ()
        self._own: list[Decision] = []
        self._read_as_of_ns: int | None = None

    @property
    def has_heard_all(self) -> bool:
        """Every remote has been observed since the start."""
        return all(link.observation is not None for link in self._links.values())

    @property
    def is_rebuilt(self) -> bool:
        """The journal knows all that remotes knew when it was begun: one may be away from here on."""
        return self._state.journal.meta("rebuilt") == "1"

    def refresh(self) -> bool:
        """Read decisions again: own files, and what the last observations showed; whether any is new."""
        seen = [d for link in self._links.values() if link.observation for d in link.observation.decisions]
        known = {(d.kind, d.tag, d.serial): d for d in [*seen, *self._local_decisions()]}
        before, self.decisions = self.decisions, tuple(sorted(known.values(), key=lambda d: d.serial))
        return self.decisions != before

    def _local_decisions(self) -> list[Decision]:
        """Those of the state directory, read when the folder has changed or may just be changing."""
        try:
            changed_ns = (self._state_dir / DECISIONS).stat().st_mtime_ns
        except OSError:
            return []
        if changed_ns != self._read_as_of_ns:
            self._read_as_of_ns = changed_ns if time.time_ns() - changed_ns > _SETTLED_NS else None
            self._own = read_decisions(self._state_dir)
        return self._own

    @property
    def pins(self) -> frozenset[str]:
        """Pinned tags."""
        return pinned_tags(self.decisions)

    def is_pinned(self, tag: str) -> bool:
        """Whether it is now: a pin may have come since the last turn (any thread)."""
        if (own := read_decisions(self._state_dir)) != self._own:
            self._read_as_of_ns = None  # whatever the folder's time says
        return tag in pinned_tags([*self.decisions, *own])

    @property
    def accepted(self) -> frozenset[tuple[tuple[str, str], ...]]:
        """Fingerprint sets that a person accepted."""
        return frozenset(d.fingerprints for d in self.decisions if d.kind == "accept")

    def adopt(self) -> None:
        """Apply adopt decisions to the journal."""
        for decision in self.decisions:
            if decision.kind == "adopt":
                tags = None if decision.tag == "*" else [decision.tag, *decision.tags]
                rows = self._state.rows.values()
                if any(not r.adopted and (tags is None or r.save.tag in tags) for r in rows):
                    self._state.journal.set_adopted(tags)
                    self._state.load()

    # --- Recogniser ------------------------------------------------------------------------------------

    def may_seal(self, tag: str) -> bool:
        """All remotes observed once (a new journal), and asked about a tag that they know and we do not."""
        if not self.is_rebuilt and not self.has_heard_all:
            return False
        if any(row.save.tag == tag for row in self._state.rows.values()):
            return True
        unasked = [
            link
            for link in self._links.values()
            if link.observation is not None and tag in link.known_tags() and tag not in link.tag_views
        ]
        for link in unasked:
            link.describe(tag, self._wake)
        return not unasked

    def known_order(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
        """The order in a committed manifest that lists exactly these shards, or that they had here before."""
        if (here := self._state.past_order(tag, fingerprints)) is not None:
            return here
        wanted = set(fingerprints)
        for link in self._links.values():
            manifests, _ = link.seen(tag)
            for seen in manifests:
                mine = [f for f in seen.manifest.files if f.role not in _BESIDE and f.replica_of is None]
                roots = layout_of(tag, (f.path for f in mine))[1]
                shards = {(f.path, f.fingerprint) for f in mine if is_in_roots(f.path, roots)}
                if seen.committed and seen.form == ZERO and shards and shards <= wanted:
                    found = seen.manifest
                    return Order(found.branch, found.step, found.save_seq)
        return None

    def highest(self) -> Order | None:
        """The highest order of any COMMIT or tombstone."""
        seen = [link.observation for link in self._links.values() if link.observation]
        orders = [order_of(view.commit) for one in seen for view in one.commits]
        orders += [Order(stone.branch, stone.step, stone.save_seq) for one in seen for stone in one.retired]
        return max(orders, default=None)

    def found_first(self) -> frozenset[str] | None:
        """Tags found at the first start, recorded as a decision: a lost journal is not a first start."""
        if self._first is None:
            recorded = next((d for d in read_decisions(self._state_dir) if d.kind == "first-start"), None)
            if recorded is None:
                if not self.has_heard_all:
                    return None
                recorded = self._recorded_in_remote() or self._record_first_start()
            self._first = frozenset(recorded.tags)
        # not when they were heard: before what was found is sealed one may be away, and its answer with it
        is_heard = self.has_heard_all and not self.is_rebuilt
        if is_heard and is_written_down(self._state, self._links.values(), self.highest()):
            self._state.journal.set_meta("rebuilt", "1")
        return self._first

    def _recorded_in_remote(self) -> Decision | None:
        for link in self._links.values():
            for decision in link.observation.decisions if link.observation else ():
                if decision.kind == "first-start" and decision.by == self._node:
                    write_decision(self._state_dir, decision)
                    return decision
        return None

    def _record_first_start(self) -> Decision:
        decision = Decision(
            kind="first-start",
            tag="*",
            tags=tuple(sorted(self.tags_at_start)),
            by=self._node,
            serial=time.time_ns(),
        )
        write_decision(self._state_dir, decision)
        for link in self._links.values():
            link.order(m.Record(decision=decision), lambda _: None)
        return decision

    # --- generations -----------------------------------------------------------------------------------

    def _notice_lost(self) -> None:
        """COMMITs that somebody removed from a remote: nothing is called safe on their account (P17)."""
        state = self._state
        for name, link in self._links.items():
            seen = link.observation
            if seen is None or not link.is_current or seen.damaged:
                continue
            held = {(view.key, view.sha256) for view in seen.commits if not view.disputed}
            for row in list(state.rows.values()):
                record = state.ship(row.id, name, ZERO)
                is_claimed = (row.state == "present" or row.held) and record.state is ShipState.COMMITTED
                if is_claimed and (record.commit_key, record.commit_sha256) not in held:
                    log.error("%s: %s no longer holds its COMMIT; it is looked for again", row.save.tag, name)
                    state.lose_commit(row.id, name, "its COMMIT is gone")
                    link.tag_views.pop(row.save.tag, None)

    def choose_generations(self) -> None:
        """Turn fresh tag views into generations; recognise what is committed or retired (H16, H49)."""
        for name, link in self._links.items():
            self._hear_of_commits(name, link)
            hear_of_parts(self._state, name, link.observation)
            look_for_sharer(self._state, link, self.tags_at_start)
        self._notice_lost()
        for row in list(self._state.rows.values()):
            if row.state == "present" or row.held:
                for name, link in self._links.items():
                    forms = self._forms[name]
                    for form in (ZERO,) if ZERO in forms else forms:
                        self._choose_generation(row, link, form)
        adopt_commits(self._state, self._links.values())

    def _choose_generation(self, row: SaveRow, link: RemoteLink, form: str) -> None:
        state, key = self._state, (row.id, link.name, form)
        record = state.ship(*key)
        if record.state not in _OPEN or key in state.generations:
            return
        match self._choose(row.save, link, form):
            case Use(generation=g):
                state.generations[key] = GenerationAnswer(generation=g, attempt=record.attempt)
            case Already() as already:
                found = {
                    "state": ShipState.COMMITTED,
                    "generation": already.generation,
                    "commit_key": already.commit_key,
                    "commit_sha256": already.commit_sha256,
                    "unlisted": already.unlisted,
                }
                state.put_ship(row.id, record.model_copy(update=found))
                link.changed()  # the observation may be older than that COMMIT
                log.info("%s (%s) is committed on %s already; nothing is sent", row.save.tag, form, link.name)
            case Retired(generation=g):
                update = {"state": ShipState.RETIRED, "generation": g}
                state.put_ship(row.id, record.model_copy(update=update))
            case None:
                pass

    def _hear_of_commits(self, name: str, link: RemoteLink) -> None:
        """What other nodes did: the COMMIT that a part waits for, or the end of one that counted (H1)."""
        state, seen = self._state, link.observation
        commits = seen.commits if seen is not None else ()
        made = {(v.commit.tag, v.commit.generation) for v in commits if v.commit.form == ZERO}
        disputed = {v.sha256: v.key for v in commits if v.disputed}
        learn_forms(state, name, self._forms[name], commits)
        update: dict[str, object]
        for row in state.rows.values():
            if row.state != "present" and not row.held:
                continue
            record = state.ship(row.id, name, ZERO)
            if record.state is ShipState.COMMITTED and record.commit_sha256 in disputed:
                reason = f"{disputed[record.commit_sha256]} is disputed"
                log.error("%s: %s; it is shipped again", row.save.tag, reason)
                update = {
                    "state": ShipState.NEW,
                    "commit_key": None,
                    "commit_sha256": None,
                    "reason": reason,
                }
            elif record.state is ShipState.WAITING and record.retry_at_seconds:
                if (row.save.tag, record.generation) not in made:
                    continue
                update = {"retry_at_seconds": 0.0}
            else:
                continue
            state.put_ship(row.id, record.model_copy(update=update))
            link.tag_views.pop(row.save.tag, None)

    def _choose(self, save: SealedSave, link: RemoteLink, form: str) -> GenerationChoice | None:
        """The choice on what the link was told of the tag; None while it was not asked."""
        if save.tag not in link.tag_views or link.settings.job_id is None:
            return None
        manifests, commits = link.seen(save.tag)
        retired = link.tag_views[save.tag].retired
        if form != ZERO:
            return choose_derived(save, form, manifests=manifests, commits=commits, tombstones=retired)
        return choose_generation(
            save,
            link.settings.job_id,
            manifests=manifests,
            commits=commits,
            tombstones=retired,
            save_spread_seconds=self._save_spread_seconds,
            named=named_in(link.tag_views[save.tag]),
        )
