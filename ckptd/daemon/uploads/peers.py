"""Track the job's other nodes: their heartbeats, and whether a save is spread over several nodes.

A heartbeat changes when a part is uploaded and what status says, never what is safe: commits follow from
manifests alone, deletions from COMMITs. Where the job file lets a checkpoint go uncommitted, a part must
still have other nodes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptd.core.completeness.grid import Spread
from ckptd.core.completeness.markers import role_of
from ckptd.core.model.heartbeat import BEAT_SECONDS, SeenNode
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import cells_of
from ckptd.core.model.records import ZERO
from ckptd.core.policy.leases import living
from ckptd.daemon.state.remote_sync import evidence_of
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.core.completeness.peer_evidence import PeerEvidence
    from ckptd.core.model.heartbeat import Heartbeat
    from ckptd.core.model.manifest import Commit
    from ckptd.core.policy.view import LeaseStatus
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.daemon.uploads.shared_dir import SharedDirLease

log = logging.getLogger("ckptd.nodes")

LOOK_SECONDS = 5.0
"""Between looks for other nodes while a save here cannot be explained without them."""
LONGEST_SECONDS = 60.0
"""The same, once a folder has lain there for ten times as long."""
SPREAD_SECONDS = 600.0
"""A node that was heard of within this is one that trains with us."""
NODE_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
NO_BEAT = ("hf://",)
"""Remotes that keep every version of every object for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    nodes: tuple[SeenNode, ...] = ()
    at_seconds: float = 0.0


