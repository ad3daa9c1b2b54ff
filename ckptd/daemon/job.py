"""Run one job: its lock, its state, and its turn — scan, judge, seal, view, plan, act, in the deciding thread
(§3).

A job is *waiting* until its save_dir exists, *watching* until a checkpoint appears in it (nothing of ours is
created before, P11), then *active*.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from ckptd.base.owned_dirs import path_of
from ckptd.config.commands import node_name
from ckptd.config.schema import config_digest
from ckptd.core.model.listing import OURS
from ckptd.core.policy.uploads import EARLY
from ckptd.daemon.actions.control import Control
from ckptd.daemon.actions.executor import PlanExecutor
from ckptd.daemon.actions.healing import Healer
from ckptd.daemon.actions.local import LocalActions
from ckptd.daemon.crash_recovery import finish_after_crash
from ckptd.daemon.device import check_device
from ckptd.daemon.health.checks import is_at_rest, notice_gone, report_problems
from ckptd.daemon.health.drain import drain_view, uncommitted_at_close
from ckptd.daemon.health.foresight import begin_answer
from ckptd.daemon.health.removal import removal_view
from ckptd.daemon.heartbeat import heartbeat_of
from ckptd.daemon.idle import RESCAN_SECONDS, IdlePolicy
from ckptd.daemon.intake.initial_scan import InitialScan, beginning
from ckptd.daemon.intake.known_saves import KnownSaves
from ckptd.daemon.intake.listing import list_save_dir
from ckptd.daemon.intake.runs import JobRuns
from ckptd.daemon.intake.sealer import Sealer
from ckptd.daemon.node_id import node_id_of
from ckptd.daemon.resources.disk_yield import SaveDetector
from ckptd.daemon.save_dir_lock import close_save_dir, is_still, open_job
from ckptd.daemon.state.permissions import DeletionRights
from ckptd.daemon.state.problems import Problems
from ckptd.daemon.state.state import JobState
from ckptd.daemon.state.view_builder import build_view, folders_to_watch, planned
from ckptd.daemon.supervisor import JobSupervisor
from ckptd.daemon.uploads.attachment import on_attached, remote_settings
from ckptd.daemon.uploads.peers import Peers
from ckptd.daemon.uploads.scrub import Scrubber
from ckptd.daemon.uploads.session import RemoteSession
from ckptd.daemon.uploads.shared_dir import SharedDirLease
from ckptd.daemon.uploads.uploads import UploadManager
from ckptd.observe import logs
from ckptd.observe.audit import Audit
from ckptd.recover.select.job import owner_of, settings_to_ask
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local.fs import ensure_ours
from ckptd.storage.local.planned_uploads import planned_uploads
from ckptd.storage.local.state_dir import (
    awaits_checkpoint,
    is_default_state,
    prepare_state_dir,
    remember_job,
)
from ckptd.storage.local.watch import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptd.config.schema import DaemonConfig, JobConfig
    from ckptd.core.policy.view import JobView
    from ckptd.daemon.resources.limits import HostLimits
    from ckptd.daemon.resources.workers import Workers

log = logging.getLogger("ckptd.job")

NAMING_SECONDS = 5.0
BUSY_FRACTION = 0.1
"""Transfers move at this fraction while a save is in flight (P11)."""


class Job:
    """See the module's first lines. Every method is called in the deciding thread but `hint`."""

    def __init__(
        self,
        config: JobConfig,
        daemon: DaemonConfig,
        state_dir: Path,
        limits: HostLimits,
        workers: Workers,
        post: Callable[[Callable[[], None]], None],
        *,
        is_patient: bool = True,
        only_removes: bool = False,
        apart_from: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self._apart_from = apart_from
        self.state_dir = state_dir
        self.problems = Problems()
        self.state: JobState | None = None
        self.sessions: dict[str, RemoteSession] = {}
        self.view: JobView | None = None
        self.job_id: str | None = None
        self.node = config.node_name or daemon.node_name or node_name(os.environ)
        self._limits = limits
        self._pool = workers
        self.control = Control(only_removes=only_removes)
        self.supervisor = JobSupervisor(self, post, is_patient=is_patient)
        self.workers = workers.for_one(self.supervisor.guard)
        self._post = post
        self._fd: int | None = None
        self._lock: int = -1
        self.watcher: Watcher | None = None
        self.disk_yield = limits.disk_yield
        self._save_detector = SaveDetector(
            post, lambda: self.disk_yield.set_saving(self, is_saving=True), config.settle_seconds
        )
        self.needs_turn = True
        self.turns = 0
        self.plans = 0
        """Number of plans so far: what status says of the job may change with each."""
        self._initial_scan = InitialScan()
        self.deletion_rights = DeletionRights()
        self._active_at = 0.0
        self._uncommitted: str | None = None
        """Names what was not committed when save_dir was last looked at; None: this daemon never did."""
        self.idle = IdlePolicy()

    # --- opening ---------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """waiting, watching or active."""
        if self._fd is None:
            return "waiting"
        return "watching" if self.state is None else "active"

    @property
    def unseen(self) -> str:
        """Say why it is not known whether all that was saved here is committed; empty: it can be looked at,
        all of it is committed, or nothing was ever saved.
        """
        if self.state is not None:
            return ""
        if why := self.supervisor.failure or self._uncommitted:
            return why
        has_begun = self._uncommitted is None and (self.state_dir / "journal.db").exists()
        return f"{self.config.save_dir} does not exist" if self._fd is None and has_begun else ""

    def open(self) -> None:
        """Take the lock when save_dir exists.

        Raises:
            LockHeld: another daemon owns it (75).
        """
        save_dir = str(self.config.save_dir)
        opened = open_job(self.config, self.state_dir)
        if opened is None:
            self._initial_scan.awaits()
            hint = "it appears when training starts"
            self.problems.put("save-dir-missing", save_dir, f"{save_dir} does not exist yet", hint)
            self.supervisor.works()
            return
        self._fd, self._lock = opened
        self.problems.clear("save-dir-missing", save_dir)
        self.watcher = Watcher(save_dir, self._save_detector.hint)
        self.watcher.start()

    def _activate(self, save_dir_fd: int) -> JobState:
        """Open state, journal and remotes; finish what a crash left."""
        self._close_sessions()
        self.state_dir = make_state(self.state_dir, self.config.save_dir, save_dir_fd)
        remember_job(self.state_dir, self.config)
        logs.begin_file(self.config.name, self.state_dir)
        self.workers = self._pool.for_one(self.supervisor.guard)
        self._active_at = time.monotonic()
        is_inside = is_default_state(self.state_dir, self.config.save_dir)
        # first: it sets the journal aside that came with a copy
        node_id = node_id_of(self.state_dir, os.fstat(save_dir_fd).st_ino if is_inside else None)
        journal = Journal(self.state_dir / "journal.db")
        try:
            self.state = self._assemble(journal, node_id, save_dir_fd)
        except BaseException:
            journal.close()
            self.sessions = {}
            raise
        return self.state

    def _try_remotes(self, now_seconds: float) -> None:
        """Attach to the remotes of a job that waits: what is wrong with one is said before the first save.

        None is made this job's: save_dir may be spelled wrong. Whatever answers is left alone until then.
        """
        if not self.sessions:
            owner = owner_of(self.config, self.state_dir)
            apart_from = {"apart_from": (str(self.state_dir), *self._apart_from), "node": self.node}
            for remote in self.config.remotes:
                settings = settings_to_ask(self.config, remote, owner).model_copy(update=apart_from)
                own = (settings, self.problems, self.supervisor.post, lambda _: None, self._hear_of_remote)
                session = RemoteSession(*own, remote.bandwidth, self._limits.child_slots)
                self.sessions[remote.name] = session
        for session in self.sessions.values():
            if session.is_ready or session.is_new:
                session.end_child()
            else:
                session.turn(now_seconds)

    def _hear_of_remote(self) -> None:
        """Publish what a remote answered while the job waits."""
        self.plans += 1
        self.wake()

    def _close_sessions(self) -> None:
        for session in self.sessions.values():
            session.close()
        self.sessions = {}

    def _assemble(self, journal: Journal, node_id: str, save_dir_fd: int) -> JobState:
        required = tuple(remote.name for remote in self.config.remotes if remote.required)
        self.audit = Audit(self.state_dir / "audit.jsonl")
        digest = config_digest(self.config)
        state = JobState(
            journal,
            config_digest=digest,
            required=required,
            problems=self.problems,
            audit=self.audit,
            is_shared=self.config.shared_fs,
        )
        check_device(journal, save_dir_fd, self.problems, str(self.config.save_dir))
        state.load()
        known = (journal.meta(f"job_id:{remote.name}") for remote in self.config.remotes)
        self.job_id = next((job_id for job_id in known if job_id is not None), None)
        # the state directory of save_dir's own kind lies inside save_dir
        state_dir = str(self.state_dir)
        for remote in self.config.remotes:
            settings = remote_settings(
                self.config,
                remote,
                journal,
                node=self.node,
                node_id=node_id,
                state_dir=state_dir,
                apart_from=(state_dir, *self._apart_from),
            )
            heard = on_attached(
                remote.name,
                self.sessions,
                state,
                is_shared=self.config.shared_fs,
                learn_job_id=self.learn_job_id,
                wake=self.wake,
            )
            own = (settings, self.problems, self.supervisor.post, heard, self.wake)
            self.sessions[remote.name] = RemoteSession(*own, remote.bandwidth, self._limits.child_slots)
        self._connect(state, node_id, save_dir_fd)
        return state

    def _connect(self, state: JobState, node_id: str, save_dir_fd: int) -> None:
        """Make what acts on the state, each with all that it needs."""
        config, sessions = self.config, self.sessions
        heartbeat = partial(heartbeat_of, self, node_id)
        ours = (self.node, node_id)
        self.runs = JobRuns(config, state, sessions, save_dir_fd, ours, heartbeat, self.wake)
        shared_lease = SharedDirLease(config) if config.shared_fs else None
        scrubber = Scrubber(config, state, sessions)
        self.peers = Peers(
            state,
            sessions,
            heartbeat,
            state.config_digest,
            os.environ,
            self.wake,
            shared_lease,
            config.shared_takeover_seconds,
            self.runs.sharers.__setitem__,
            scrubber.damaged_commits,
        )
        self.known_saves = KnownSaves(
            state,
            self.state_dir,
            sessions,
            self.node,
            beginning(
                state.journal,
                str(config.save_dir),
                os.fstat(save_dir_fd).st_ino,
                self._initial_scan.tags,
                holds_state=is_default_state(self.state_dir, config.save_dir),
            ),
            config.save_spread_seconds,
            {remote.name: remote.forms for remote in config.remotes},
            self.wake,
            self.runs,
        )
        self.sealer = Sealer(config, state, self.workers, self.known_saves, self.wake, self.peers.spread)
        self.uploads = UploadManager(config, state.config_digest, state, sessions, self.audit, self.wake)
        self.local_actions = LocalActions(
            config,
            state,
            self.workers,
            self.audit,
            self._limits,
            self.wake,
            self.known_saves.is_pinned,
            shared_lease.holds if shared_lease is not None else lambda: True,
        )
        self.healer = Healer(config, state, self.state_dir, scrubber, self.workers, self.wake)
        self.executor = PlanExecutor(
            sessions,
            self.uploads,
            self.local_actions,
            state.journal,
            self._limits,
            self.wake,
            scrubber,
            self.healer,
        )

    def _finish_begun(self, state: JobState, save_dir_fd: int) -> None:
        """Finish deletions that a crash cut short, here and in remotes, unless another host has the lease;
        settle early uploads.
        """
        shared_lease = self.peers.shared_lease
        rests = (
            state.is_first_scan
            or self.control.is_resting
            or not self.control.may_act
            or (shared_lease is not None and not shared_lease.holds())
        )
        self.uploads.deleter.finish_interrupted(rests=rests)
        self.uploads.early.settle(rests=rests)
        if shared_lease is not None:
            shared_lease.take_over(state, save_dir_fd, self.audit)

    # --- hints -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A result arrived: plan again."""
        self.needs_turn = True

    def sleep(self) -> None:
        """Make no turn before the next is due."""
        self.needs_turn = False

    def learn_job_id(self, job_id: str) -> None:
        """Take the job's id from a remote that was attached."""
        self.job_id = job_id

    def seconds_to_next(self, now_seconds: float) -> float:
        """Return how long the loop may sleep for this job's sake."""
        if self.needs_turn:
            return 0.0
        if self.phase == "waiting":
            return 1.0
        rescan = min(self._rescan_seconds(), self.control.seconds_to_next)
        looked_seconds_ago = now_seconds - self.idle.scanned_at_seconds
        waits = [rescan - looked_seconds_ago, self._save_detector.seconds_to_look(now_seconds)]
        if self.state is not None:
            waits.append(self.sealer.next_due_seconds(now_seconds))
            waits += [wait for session in self.sessions.values() if (wait := session.seconds_to_wake) > 0]
            if any(session.open_requests for session in self.sessions.values()):
                waits.append(2.0)
        return max(0.0, min(waits))

    def _rescan_seconds(self) -> float:
        hears_all = self.watcher is not None and self.watcher.hears_all and not self.config.shared_fs
        # a turn looks at the remotes too: one that is away is tried again without much delay
        hears_all = hears_all and all(session.is_ready for session in self.sessions.values())
        rescan = min(self.idle.rescan_seconds(hears_all=hears_all), self.disk_yield.seconds_to_look(self))
        return min(rescan, self.peers.beat_seconds) if self.state is not None else rescan

    @property
    def _is_beside_save(self) -> bool:
        is_saving = self.state is not None and bool(self.state.folders.in_flight)
        return is_saving or (self.state is not None and self.disk_yield.is_save_beside(self))

    @property
    def slows_transfers(self) -> bool:
        """Transfers slow down for a save in flight, here or on this disk; during a drain they never do."""
        return self._is_beside_save and not self.control.is_draining

    @property
    def waits_for_memory(self) -> bool:
        """Tell whether conversions rest and transfers slow down: tasks of this node wait for memory."""
        return self._limits.memory_pressure.is_high and not self.control.is_draining

    def pace(self) -> None:
        """Slow down for a save in flight or a node short of memory (P11), rest when a person asked for it."""
        if self.state is None:
            return
        is_short = self.waits_for_memory
        self.local_actions.pace(is_resting=self._is_beside_save or self.control.is_resting or is_short)
        for session in self.sessions.values():
            # safety goes before comfort; what is uploaded early lies in memory
            slows = self.slows_transfers or (is_short and not self.state.uploads.is_first(session.name))
            session.pace(BUSY_FRACTION if slows and session.uploading != EARLY else 1.0)

    # --- the turn --------------------------------------------------------------------------------------

    def turn(self, now_seconds: float) -> None:
        """One pass: scan when due, then plan and act; what its own disk refuses is waited for."""
        self.supervisor.turn(lambda: self._turn(now_seconds))

    def _turn(self, now_seconds: float) -> None:
        if self._fd is None:
            if self.supervisor.seconds_left:
                return
            self.open()
            self.turns += 1
        if (fd := self._fd) is None:
            self.needs_turn = False
            self._try_remotes(now_seconds)
            return
        is_hinted = self._save_detector.seconds_to_look(now_seconds) <= 0
        scanned_at = self.idle.scanned_at_seconds
        settled = self.sealer.next_due_seconds(scanned_at) if self.state else RESCAN_SECONDS
        wait = min(self._rescan_seconds(), settled, self.control.seconds_to_next)
        is_due = now_seconds - scanned_at >= wait
        if is_hinted or is_due or self.turns == 0 or self.needs_turn:
            is_asked, self.needs_turn = self.needs_turn, False
            self._scan_and_act(fd, now_seconds, is_asked=is_asked)
        elif now_seconds - self.idle.stood_at_seconds >= RESCAN_SECONDS:
            self._still_stands(fd, now_seconds)

    def _scan_and_act(self, save_dir_fd: int, now_seconds: float, *, is_asked: bool) -> None:
        is_asked |= self._save_detector.begin_scan() or self.disk_yield.is_saving(self)
        self.idle.note_scan(now_seconds)
        self.turns += 1
        if not self._still_stands(save_dir_fd, now_seconds):
            return
        before = self.state.folders.listing if self.state else None
        listing = list_save_dir(self.config, self.problems, before, save_dir_fd)
        self.disk_yield.join(self, listing.device, self.pace)
        if self._initial_scan.record_first_listing(listing):
            count = len(listing.folders)
            there = f"{count} checkpoint{'' if count == 1 else 's'}"
            log.info("watching %s: %s there", self.config.save_dir, there)
            for finding in planned_uploads(self.config, listing, self.state_dir):
                log.info("%s: %s%s", finding.what, finding.text, f"; {finding.hint}" if finding.hint else "")
        if self.state is None:
            self.disk_yield.set_saving(self, is_saving=False)
            if not listing.folders and awaits_checkpoint(self.state_dir, self.config.save_dir):
                self._try_remotes(now_seconds)
                self.supervisor.works()
                return
            reopens = not self.config.compare_masters
            finish_after_crash(self._activate(save_dir_fd), save_dir_fd, self.audit, reopens_refused=reopens)
            self.needs_turn = True
            return
        state = self.state
        for number, session in enumerate(self.sessions.values()):
            # the first remote names the job; the others wait a moment for it, never longer
            if number == 0 or self.job_id is not None or now_seconds - self._active_at > NAMING_SECONDS:
                session.propose_job_id(self.job_id)
                session.turn(now_seconds, is_at_rest=self.idle.is_now or self._limits.takes_turns)
        self.peers.turn(now_seconds)
        has_news = self.known_saves.refresh() | self.idle.sees_new(self.sessions.values())
        has_news |= self.control.refresh(self.state_dir) | self.executor.scrub(
            save_dir_fd, is_wanted=not self.control.is_resting
        )
        is_asked |= self.sealer.is_due(now_seconds) or self.control.awaits_answer
        if self.idle.may_skip(now_seconds, is_changed=listing != before or is_asked or has_news):
            return
        self.plans += 1
        self.sealer.judge_and_seal(listing, save_dir_fd, now_seconds)
        self.known_saves.adopt()
        self.known_saves.turn_of_runs()
        notice_gone(self, state)
        self.deletion_rights.prove(self.problems, str(self.config.save_dir), state, save_dir_fd)
        self.known_saves.choose_generations()
        self.disk_yield.set_saving(self, is_saving=self._save_detector.detects_save(state, now_seconds))
        self.pace()
        if self.watcher is not None:
            self.watcher.follow([*folders_to_watch(state), *self._save_detector.newcomers(now_seconds)])
        self.executor.sweep(save_dir_fd)
        self._plan_and_act(state, save_dir_fd)
        self.pace()  # of what has just begun
        self._finish_begun(state, save_dir_fd)
        report_problems(self, state)
        self.idle.set_idle(is_idle=is_at_rest(self) and not state.is_first_scan and not self.needs_turn)
        self.supervisor.works()
        if state.is_first_scan:
            state.end_first_scan()
            self.wake()

    def _plan_and_act(self, state: JobState, save_dir_fd: int) -> None:
        self.view = build_view(
            self.config,
            state,
            self.sessions,
            save_dir_fd,
            pins=self.known_saves.pins,
            damaged=self.executor.scrubber.damaged | self.peers.damaged,
            may_delete=self.deletion_rights.are_held and not self.peers.differing(),
            is_paused=self.control.pause is not None or bool(state.other_host and state.other_host.stands_by),
            # as long as this run has no id, a node of another one counts as the job's
            is_spread=state.run_id is not None and self.peers.is_spread,
            lease=self.peers.lease_status,
            drain=drain_view(self, state),
            removal=removal_view(self),
        )
        self.supervisor.reserve.keep(self.state_dir, save_dir_fd, self.view.disk)
        plan = planned(self.view)
        state.set_plan(plan)
        begin_answer(self)
        if self.control.may_act:
            self.executor.execute(plan, save_dir_fd, self.view.disk.reserve_bytes)

    def _still_stands(self, save_dir_fd: int, now_seconds: float) -> bool:
        """False: save_dir is another directory now, or gone (no file event tells); start over with that."""
        self.idle.note_look(now_seconds)
        if is_still(self.config.save_dir, save_dir_fd):
            return True
        log.warning("%s was replaced or removed", self.config.save_dir)
        self.close()
        self._initial_scan.awaits()
        self.problems.begin_anew()
        self.wake()
        return False

    @property
    def is_converting(self) -> bool:
        """A conversion of this job is under way."""
        return self.state is not None and self.state.saves.conversion is not None

    def leave_line(self) -> None:
        """Leave the lines of a job that ended or whose turn failed; nobody waits for its save."""
        self.disk_yield.set_saving(self, is_saving=False)
        if self.state is not None:
            self._limits.leave([self.executor, *self.sessions.values()])

    def close(self) -> None:
        """Stop everything of this job; what is half done is continued by the next start."""
        self.disk_yield.leave(self)
        if self.watcher is not None:
            self.watcher.stop()
            self.watcher = None
        if self.state is not None:
            self._uncommitted = uncommitted_at_close(self)
            self.leave_line()
            self.local_actions.stop()
            self.healer.stop()
            self.workers.close()
            self._close_sessions()
            self.state.journal.close()
            self.state = None
            logs.end_file(self.config.name)
            self.view = None
        self._close_sessions()
        self.idle, self.deletion_rights = IdlePolicy(), DeletionRights(self.deletion_rights.mark)
        if self._fd is not None:
            close_save_dir(self._fd, self._lock)
            self._fd = None


def make_state(state_dir: Path, save_dir: Path, save_dir_fd: int) -> Path:
    """Create the state directory; where ours lies is known only when the first checkpoint is there."""
    inside = f"{OURS}/state"
    if state_dir == save_dir / inside:
        os.close(ensure_ours(save_dir_fd, inside))
        return path_of(save_dir, inside)
    prepare_state_dir(state_dir)
    return state_dir
