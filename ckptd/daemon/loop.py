"""Run the daemon: one queue, one deciding thread, any number of jobs (docs/design.md §3).

Everything that happens elsewhere arrives as a call in the queue; after each batch every job takes its turn. A
job that cannot run is reported and the others go on (P16); the exit code says what is left.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.config.budget import child_bytes
from ckptd.config.commands import node_name
from ckptd.daemon.health.checks import exit_code, is_idle
from ckptd.daemon.health.drain import (
    drain_code,
    drained_words,
    is_drained,
    is_settled,
    missing_after,
    stalled_drain,
    unfinished_here,
)
from ckptd.daemon.health.exporter import Exporter
from ckptd.daemon.health.notify import Notifier
from ckptd.daemon.health.termination import TerminationNotices
from ckptd.daemon.heartbeat import send_final
from ckptd.daemon.job import Job
from ckptd.daemon.publisher import PROGRESS_SECONDS, Invalid, Publisher, Reloaded
from ckptd.daemon.resources.limits import HostLimits, give_back, keep_small
from ckptd.daemon.resources.workers import Workers
from ckptd.daemon.save_dir_lock import may_open_now
from ckptd.daemon.supervisor import report_internal_error
from ckptd.daemon.systemd import SystemdNotifier
from ckptd.daemon.uploads.session import STILL_SECONDS
from ckptd.errors import CkptdError, ConfigError, LockHeld, from_os_error
from ckptd.observe.logs import job_lines
from ckptd.observe.status import NOT_FINISHED, not_waited_for
from ckptd.storage.local.state_dir import state_base, state_dir_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckptd.config.loader import LoadedConfig
    from ckptd.config.schema import JobConfig

log = logging.getLogger("ckptd")

LONGEST_PAUSE_SECONDS = 10.0
_UNSEALED = "what is still being saved"
GLOB_SECONDS = 10.0
"""Interval at which globs in save_dir are matched again."""


class Daemon:
    """Runs jobs until told to stop, or with `once` until nothing is left to do."""

    def __init__(
        self,
        loaded: LoadedConfig,
        environ: Mapping[str, str],
        *,
        once: bool = False,
        drain_seconds: float | None = None,
        removes_until: Callable[[Sequence[Job]], bool] | None = None,
        reload: Callable[[], LoadedConfig] | None = None,
    ) -> None:
        self._loaded = loaded
        self._load_again = reload
        self._environ = environ
        self._once = once
        self._drain_seconds = drain_seconds
        self._removes_until = removes_until
        """Only what `ckptd rm` asked for is done, until this says that it is (docs/adr/0199)."""
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.jobs: list[Job] = []
        self.invalid: list[Invalid] = []
        self._stopping = False
        self._deadline: float | None = None
        self._service = SystemdNotifier(environ)
        self._reloaded = Reloaded()
        self._notifier = Notifier(loaded.daemon.notify, loaded.daemon.node_name or node_name(os.environ))
        self._exporter = Exporter(loaded.daemon.metrics)
        self._termination = TerminationNotices(loaded.daemon, self._queue.put, lambda: self.jobs)
        self._publisher = Publisher(self._notifier, self._exporter)
        self._is_at_rest = False
        self._globbed_at = time.monotonic()
        self._workers = Workers(self._queue.put)
        self._limits = HostLimits(
            loaded.daemon,
            lambda: [session for job in self.jobs for session in job.sessions.values()],
            lambda: sum(job.is_converting for job in self.jobs),
            remotes=lambda: [
                [child_bytes(remote.url, remote.client) for remote in job.config.remotes] for job in self.jobs
            ],
        )

    def run(self) -> int:
        """Run; returns the exit code (docs/contract.md).

        Raises:
            ConfigError, LockHeld: no job can run (78, 75).
        """
        keep_small()
        self._open_jobs()
        self._install_signals()
        self._service.ready()
        is_in_order = False
        try:
            self._loop()
            is_in_order = True
        finally:
            self._service.stopping()
            self._termination.close()
            # before the last heartbeats, whose answers ask for turns that nobody takes any more
            code = self._exit_code()
            self._publish(alive=False, is_urgent=True)
            if is_in_order:
                send_final(
                    self.jobs, self._queue, self._call, self._limits.child_slots.settle, self._on_reload
                )
            self._publisher.close()
            self._notifier.close()
            self._exporter.close()
            self._workers.stop()
            for job in self.jobs:
                job.close()
        return code

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End at the next turn; with a drain deadline, when idle or at the deadline (any thread).

        `number`: the signal that asks. While it drains, SIGINT alone ends it at once.
        """
        self._queue.put(lambda: self._on_stop(number))

    # --- opening ---------------------------------------------------------------------------------------

    def _open_jobs(self) -> None:
        for path, error in self._loaded.problems:
            self.invalid.append(Invalid(path.stem, str(path), error, time.time()))
        _await_matches(self._loaded, self._environ)
        for config in self._loaded.jobs:
            self._open_job(config)
        runs = bool(self.jobs) or self._loaded.has_globs
        if runs or len(self.invalid) > 1:  # what is alone is raised, and printed once
            for one in self.invalid:
                _log_invalid(one)
        if not runs:
            if self.invalid:
                locked = [one.error for one in self.invalid if isinstance(one.error, LockHeld)]
                raise locked[0] if locked else self.invalid[0].error
            msg = "there is no job to run"
            raise ConfigError(msg, hint="give SAVE_DIR URL, --job FILE, or put job files into jobs.d/")

    def _open_again(self, config: JobConfig, before: Invalid | None) -> None:
        """Open a job while others run; what keeps it from running is logged once."""
        count = len(self.invalid)
        self._open_job(config, before)
        for one in self.invalid[count:]:
            if before is None or str(before.error) != str(one.error):
                _log_invalid(one)

    def _open_job(self, config: JobConfig, before: Invalid | None = None) -> None:
        try:
            where = (config.save_dir, config.name, self._loaded.daemon.state_dir, self._environ)
            state_dir = state_dir_of(*where, jobs_in_daemon=self._loaded.jobs_in_daemon)
            shared = (self._limits, self._workers, self._queue.put)
            others = tuple(str(one.save_dir) for one in self._loaded.jobs if one.name != config.name)
            job = Job(
                config,
                self._loaded.daemon,
                state_dir,
                *shared,
                is_patient=not self._once,
                only_removes=self._removes_until is not None,
                apart_from=others,
            )
            job.open()
        except (CkptdError, OSError) as error:
            refusal = error if isinstance(error, CkptdError) else from_os_error(error, str(config.save_dir))
            since = before.since_unix_seconds if before is not None else time.time()
            self.invalid.append(Invalid(config.name, str(config.save_dir), refusal, since))
        else:
            self.jobs.append(job)
            self._termination.apply_to(job)
            if self._deadline is not None and self._drain_seconds:
                # a job that a reload, a glob or a healed disk brings is drained with the others
                passed = time.monotonic() - (self._deadline - self._drain_seconds)
                job.control.begin_drain(self._drain_seconds, passed_seconds=passed)
            if job.phase == "waiting":
                with job_lines(config.name):
                    log.info("%s does not exist yet: ckptd waits for it", config.save_dir)

    def _install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self.stop(received))
        signal.signal(signal.SIGHUP, lambda *_: self._queue.put(self._on_reload))
        signal.signal(signal.SIGUSR1, lambda *_: self._queue.put(self._look_for_requests))

    def _look_for_requests(self) -> None:
        """A person paused a job or has it drained: files in state directories say which (docs/adr/0108)."""
        for job in self.jobs:
            job.wake()

    # --- reload ----------------------------------------------------------------------------------------

    def _on_reload(self) -> None:
        """Read the configuration again; what is wrong keeps what it was, and says so (P16)."""
        self._service.reloading()
        failed: str | None = None
        try:
            if self._load_again is not None:
                failed = self._apply(self._load_again(), [job.config for job in self.jobs])
        except CkptdError as error:
            failed = str(error)
            log.error("reload refused, everything goes on as it was: %s", error)
        self._reloaded = Reloaded(time.time(), failed)
        self._publish(is_urgent=True)
        self._service.ready()

    def _apply(self, loaded: LoadedConfig, known: Sequence[JobConfig]) -> str | None:
        """Close, start, keep what differs between `known` and `loaded`; return what was refused, in words."""
        found = config_changes(known, loaded, is_daemon_changed=loaded.daemon != self._loaded.daemon)
        self._loaded = loaded
        self._limits.change(loaded.daemon)
        self._notifier.change(loaded.daemon.notify)
        self._exporter.change(loaded.daemon.metrics)
        self._termination.change(loaded.daemon)
        before = {one.save_dir: one for one in self.invalid}
        self.invalid = self._still_invalid(found)
        closed = [job for job in self.jobs if job.config.save_dir in found.close]
        anew = {config.save_dir for config in found.start}
        gone = [job for job in closed if job.config.save_dir not in anew]
        send_final(gone, self._queue, self._call, self._limits.child_slots.settle, self._on_reload)
        for job in closed:
            log.info("job %s ends, or starts anew with its changed configuration", job.config.name)
            self._publisher.retract(job)
            job.close()
            self.jobs.remove(job)
        for config in found.start:
            self._open_again(config, before.get(str(config.save_dir)))
        for job in self.jobs:
            refused = found.kept.get(job.config.save_dir)
            if refused is None:
                job.problems.clear("reload-refused", job.config.name)
            else:
                text = f"the changed file is not used: {refused.message}"
                job.problems.put("reload-refused", job.config.name, text, refused.hint)
        wrong = [*found.kept.values(), *(error for _, error in found.refused)]
        log.info("configuration read again: %s", found.summary)
        for error in wrong:
            log.error("refused, what runs goes on as it was: %s", error)
        return str(wrong[0]) if wrong else None

    def _still_invalid(self, found: ConfigChanges) -> list[Invalid]:
        """Return what is wrong after a change: refused files, and jobs that the change does not touch.

        A problem that was reported before in the same words keeps its time.
        """
        before = {one.save_dir: one for one in self.invalid}
        wrong = []
        for path, error in found.refused:
            known = before.get(str(path))
            is_same = known is not None and str(known.error) == str(error)
            wrong.append(known if known and is_same else Invalid(path.stem, str(path), error, time.time()))
        left = {str(job.save_dir) for job in self._loaded.jobs} - {str(job.save_dir) for job in found.start}
        return wrong + [one for one in self.invalid if one.save_dir in left]

    def _look_for_matches(self, now: float) -> None:
        """Start jobs for new matches of globs, and those that a lock, a disk or rights kept from starting."""
        if now - self._globbed_at < GLOB_SECONDS:
            return
        self._globbed_at = now
        refused = {one.save_dir: one for one in self.invalid}
        for config in self._loaded.jobs if refused else ():
            before = refused.get(str(config.save_dir))
            if before is not None and may_open_now(config, before.error):
                self.invalid.remove(before)
                self._open_again(config, before)
        if not self._loaded.has_globs:
            return
        # the files as a person last had them read: half an edit is nobody's wish
        loaded = self._loaded.expanded_again(self._environ)
        if (loaded.jobs, _words(loaded)) != (self._loaded.jobs, _words(self._loaded)):
            self._apply(loaded, self._loaded.jobs)

    def _on_stop(self, number: int) -> None:
        if self._drain_seconds and self._deadline is None:
            self._deadline = time.monotonic() + self._drain_seconds
            log.info("draining for at most %.0f s", self._drain_seconds)
            for job in self.jobs:
                job.control.begin_drain(self._drain_seconds)
                job.wake()
        # at a time limit Slurm sends SIGTERM twice, and its SIGKILL only after KillWait
        elif number == signal.SIGINT or not self._drain_seconds:
            self._stopping = True

    # --- the loop --------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopping:
            self._wait()
            now = time.monotonic()
            for job in list(self.jobs):
                with job_lines(job.config.name):
                    self._turn(job, now)
            if self._limits.memory_pressure.look(now):
                for job in self.jobs:
                    job.pace()
            self._call(self._limits.share_and_wake)
            self._limits.report_shortage([job.problems for job in self.jobs])
            self._give_back_when_at_rest()
            self._look_for_matches(now)
            if not self.jobs and not self._loaded.has_globs:
                return
            self._service.turn_completed()
            self._publish()
            if self._deadline is not None and self._is_drained(now):
                return
            if self._removes_until is not None and self._removes_until(self.jobs):
                return
            if self._once and all(is_idle(job) for job in self.jobs):
                return

    def _is_drained(self, now: float) -> bool:
        """Tell whether the drain is over: nothing is left to upload, or no time."""
        left = {tag for job in self.jobs for tag in missing_after(job)}
        unseen = [
            f"job {job.config.name} cannot be looked at: {job.unseen}" for job in self.jobs if job.unseen
        ]
        if all(is_drained(job) for job in self.jobs):
            for one in self.invalid:
                log.warning("what is committed of job %s is not known: %s", one.name, one.error.message)
            if not self.invalid:
                log.info("drained: %s", drained_words(self.jobs))
            return True
        if all(is_settled(job) for job in self.jobs):
            if left:
                log.warning("what is left cannot be committed as it is: %s", ", ".join(sorted(left)))
            if quiet := [tag for job in self.jobs for tag in unfinished_here(job)]:
                log.warning("not committed: %s; %s", ", ".join(quiet), NOT_FINISHED)
            return True
        if self._drained_for(now) >= STILL_SECONDS and (stalled := stalled_drain(self.jobs)):
            log.warning("%s; not committed: %s", not_waited_for(stalled), ", ".join(sorted(left)))
            return True
        if self._deadline is not None and now >= self._deadline:
            named = ", ".join([*sorted(left), *unseen]) or _UNSEALED
            log.warning("the drain deadline passed; not committed: %s", named)
            return True
        return False

    def _drained_for(self, now: float) -> float:
        """Seconds since the drain began."""
        return now - (self._deadline or now) + (self._drain_seconds or 0.0)

    def _give_back_when_at_rest(self) -> None:
        """Give memory back, once each time that all jobs have come to rest."""
        was_at_rest, self._is_at_rest = self._is_at_rest, all(job.idle.is_long for job in self.jobs)
        if self._is_at_rest and not was_at_rest:
            give_back()

    def _turn(self, job: Job, now: float) -> None:
        try:
            job.turn(now)
        except CkptdError as error:
            log.error("job %s stops: %s", job.config.name, error)
            why = Invalid(job.config.name, str(job.config.save_dir), error, time.time())
            self.invalid.append(why)
            self._publisher.retract(job, why)
            job.close()
            self.jobs.remove(job)
        except Exception as error:  # a defect in one job's turn must not end the watch over the others
            log.exception("the turn of job %s failed", job.config.name)
            job.leave_line()
            report_internal_error(job, error)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # likewise for what a worker or a remote reported
            log.exception("taking in a result failed")
            for job in self.jobs:
                report_internal_error(job, error)

    def _wait(self) -> None:
        """Sleep until something happens or is due; then take all that happened."""
        now = time.monotonic()
        pause = min((job.seconds_to_next(now) for job in self.jobs), default=1.0)
        is_brief = self._once or self._removes_until is not None
        if self._deadline is not None or is_brief or self._publisher.has_unsaid:
            pause = min(pause, PROGRESS_SECONDS)
        try:
            pause = self._service.longest_pause_seconds(min(max(pause, 0.01), LONGEST_PAUSE_SECONDS))
            self._call(self._queue.get(timeout=pause))
            while True:
                self._call(self._queue.get_nowait())
        except queue.Empty:
            pass

    def _publish(self, *, alive: bool = True, is_urgent: bool = False) -> None:
        try:
            line = self._publisher.publish(
                self.jobs,
                self.invalid,
                self._reloaded,
                self._limits.memory_bytes,
                alive=alive,
                is_urgent=is_urgent,
            )
        except Exception as error:  # what is wrong with a journal the job's next turn meets
            log.warning("status not written: %s", error, exc_info=not isinstance(error, CkptdError | OSError))
            return
        self._service.status(line)

    def _exit_code(self) -> int:
        if self._deadline is not None and not self._once:
            invalid = max((one.error.exit_code for one in self.invalid), default=0)
            return drain_code(self.jobs) or invalid
        codes = [exit_code(job) for job in self.jobs] + [one.error.exit_code for one in self.invalid]
        # a save_dir that is not there is spelled wrong as often as it is early
        codes += [3 for job in self.jobs if job.phase == "waiting"]
        if not self._once:
            return 0 if self.jobs else max(codes, default=0)
        for code in (1, 3):
            if code in codes:
                return code
        return max(codes, default=0)