class Peers:
    """One job's; every method is called in the deciding thread."""

    def __init__(
        self,
        state: JobState,
        sessions: Mapping[str, RemoteSession],
        heartbeat: Callable[[], Heartbeat],
        config_digest: str,
        environ: Mapping[str, str],
        wake: Callable[[], None],
        shared_lease: SharedDirLease | None = None,
        takeover_seconds: float = 3 * BEAT_SECONDS,
        on_other_places: Callable[[str, tuple[SeenNode, ...]], object] = lambda _remote, _seen: None,
        damaged_commits: Callable[[str], tuple[str, ...]] = lambda _remote: (),
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._heartbeat = heartbeat
        self._digest = config_digest
        self._node = next((session.settings.node for session in sessions.values()), "")
        self._wake = wake
        self.shared_lease = shared_lease
        """Lease of a directory that hosts share; None: save_dir is this host's alone."""
        self._takeover_seconds = takeover_seconds
        """A node that is silent for so long is replaced where it makes a form of a spread save (adr/0118)."""
        self._is_spread_by_scheduler = any(
            environ.get(name, "1").isdigit() and int(environ.get(name, "1")) > 1 for name in NODE_COUNTS
        )
        self._beats: dict[str, _Heard] = {}
        self._beat_at: dict[str, float] = {}
        self._looked_at: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        self._on_other_places = on_other_places
        """Told of daemons over other directories."""
        self._damaged_commits = damaged_commits
        """Return the COMMITs of a remote that this node tells the others are damaged."""

    # --- heartbeats ------------------------------------------------------------------------------------

    def turn(self, now_seconds: float) -> None:
        """Beat where it is due; look where a save cannot be explained."""
        for name, session in self._sessions.items():
            if session.attached is None or session.heartbeat is not None or session.settings.job_id is None:
                continue
            is_due = now_seconds - self._beat_at.get(name, -BEAT_SECONDS) >= self.beat_seconds
            if is_due and takes_beats(session):
                self._beat_at[name] = now_seconds
                self._send(name, session, self._heartbeat_for(session))
            elif self._is_in_doubt and now_seconds - self._looked_at.get(name, 0.0) >= LOOK_SECONDS:
                self._send(name, session, None)

    def send_last_heartbeats(self) -> None:
        """The last heartbeat, where one can be written; no lease is asked for any more."""
        for session in self._sessions.values():
            if session.attached is not None and session.settings.job_id is not None and takes_beats(session):
                heartbeat = self._heartbeat_for(session).model_copy(update={"ended": True})
                session.send_heartbeat(m.Beat(heartbeat=heartbeat, node=session.settings.node))

    def _heartbeat_for(self, session: RemoteSession) -> Heartbeat:
        update = {"job_id": session.settings.job_id, "damaged": self._damaged_commits(session.name)}
        return self._heartbeat().model_copy(update=update)

    def _send(self, name: str, session: RemoteSession, heartbeat: Heartbeat | None) -> None:
        asked_at = self._looked_at[name] = time.monotonic()
        waits = bool(self._state.uploads.waiting)
        shared_lease = (
            self.shared_lease if self.shared_lease is not None and self.shared_lease.remote == name else None
        )

        def heard(answer: m.Answer) -> None:
            if isinstance(answer, m.Beats):
                before, hosts, damaged = self.is_spread, self.hosts, self.damaged
                self._beats[name] = _Heard(nodes=answer.nodes, at_seconds=time.monotonic())
                self._on_other_places(name, answer.sharers)
                is_news = shared_lease is not None and shared_lease.heard(answer.lease, asked_at)
                if is_news or (before, hosts, damaged) != (self.is_spread, self.hosts, self.damaged):
                    self._wake()
            else:
                log.debug("heartbeat on %s: %s", name, answer)

        beat = m.Beat(
            heartbeat=heartbeat,
            node=session.settings.node,
            reads_all=waits,
            takeover_seconds=shared_lease.takeover_seconds if shared_lease is not None else None,
        )
        session.send_heartbeat(beat, heard)

    @property
    def damaged(self) -> frozenset[tuple[str, str, str]]:
        """(remote, tag, form) of what other nodes found damaged there."""
        told = {
            name: frozenset[str]().union(*(seen.damaged for seen in heard.nodes))
            for name, heard in self._beats.items()
        }
        return frozenset(
            (name, view.commit.tag, view.commit.form)
            for name, digests in told.items()
            if digests and (seen := self._sessions[name].observation) is not None
            for view in seen.commits
            if view.sha256 in digests
        )

    @property
    def lease_status(self) -> LeaseStatus | None:
        """Return what the planner must know of the lease; None: save_dir is this host's alone."""
        return None if self.shared_lease is None else self.shared_lease.view

    @property
    def hosts(self) -> frozenset[str]:
        """Name the living hosts that share the directory, with this one; none where it is this host's
        alone."""
        if self.shared_lease is None:
            return frozenset()
        return living(self._node, self.others, self.shared_lease.takeover_seconds)

    @property
    def beat_seconds(self) -> float:
        """Between heartbeats."""
        if self.shared_lease is None:
            return min(BEAT_SECONDS, self._takeover_seconds / 3)
        return self.shared_lease.beat_seconds(BEAT_SECONDS)

    @property
    def _is_in_doubt(self) -> bool:
        """Shards lack, and nobody but us is known."""
        is_lacking = any(v.missing for v in self._state.folders.verdicts.values()) or bool(
            self._without_model()
        )
        return is_lacking and not self.is_spread and self.shared_lease is None

    @property
    def others(self) -> tuple[SeenNode, ...]:
        """Other nodes by name, each as it was heard of last, ages as of now."""
        found: dict[str, SeenNode] = {}
        for heard in self._beats.values():
            since = time.monotonic() - heard.at_seconds
            for seen in (one for one in heard.nodes if self._is_of_run(one)):
                age = None if seen.seconds_ago is None else seen.seconds_ago + since
                known = found.get(seen.node)
                if known is None or (age or 0.0) < (known.seconds_ago or 0.0):
                    found[seen.node] = seen.model_copy(update={"seconds_ago": age})
        return tuple(found[name] for name in sorted(found))

    def _is_of_run(self, seen: SeenNode) -> bool:
        """Tell whether a node may be of this job's run; one that has not told its run may be."""
        run_id, theirs = self._state.run_id, seen.heartbeat.run_id if seen.heartbeat is not None else None
        return run_id is None or theirs in (None, run_id)

    # --- what follows ----------------------------------------------------------------------------------

    @property
    def is_spread(self) -> bool:
        """The job runs on several nodes: by Slurm's word, those heard of lately, or its newest COMMIT."""
        if self._is_spread_by_scheduler or any(
            seen.seconds_ago is not None and seen.seconds_ago < SPREAD_SECONDS for seen in self.others
        ):
            return True
        newest = self._newest_commit()
        return newest is not None and len(newest.manifests) > 1

    def spread(self, tag: str) -> Spread | None:
        """Return what other nodes hold of a folder, for its verdict; None: all of it should lie here, as
        where hosts share it."""
        if not self.is_spread or self.shared_lease is not None:
            return None
        parts = [row for row in self._state.saves.rows.values() if row.save.is_part]
        newest = max(parts, key=lambda row: row.save.order, default=None)
        spread = Spread(usual=cells_of(newest.save.files) if newest is not None else frozenset())
        return replace(spread, evidence=self._evidence(tag)) if tag in self._without_model() else spread

    def _without_model(self) -> frozenset[str]:
        """Folders with optimizer shards and no model states, as nodes without rank 0 have them."""
        listing = self._state.folders.listing
        return frozenset(
            folder.tag
            for folder in (listing.folders if listing else ())
            if (roles := {role_of(file.path) for file in folder.shards}) and roles == {Role.OPTIM}
        )

    def _evidence(self, tag: str) -> tuple[PeerEvidence, ...]:
        """Return the evidence in peers' manifests of a tag; they are read again as long as none of it is
        used.
        """
        quiet, verdict = self._state.folders.quiet.get(tag), self._state.folders.verdicts.get(tag)
        since = quiet.since_seconds if quiet is not None else 0.0
        # what was told before the last shard was written may be of the save before
        is_old = self._asked_at.get(tag, -LONGEST_SECONDS) <= since
        if is_old or verdict is None or verdict.grid is None:
            is_old = not self._read_manifests(tag, since, drops=is_old) and is_old
        views = (session.tag_views.get(tag) for session in self._sessions.values())
        return () if is_old else tuple(one for view in views if view is not None for one in evidence_of(view))

    def _read_manifests(self, tag: str, since: float, *, drops: bool) -> bool:
        """Ask for the tag's manifests, ever more seldom; False: it is not due."""
        now = time.monotonic()
        pause_seconds = min(max(LOOK_SECONDS, (now - since) / 10), LONGEST_SECONDS)
        if now - self._asked_at.get(tag, -LONGEST_SECONDS) < pause_seconds:
            return False
        self._asked_at[tag] = now
        for session in self._sessions.values():
            if drops:
                session.forget_tag(tag)
            if session.attached is not None:
                session.describe(tag, self._wake)
        return True

    def _newest_commit(self) -> Commit | None:
        commits = [
            view.commit
            for session in self._sessions.values()
            if session.observation
            for view in session.observation.commits
            if view.commit.form == ZERO and not view.disputed
        ]
        return max(commits, key=lambda c: (c.branch, c.step, c.save_seq), default=None)

    def differing(self) -> tuple[str, ...]:
        """Nodes that said lately that their job file tells another thing of what is kept (H12).

        What COMMITs tell of it is in core/policy/blockers.py; this one is known before the next COMMIT.
        """
        found = {
            seen.node
            for seen in self.others
            if seen.heartbeat is not None
            and seen.seconds_ago is not None
            and seen.seconds_ago < SPREAD_SECONDS
            and seen.heartbeat.config_digest != self._digest
        }
        return tuple(sorted(found))


def takes_beats(session: RemoteSession) -> bool:
    """Tell whether heartbeats are written to a remote."""
    return not session.settings.url.startswith(NO_BEAT)
