"""Publish status.json of each job: rewritten when something changed, else as a sign of life (P17).

An idle job costs next to nothing: its part of the document is kept as text until one of its turns, problems
or transfers changes it. Each state directory gets its own job, and those that do not run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from ckptd import __version__
from ckptd.base import files
from ckptd.base.owned_dirs import lies_in_ours, opened_ours
from ckptd.daemon.health.ready_files import ReadyFiles
from ckptd.daemon.health.status import job_status, problems_of
from ckptd.daemon.resources.limits import tree_bytes
from ckptd.daemon.resources.reserve import FULL
from ckptd.daemon.supervisor import report_internal_error
from ckptd.daemon.systemd import start_command
from ckptd.errors import CkptdError, LockHeld, from_os_error
from ckptd.observe import status as st
from ckptd.observe.event_log import EventLog
from ckptd.observe.status import pid_space
from ckptd.storage.local.state_dir import awaits_checkpoint, drop_status, prepare_state_dir, private_place

if TYPE_CHECKING:
    from collections.abc import Sequence, Set
    from pathlib import Path

    from ckptd.daemon.health.exporter import Exporter
    from ckptd.daemon.health.notify import Notifier
    from ckptd.daemon.job import Job

log = logging.getLogger("ckptd")

PROGRESS_SECONDS = 1.0
"""Changes and progress are published at most so often."""
ALIVE_SECONDS = 20.0
"""A sign of life; `ckptd status` calls a document old after 60 s."""
AGES_SECONDS = 300.0
"""The ages in a job's part are counted again so often."""
MEMORY_SECONDS = 10.0
_JOB = TypeAdapter(st.JobStatus)