def _await_matches(loaded: LoadedConfig, environ: Mapping[str, str]) -> None:
    """Refuse a start whose globs may bring jobs later that have no place for their state, and nobody to tell
    of them.

    Raises:
        ConfigError: there is none; the first that comes beside another would stop both.
    """
    if loaded.has_globs:
        state_base(loaded.daemon.state_dir, environ, loaded.jobs_in_daemon)
    for pattern in loaded.unmatched:
        log.info("no directory matches %s yet; each that appears becomes a job", pattern)


def _log_invalid(one: Invalid) -> None:
    with job_lines(one.name):
        log.error("job %s does not run: %s", one.name, one.error)


def _words(loaded: LoadedConfig) -> list[tuple[str, str]]:
    """Return (file, error text) of each problem: errors of two readings never compare equal themselves."""
    return [(str(path), str(error)) for path, error in loaded.problems]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChanges:
    """List what a reload changes.

    `close`: save_dirs of jobs to end; `start`: jobs to open, the changed ones among them.
    """

    close: tuple[Path, ...] = ()
    start: tuple[JobConfig, ...] = ()
    kept: Mapping[Path, CkptdError] = field(default_factory=dict)
    """save_dir of a running job → why its file was refused: it goes on as it was."""
    refused: tuple[tuple[Path, CkptdError], ...] = ()
    """Files that are wrong and of which no job runs."""

    @property
    def summary(self) -> str:
        """Say in one line what a reload changes, for the log."""
        return (
            f"{len(self.start)} started or changed, {len(self.close)} ended, {len(self.kept)} kept as before"
        )


