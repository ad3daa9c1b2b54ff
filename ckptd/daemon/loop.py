"""The daemon: one queue, one deciding thread, any number of jobs (docs/design.md §3).

Everything that happens elsewhere arrives as a call in the queue; after each batch every job takes its turn.
A job that cannot run is reported and the others go on (P16); the exit code says what is left.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from typing import TYPE_CHECKING

import psutil

from ckptd import __version__
from ckptd.daemon.checks import exit_code, is_idle
from ckptd.daemon.job import Job
from ckptd.daemon.reload import changes
from ckptd.daemon.report import job_status, publish
from ckptd.daemon.service import Service
from ckptd.daemon.workers import Workers
from ckptd.errors import CkptdError, ConfigError, LockHeld
from ckptd.local.state_dir import prepare_state_dir, state_dir_of
from ckptd.observe import status as st

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ckptd.config import LoadedConfig
    from ckptd.config_model import JobConfig

log = logging.getLogger("ckptd")

PUBLISH_SECONDS = 10.0
GLOB_SECONDS = 10.0
"""How often globs in save_dir are looked at again."""
PROGRESS_SECONDS = 1.0


class Daemon:
    """Runs jobs until told to stop, or with `once` until nothing is left to do."""

    def __init__(
        self,
        loaded: LoadedConfig,
        environ: Mapping[str, str],
        *,
        once: bool = False,
        drain_seconds: float | None = None,
        reload: Callable[[], LoadedConfig] | None = None,
    ) -> None:
        self._loaded = loaded
        self._load_again = reload
        self._environ = environ
        self._once = once
        self._drain_seconds = drain_seconds
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._deadline: float | None = None
        self._started_unix = time.time()
        self._service = Service(environ)
        self._reloaded_unix: float | None = None
        self._reload_error: str | None = None
        self._globbed_at = time.monotonic()
        self._workers = Workers(self._queue.put)
        self._budget_bytes = loaded.daemon.memory_budget_bytes(psutil.virtual_memory().total)
        self._published_at = 0.0
        self.jobs: list[Job] = []
        self.invalid: list[tuple[str, str, CkptdError]] = []
        """(name, save_dir, why) of jobs that do not run."""

    def run(self) -> int:
        """Run; returns the exit code (docs/contract.md).

        Raises:
            ConfigError, LockHeld: no job can run (78, 75).
        """
        self._open_jobs()
        self._install_signals()
        self._service.ready()
        try:
            self._loop()
        finally:
            self._service.stopping()
            code = self._exit_code()
            self._publish(alive=False)
            self._workers.stop()
            for job in self.jobs:
                job.close()
        return code

    def stop(self) -> None:
        """End at the next turn; with a drain deadline, when idle or at the deadline (any thread)."""
        self._queue.put(self._on_stop)

    # --- opening ---------------------------------------------------------------------------------------

    def _open_jobs(self) -> None:
        for path, error in self._loaded.problems:
            self.invalid.append((path.stem, str(path), error))
            log.error("job %s does not run: %s", path.stem, error)
        for config in self._loaded.jobs:
            self._open_job(config)
        if not self.jobs and not self._loaded.has_globs:
            if self.invalid:
                locked = [e for _, _, e in self.invalid if isinstance(e, LockHeld)]
                raise locked[0] if locked else self.invalid[0][2]
            msg = "there is no job to run"
            raise ConfigError(msg, hint="give SAVE_DIR URL, --job FILE, or put job files into jobs.d/")

    def _open_job(self, config: JobConfig) -> None:
        daemon = self._loaded.daemon
        try:
            state_dir = state_dir_of(
                config.save_dir,
                config.name,
                daemon.state_dir,
                self._environ,
                jobs_in_daemon=len(self._loaded.jobs),
            )
            job = Job(config, daemon, state_dir, self._budget_bytes, self._workers, self._queue.put)
            job.open()
        except CkptdError as error:
            self.invalid.append((config.name, str(config.save_dir), error))
            log.error("job %s does not run: %s", config.name, error)
        else:
            self.jobs.append(job)

    def _install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, lambda *_: self._queue.put(self._on_reload))

    # --- reload ----------------------------------------------------------------------------------------

    def _on_reload(self) -> None:
        """Read the configuration again; what is wrong keeps what it was, and says so (P16)."""
        self._service.reloading()
        self._reload_error = None
        try:
            self._apply_again(is_asked=True)
        except CkptdError as error:
            self._reload_error = str(error)
            log.error("reload refused, everything goes on as it was: %s", error)
        self._reloaded_unix = time.time()
        self._publish(alive=True)
        self._service.ready()

    def _apply_again(self, *, is_asked: bool) -> None:
        if self._load_again is None:
            return
        loaded = self._load_again()
        old = self._loaded
        found = changes(
            [job.config for job in self.jobs], loaded, is_daemon_changed=loaded.daemon != old.daemon
        )
        if not is_asked and not found.close and not found.start:
            return
        self._loaded = loaded
        self._budget_bytes = loaded.daemon.memory_budget_bytes(psutil.virtual_memory().total)
        self.invalid = [(path.stem, str(path), error) for path, error in found.refused]
        for job in [job for job in self.jobs if job.config.save_dir in found.close]:
            log.info("job %s ends, or starts anew with its changed configuration", job.config.name)
            job.close()
            self.jobs.remove(job)
        for config in found.start:
            self._open_job(config)
        for job in self.jobs:
            refused = found.kept.get(job.config.save_dir)
            if refused is None:
                job.problems.clear("reload-refused", job.config.name)
            else:
                text = f"the changed file is not used: {refused.message}"
                job.problems.put("reload-refused", job.config.name, text, refused.hint)
        wrong = [*found.kept.values(), *(error for _, error in found.refused)]
        self._reload_error = str(wrong[0]) if wrong else None
        log.info("configuration read again: %s", found.summary)

    def _look_for_matches(self, now: float) -> None:
        """Directories that a glob matches by now become jobs without a reload."""
        if not self._loaded.has_globs or now - self._globbed_at < GLOB_SECONDS:
            return
        self._globbed_at = now
        try:
            self._apply_again(is_asked=False)
        except CkptdError as error:
            log.warning("the configuration is not used: %s", error)

    def _on_stop(self) -> None:
        if self._drain_seconds and self._deadline is None:
            self._deadline = time.monotonic() + self._drain_seconds
            log.info("draining for at most %.0f s", self._drain_seconds)
        else:
            self._stopping = True

    # --- the loop --------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopping:
            self._wait()
            now = time.monotonic()
            for job in list(self.jobs):
                self._turn(job, now)
            self._look_for_matches(now)
            if not self.jobs and not self._loaded.has_globs:
                return
            self._service.turn_completed()
            self._publish_when_due(now)
            all_idle = all(is_idle(job) for job in self.jobs)
            if all_idle and (self._once or self._deadline is not None):
                return
            if self._deadline is not None and now >= self._deadline:
                log.warning("the drain deadline passed")
                return

    def _turn(self, job: Job, now: float) -> None:
        try:
            job.turn(now)
        except CkptdError as error:
            log.error("job %s stops: %s", job.config.name, error)
            self.invalid.append((job.config.name, str(job.config.save_dir), error))
            job.close()
            self.jobs.remove(job)
        except Exception as error:  # a defect in one job's turn must not end the watch over the others
            log.exception("the turn of job %s failed", job.config.name)
            _say_internal(job, error)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # likewise for what a worker or a remote reported
            log.exception("taking in a result failed")
            for job in self.jobs:
                _say_internal(job, error)

    def _wait(self) -> None:
        """Sleep until something happens or is due; then take all that happened."""
        now = time.monotonic()
        pause = min((job.seconds_to_next(now) for job in self.jobs), default=1.0)
        if self._deadline is not None or self._once:
            pause = min(pause, 1.0)
        try:
            pause = self._service.longest_pause_seconds(min(max(pause, 0.01), PUBLISH_SECONDS))
            self._call(self._queue.get(timeout=pause))
            while True:
                self._call(self._queue.get_nowait())
        except queue.Empty:
            pass

    # --- publishing ------------------------------------------------------------------------------------

    def _publish_when_due(self, now: float) -> None:
        is_moving = any(job.state and (job.state.moving or job.state.converting) for job in self.jobs)
        due = PROGRESS_SECONDS if is_moving or now - self._published_at < 60 else PUBLISH_SECONDS
        if now - self._published_at >= due:
            self._publish(alive=True)

    def _publish(self, *, alive: bool) -> None:
        self._published_at = time.monotonic()
        jobs = [job_status(job) for job in self.jobs]
        jobs += [_invalid_status(name, save_dir, error) for name, save_dir, error in self.invalid]
        document = st.Status(
            generated_at=st.rfc3339(time.time()),
            daemon=st.DaemonStatus(
                pid=os.getpid(),
                alive=alive,
                version=__version__,
                started_at=st.rfc3339(self._started_unix),
                last_turn_age_seconds=0.0,
                memory_bytes=_tree_bytes(),
                memory_budget_bytes=self._budget_bytes,
                reloaded_at=st.rfc3339(self._reloaded_unix) if self._reloaded_unix else None,
                reload_error=self._reload_error,
            ),
            jobs=tuple(jobs),
        )
        for directory in self._status_dirs():
            try:
                publish(document, directory)
            except OSError as error:
                log.error("cannot publish status in %s: %s", directory, error.strerror)
        self._service.status("; ".join(f"{j.name}: {j.state}" for j in jobs))

    def _status_dirs(self) -> list[Path]:
        found = [job.state_dir for job in self.jobs if job.state is not None]
        for job in self.jobs:
            is_inside = job.state_dir.is_relative_to(job.config.save_dir)
            if job.state is None and not is_inside:
                prepare_state_dir(job.state_dir)
                found.append(job.state_dir)
        return found

    def _exit_code(self) -> int:
        codes = [exit_code(job) for job in self.jobs] + [error.exit_code for _, _, error in self.invalid]
        if not self._once and self._deadline is None:
            return 0 if self.jobs else max(codes, default=0)
        for code in (1, 3):
            if code in codes:
                return code
        return max(codes, default=0)


def _say_internal(job: Job, error: Exception) -> None:
    text = f"a defect of ckptd: {type(error).__name__}: {error}"
    job.problems.put("internal", type(error).__name__, text, "the log has the trace; please report it")


def _invalid_status(name: str, save_dir: str, error: CkptdError) -> st.JobStatus:
    problem = st.ProblemStatus(
        code="lock-held" if isinstance(error, LockHeld) else "config-invalid",
        severity="attention",
        since=st.rfc3339(time.time()),
        text=error.message,
        next_step=error.hint,
    )
    return st.JobStatus(name=name, job_id=None, save_dir=save_dir, state="invalid", problems=(problem,))


def _tree_bytes() -> int:
    """Resident bytes of the daemon and its children."""
    process = psutil.Process()
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