@dataclass(frozen=True, slots=True)
class Invalid:
    """A job that does not run, and why."""

    name: str
    save_dir: str
    error: CkptdError
    since_unix_seconds: float


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The last reload, if there was one."""

    at_unix_seconds: float | None = None
    error: str | None = None


@dataclass(slots=True)
class _Part:
    """Hold what was last published of one job."""

    key: object
    text: str
    status: st.JobStatus
    is_scanned: bool
    """Whether the checkpoints of the job were looked through since it was opened."""
    made_at_seconds: float
    published_at_seconds: float = -math.inf


class Publisher:
    """Publishes all jobs of a daemon; called in the deciding thread after its turns."""

    def __init__(self, notifier: Notifier, exporter: Exporter) -> None:
        self._notifier = notifier
        self._exporter = exporter
        self._started_unix = time.time()
        self._start_command = start_command(sys.argv[1:], os.environ)
        self._started_before: dict[Job, str] = {}
        """Job that a command watches for a while → the command that starts its daemon."""
        self._parts: dict[Job, _Part] = {}
        self._waiting: dict[Job, Path] = {}
        """Job without a checkpoint → where its status is written."""
        self._event_logs: dict[Job, EventLog] = {}
        self._ready_files: dict[Job, ReadyFiles] = {}
        self._broken: list[st.JobStatus] = []
        self._header: object = None
        self._budget_bytes = 0
        self._memory_bytes, self._measured_at_seconds = 0, -math.inf
        self.has_unsaid = False
        """Something changed that is not published yet: ask again within PROGRESS_SECONDS."""

    def publish(
        self,
        jobs: Sequence[Job],
        invalid: Sequence[Invalid],
        reloaded: Reloaded,
        memory_budget_bytes: int,
        *,
        alive: bool = True,
        is_urgent: bool = False,
    ) -> str:
        """Write what is due; one line that says how all jobs are."""
        now = time.monotonic()
        self._budget_bytes = memory_budget_bytes
        broken = [_invalid_status(one) for one in invalid]
        mended = {(one.name, one.save_dir): replace(one, problems=()) for one in self._broken}
        for one in (mended | {(one.name, one.save_dir): one for one in broken}).values():
            self._notifier.see(one)
        self._broken = broken
        header = (tuple(broken), reloaded, alive, self._notifier.failed, self._exporter.failed)
        is_urgent = is_urgent or header != self._header
        self._header = header
        self._parts = {job: part for job in jobs if (part := self._parts.get(job)) is not None}
        said = []
        self.has_unsaid = False
        for job in jobs:
            part = self._part(job, now, is_urgent=is_urgent)
            said.append(f"{job.config.name}: {part.status.state}")
            if is_urgent or now - part.published_at_seconds >= ALIVE_SECONDS:
                part.published_at_seconds = now
                daemon = self._daemon(now, reloaded, memory_budget_bytes, alive=alive)
                if not self._start_command:  # a `drain` where no daemon runs: it is that one to be started
                    daemon = replace(daemon, start_command=self._command_before(job))
                self._write(job, _document(daemon, [part.text, *map(_text, broken)]), alive=alive)
        statuses = [self._parts[job].status for job in jobs]
        self._exporter.see(
            self._daemon(now, reloaded, memory_budget_bytes, alive=alive), [*statuses, *broken]
        )
        self._notifier.turn([*statuses, *broken])
        return "; ".join([*said, *(f"{status.name}: {status.state}" for status in broken)])

    def close(self) -> None:
        """Let what other threads write be written, for a moment."""
        for ready in self._ready_files.values():
            ready.close()

    def retract(self, job: Job, why: Invalid | None = None) -> None:
        """A job that ends here is not told of any more, or only why it does not run."""
        self._event_logs.pop(job, None)
        if (ready := self._ready_files.pop(job, None)) is not None:
            ready.close(0.0)
        if job.state is not None:
            daemon = self._daemon(time.monotonic(), Reloaded(), self._budget_bytes, alive=True)
            self._write(job, _document(daemon, [_text(_invalid_status(why))] if why else []))
        elif job in self._waiting:
            drop_status(self._waiting.pop(job), st.FILE_NAME)

    def _part(self, job: Job, now: float, *, is_urgent: bool) -> _Part:
        """The job's part, made anew when it changed, is moving, or its ages have grown old."""
        self._report_ready_dir(job)
        old = self._parts.get(job)
        paces = job.slows_transfers, job.waits_for_memory
        key = (job.plans, job.phase, job.job_id, paces, job.problems.all())
        is_moving = job.state is not None and bool(job.state.uploads.progress or job.state.saves.conversion)
        is_changed = old is None or is_moving or key != old.key
        is_scanned = job.state is not None and job.view is not None and not job.state.is_first_scan
        # the first look at the checkpoints is published at once: what comes after it is an event
        is_urgent |= old is not None and old.is_scanned != is_scanned
        age = math.inf if old is None or is_urgent else now - old.made_at_seconds
        if age >= AGES_SECONDS or (is_changed and age >= PROGRESS_SECONDS):
            events = self._event_logs.setdefault(job, EventLog(job.state_dir)) if is_scanned else None
            unended = events.unended() if events is not None else frozenset()
            status = _status(job, old.status if old is not None else None, unended)
            self._notifier.see(status, is_scanned=is_scanned)
            if events is not None:
                self._record(job, events, status)
            self._parts[job] = _Part(key, _text(status), status, is_scanned, now)
            is_changed = is_moving
        self.has_unsaid = self.has_unsaid or is_changed
        return self._parts[job]

    def _record(self, job: Job, events: EventLog, status: st.JobStatus) -> None:
        """Write the events of a job whose checkpoints are known, and its files of `ready_dir`."""
        try:
            events.see(status)
            job.problems.clear("events-unwritten", "")
        except (OSError, CkptdError) as error:
            failure = error if isinstance(error, CkptdError) else from_os_error(error, str(job.state_dir))
            text = f"events cannot be written: {failure.message}"
            job.problems.put("events-unwritten", "", text, failure.hint or "they are written once that works")
        if job.config.ready_dir is None:
            return
        if job not in self._ready_files:
            self._ready_files[job] = ReadyFiles(job.config, job.config.ready_dir, job.supervisor.post)
        self._ready_files[job].see(status)

    def _report_ready_dir(self, job: Job) -> None:
        """Raise or clear the problem of a job's `ready_dir`, whose files another thread writes."""
        ready = self._ready_files.get(job)
        if ready is None or (failure := ready.failure) is None:
            job.problems.clear("ready-dir-unwritten", "")
        else:
            hint = f"mkdir -p {shlex.quote(str(job.config.ready_dir))}; it is tried again every 10 s"
            job.problems.put("ready-dir-unwritten", "", failure.message, hint)

    def _daemon(
        self, now: float, reloaded: Reloaded, memory_budget_bytes: int, *, alive: bool
    ) -> st.DaemonStatus:
        if now - self._measured_at_seconds >= MEMORY_SECONDS:
            self._memory_bytes, self._measured_at_seconds = tree_bytes(), now
        at = reloaded.at_unix_seconds
        return st.DaemonStatus(
            pid=os.getpid(),
            alive=alive,
            version=__version__,
            started_at=st.rfc3339(self._started_unix),
            last_turn_age_seconds=0.0,
            memory_bytes=self._memory_bytes,
            memory_budget_bytes=memory_budget_bytes,
            pid_space=pid_space(),
            reloaded_at=st.rfc3339(at) if at else None,
            reload_error=reloaded.error,
            notify_error=self._notifier.failed,
            metrics_error=self._exporter.failed,
            start_command=self._start_command,
        )

    def _command_before(self, job: Job) -> str:
        """Return the start command that the job's last daemon published."""
        if job not in self._started_before:
            found = ""
            gone = contextlib.suppress(OSError, CkptdError, ValueError, KeyError, TypeError)
            with gone, opened_ours(job.state_dir) as fd:
                found = str(json.loads(files.read_beneath(fd, st.FILE_NAME))["daemon"]["start_command"])
            self._started_before[job] = found
        return self._started_before[job]

    def _write(self, job: Job, document: bytes, *, alive: bool = True) -> None:
        """Write a job's document by rename, readable for any user (0644, since status is for every user of
        the node).

        While nothing of ours may lie in save_dir (P11: none before the first checkpoint), or its disk takes
        nothing, the document lies in the user's own place.
        """
        if job.state is not None or not awaits_checkpoint(job.state_dir, job.config.save_dir):
            if self._written(job, document):
                if job in self._waiting:
                    drop_status(self._waiting.pop(job), st.FILE_NAME)
                return
            if not lies_in_ours(job.state_dir):
                return
        place = private_place(job.config.save_dir)
        if not alive:
            self._waiting.pop(job, None)
            drop_status(place, st.FILE_NAME)
            return
        self._waiting[job] = place
        try:
            prepare_state_dir(place)
            with opened_ours(place) as fd:
                files.write_atomic(fd, st.FILE_NAME, document, mode=0o644)
        except OSError as error:
            log.error("cannot publish status in %s: %s", place, error.strerror)
        except CkptdError as error:
            log.debug("no status before the first checkpoint: %s", error)

    def _written(self, job: Job, document: bytes) -> bool:
        """Into the state directory; on a full disk out of the reserve, once."""
        for _ in range(2):
            try:
                if job.state is None:
                    prepare_state_dir(job.state_dir)
                with opened_ours(job.state_dir) as fd:
                    files.write_atomic(fd, st.FILE_NAME, document, mode=0o644)
            except OSError as error:
                if error.errno in FULL and job.supervisor.reserve.release(job.state_dir):
                    self.has_unsaid = True
                    continue
                log.error("cannot publish status in %s: %s", job.state_dir, error.strerror)
                return False
            return True
        return False