def config_changes(
    running: Sequence[JobConfig], loaded: LoadedConfig, *, is_daemon_changed: bool
) -> ConfigChanges:
    """Compare running jobs by save_dir, on which a lock is held, with a newly loaded configuration.

    A job whose table is unchanged is not touched, its uploads go on; a file that is wrong keeps its jobs as
    they were (P16: one wrong file stops no other job).

    `is_daemon_changed`: ckptd.toml says something else, so every job starts anew with it.
    """
    wrong = {path.absolute(): error for path, error in loaded.problems}
    by_dir = {job.save_dir: job for job in running}
    kept = {job.save_dir: wrong[job.file] for job in running if job.file in wrong}
    wanted = {job.save_dir: job for job in loaded.jobs if job.save_dir not in kept}
    changed = [
        job
        for save_dir, job in wanted.items()
        if save_dir not in by_dir or by_dir[save_dir] != job or is_daemon_changed
    ]
    ended = [save_dir for save_dir in by_dir if save_dir not in wanted and save_dir not in kept]
    ended += [job.save_dir for job in changed if job.save_dir in by_dir]
    files_kept = {job.file for job in running if job.save_dir in kept}
    return ConfigChanges(
        close=tuple(ended),
        start=tuple(changed),
        kept=kept,
        refused=tuple((path, error) for path, error in wrong.items() if path not in files_kept),
    )