def _status(job: Job, before: st.JobStatus | None, unended: Set[tuple[str, str | None]]) -> st.JobStatus:
    """Return the status of a job; an unexpected error in it becomes a problem and spares the daemon and other
    jobs.
    """
    try:
        return job_status(job, unended)
    except (CkptdError, OSError):
        raise
    except Exception as error:
        log.exception("the status of job %s failed", job.config.name)
        report_internal_error(job, error)
        name, save_dir = job.config.name, str(job.config.save_dir)
        known = before or st.JobStatus(name=name, job_id=job.job_id, save_dir=save_dir, state="attention")
        # as of then, but for "safe": that is never said of what was not looked at (P17)
        return replace(known, state="attention", safe=None, problems=problems_of(job))


def _text(status: st.JobStatus) -> str:
    return _JOB.dump_json(status).decode()


def _document(daemon: st.DaemonStatus, jobs: Sequence[str]) -> bytes:
    """The fields of `st.Status`, with the jobs as the text that they are already."""
    empty = asdict(st.Status(generated_at=st.rfc3339(time.time()), daemon=daemon, jobs=()))
    del empty["jobs"]
    return f'{json.dumps(empty)[:-1]}, "jobs": [{", ".join(jobs)}]}}'.encode()


def _invalid_status(one: Invalid) -> st.JobStatus:
    problem = st.ProblemStatus(
        code="lock-held" if isinstance(one.error, LockHeld) else "config-invalid",
        severity="attention",
        since=st.rfc3339(one.since_unix_seconds),
        text=one.error.message,
        next_step=one.error.hint,
    )
    return st.JobStatus(
        name=one.name, job_id=None, save_dir=one.save_dir, state="invalid", problems=(problem,)
    )
