"""Read what a person asks of a running job beside its configuration: a pause or a drain (docs/adr/0108).

Each request is a file in the state directory, written by the command and only read here: it survives a
restart, and a daemon that is just starting finds it. SIGUSR1 makes the daemon read the files at once.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptd.base import files
from ckptd.base.owned_dirs import opened_ours
from ckptd.core.completeness.judge import State
from ckptd.core.model.records import SETTLED, ZERO, UploadState
from ckptd.core.policy.planner import open_saves
from ckptd.core.policy.safety import unsent
from ckptd.core.policy.view import Drain
from ckptd.daemon.intake.symlinked import linked_here
from ckptd.daemon.uploads.session import STILL_SECONDS
from ckptd.errors import CkptdError, RefusedError
from ckptd.observe.status import DrainStatus, PauseStatus, all_committed, rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.job_record import JobRecord

log = logging.getLogger("ckptd.control")

FOLDER = "control"
PAUSE, DRAIN = "pause.json", "drain.json"
_LIMIT_BYTES = 64 << 10
BUSY_FRACTION = 0.1
"""Transfers move at this fraction while a save is in flight (P11)."""
TOLD_SECONDS = 600.0
"""How long after its deadline status tells how a drain ended."""
MEASURED_SECONDS = 1.0
"""An upload that has run for so long gives a first estimate; a drain cannot wait for a better one."""


class PauseFile(BaseModel):
    """`pause.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    is_paused: bool
    by: str = ""
    at_unix_seconds: float = 0.0


class DrainFile(BaseModel):
    """`drain.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    asked_at_unix_seconds: float
    seconds: float


def write_control(state_dir: Path, name: str, document: BaseModel) -> None:
    """Put a request into a state directory, durable when it returns.

    Raises:
        OSError: as the kernel says.
    """
    with opened_ours(state_dir) as state_fd:
        os.close(files.open_dir_beneath(state_fd, FOLDER, create_mode=0o777, is_durable=True))
        with files.opened_dir(FOLDER, state_fd) as fd:
            files.write_atomic(fd, name, document.model_dump_json().encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drain:
    asked_at_unix: float
    deadline_unix: float
    deadline_seconds: float
    """Monotonic, as is the next: a clock that jumps moves no deadline."""
    begun_seconds: float
    """When this daemon began it."""


class Control:
    """One job's; every method is called in the deciding thread."""

    def __init__(self) -> None:
        self.pause: PauseFile | None = None
        self._drain: _Drain | None = None
        self._read: dict[str, tuple[int, int]] = {}
        self._unread: dict[str, tuple[int, int]] = {}

    # --- what was asked --------------------------------------------------------------------------------

    def refresh(self, state_dir: Path) -> bool:
        """Read again what was written since; whether anything is new."""
        news = False
        for name in (PAUSE, DRAIN):
            try:
                status = os.stat(state_dir / FOLDER / name)
            except (FileNotFoundError, NotADirectoryError):
                self._unread.pop(name, None)
                continue
            except OSError as error:
                self._say_once(name, (0, 0), error)
                continue
            known = (status.st_mtime_ns, status.st_ino)
            if self._read.get(name) == known:
                continue
            try:
                with opened_ours(state_dir / FOLDER) as fd:
                    data = files.read_beneath(fd, name, limit_bytes=_LIMIT_BYTES)
                self._take(name, data)
            except (RefusedError, ValidationError) as error:
                self._say_once(name, known, error)
            except (CkptdError, OSError) as error:
                # not marked as read: it is asked for until it could be read
                self._say_once(name, known, error)
                continue
            self._read[name] = known
            news = True
        return news

    def _take(self, name: str, data: bytes) -> None:
        """Obey what was read.

        Raises:
            ValidationError: no ckptd wrote it; it asks for nothing.
        """
        if name == PAUSE:
            said = PauseFile.model_validate_json(data)
            self.pause = said if said.is_paused else None
        else:
            asked = DrainFile.model_validate_json(data)
            passed = max(0.0, time.time() - asked.asked_at_unix_seconds)
            self.begin_drain(asked.seconds, passed_seconds=passed)

    def _say_once(self, name: str, version: tuple[int, int], error: Exception) -> None:
        """Log why a request was not obeyed, once for each file that was written."""
        if self._unread.get(name) != version:
            self._unread[name] = version
            log.warning("the request in %s/%s cannot be read: %s", FOLDER, name, error)

    def begin_drain(self, seconds: float, *, passed_seconds: float = 0.0) -> None:
        """From now on, or from `passed_seconds` ago."""
        asked_at, now = time.time() - passed_seconds, time.monotonic()
        self._drain = _Drain(
            asked_at_unix=asked_at,
            deadline_unix=asked_at + seconds,
            deadline_seconds=now + seconds - passed_seconds,
            begun_seconds=now,
        )

    @property
    def is_draining(self) -> bool:
        """Tell whether a drain lasts: until its deadline, even when all is done, since later saves belong to
        it.
        """
        return self._drain is not None and time.monotonic() < self._drain.deadline_seconds

    @property
    def is_resting(self) -> bool:
        """Conversions and the slow reading stand still."""
        return self.is_draining or self.pause is not None

    @property
    def seconds_to_next(self) -> float:
        """A drain is planned anew each second, and a request that could not be read is tried again."""
        is_unread = any(self._read.get(name) != version for name, version in self._unread.items())
        return 1.0 if self.is_draining or is_unread else 3600.0

    def pace(self, job: JobRecord) -> None:
        """Make way for a save in flight (P11), in this job or on its disk, and for what a person asked."""
        if job.state is None:
            return
        job.local_actions.pace(is_resting=self._is_beside_save(job) or self.is_resting)
        for session in job.sessions.values():
            session.pace(BUSY_FRACTION if self.slows_transfers(job) else 1.0)

    def slows_transfers(self, job: JobRecord) -> bool:
        """Tell whether transfers slow down for a save in flight; during a drain they never do."""
        return self._is_beside_save(job) and not self.is_draining

    @staticmethod
    def _is_beside_save(job: JobRecord) -> bool:
        return job.state is not None and (
            bool(job.state.folders.in_flight) or job.disk_yield.is_save_beside(job)
        )

    # --- for the planner and for status ----------------------------------------------------------------

    def drain_view(self, job: JobRecord, state: JobState) -> Drain | None:
        """Build the planner's input for the drain under way; None: there is none."""
        if self._drain is None or not self.is_draining:
            return None
        names = list(job.sessions)
        speeds = {name: speed for name in names if (speed := _speed(job, state, name))}
        left = {
            (save_id, name, ZERO): _left_bytes(state, save_id, name)
            for save_id, uploads in state.uploads.records.items()
            for name in names
            if save_id in state.saves.rows and (name, ZERO) in uploads
        }
        left |= {
            key: max(0, moving.total_bytes - moving.done_bytes)
            for key, moving in state.uploads.progress.items()
        }
        return Drain(
            seconds_left=self._drain.deadline_seconds - time.monotonic(), speeds=speeds, left_bytes=left
        )

    def pause_status(self) -> PauseStatus | None:
        """For status.json."""
        if self.pause is None:
            return None
        return PauseStatus(since=rfc3339(self.pause.at_unix_seconds), by=self.pause.by)

    def drain_status(self, job: JobRecord, state: JobState) -> DrainStatus | None:
        """For status.json, until some minutes after the deadline."""
        if self._drain is None or time.monotonic() > self._drain.deadline_seconds + TOLD_SECONDS:
            return None
        if not self.is_draining and _newest_seen_at(state) > self._drain.deadline_unix:
            return None  # it is over, and what was saved since is none of its business
        told = state.plan.drained if state.plan is not None else None
        linked, left, refused = linked_here(job), missing_after(job), refused_here(job)
        is_rest_done = is_drained(job) or (bool(left) and set(left) <= set(refused))
        return DrainStatus(
            asked_at=rfc3339(self._drain.asked_at_unix),
            deadline_at=rfc3339(self._drain.deadline_unix),
            is_done=is_drained(job) and not linked,
            missing=(*(told.missing if told is not None else missing_after(job)), *linked),
            late=told.late if told is not None else (),
            refused=(*refused, *(linked if is_rest_done else ())),
            unsent=unsent_here(job),
            stalled=self.stalled([job]),
        )

    def stalled(self, jobs: Sequence[JobRecord]) -> tuple[str, ...]:
        """Remotes that the drain need not wait for; a remote that was cut just before gets its next try."""
        is_young = self._drain is None or time.monotonic() - self._drain.begun_seconds < STILL_SECONDS
        return stalled_drain(jobs) if self.is_draining and not is_young else ()


def _newest_seen_at(state: JobState) -> float:
    """When the newest save was first seen (Unix), whole or not."""
    seen = [row.seen_at for row in state.saves.rows.values()]
    return max([*seen, *(quiet.first_seen_unix for quiet in state.folders.quiet.values())], default=0.0)


def missing_after(job: JobRecord) -> tuple[str, ...]:
    """When the deadline has passed and the job goes on as ever: what still is not committed."""
    return tuple(save.save.tag for save in open_saves(job.view)) if job.view is not None else ()


def unsent_here(job: JobRecord) -> tuple[str, ...]:
    """Return the tags that are complete here and not committed because `backfill` excludes them."""
    return unsent(job.view) if job.view is not None else ()


def drained_words(jobs: Sequence[JobRecord]) -> str:
    """Describe the result of a finished drain of these jobs in one line."""
    linked = [tag for job in jobs for tag in linked_here(job)]
    but = f"; not {', '.join(linked)}: `ckptd status` says why" if linked else ""
    return all_committed(sum(len(unsent_here(job)) for job in jobs)) + but


def drain_code(jobs: Sequence[JobRecord]) -> int:
    """Return the exit code of a finished drain.

    0: everything is committed; 1: some of it cannot be committed as it is; 3: the time ran out.
    """
    if all(is_drained(job) for job in jobs):
        return 1 if any(linked_here(job) for job in jobs) else 0
    return 1 if any(refused_here(job) for job in jobs) else 3


def refused_here(job: JobRecord) -> tuple[str, ...]:
    """Return the tags that are not committed and that no attempt will commit, since their files are
    damaged.
    """
    if job.view is None:
        return ()
    names = [remote.name for remote in job.view.remotes if ZERO in remote.forms]
    return tuple(
        save.save.tag
        for save in open_saves(job.view)
        if any(save.upload(name, ZERO).state is UploadState.REFUSED for name in names)
    )


def is_drained(job: JobRecord) -> bool:
    """All that is complete here is committed, and nothing is about to be complete."""
    state = job.state
    if state is None:
        return job.turns > 1
    if state.is_first_scan or job.needs_turn or state.plan is None or job.view is None:
        return False
    return not missing_after(job) and not _about_to_be_complete(job, state)


def _about_to_be_complete(job: JobRecord, state: JobState) -> bool:
    """A save that its writer still writes, or that is looked at; one that has gone quiet never will be."""
    patience = max(10.0, 2 * job.config.settle_seconds)
    now = time.monotonic()
    for tag, verdict in state.folders.verdicts.items():
        if verdict.state is State.UNKNOWN:
            return True
        if verdict.state is State.COMPLETE and state.saves.of_tag(tag) is None:
            return True
        quiet = state.folders.quiet.get(tag)
        is_moving = verdict.state in (State.SAVING, State.RESAVING)
        if is_moving and (quiet is None or now - quiet.since_seconds < patience):
            return True
    return False


def stalled_drain(jobs: Sequence[JobRecord]) -> tuple[str, ...]:
    """Remotes that a drain need not wait for: all that is left waits for them, and no byte moves anywhere.

    A hung mount, whose child nothing ends: the machine that is to go would wait for the whole deadline.
    """
    found: set[str] = set()
    for job in jobs:
        if any(session.is_moving for session in job.sessions.values()):
            return ()
        lacking = _lacking(job)
        if not all(job.sessions[name].is_stalled for name in lacking):
            return ()
        if not lacking and not is_drained(job) and not refused_here(job):
            return ()
        found |= lacking
    return tuple(sorted(found))


def _lacking(job: JobRecord) -> set[str]:
    """Required remotes, or all where none is, to which a checkpoint that is complete here is still to go."""
    if job.view is None:
        return set()
    counting = [r for r in job.view.remotes if r.is_required and ZERO in r.forms] or job.view.remotes
    return {
        remote.name
        for remote in counting
        for save in open_saves(job.view)
        if ZERO in remote.forms and save.upload(remote.name, ZERO).state not in SETTLED
    }


def _speed(job: JobRecord, state: JobState, name: str) -> float | None:
    """Return the upload speed to a remote in bytes/s, at most the configured limit; None: not known.

    The upload under way is measured once it has run long enough; before that the last finished one counts.
    """
    measured = state.uploads.running_speed(name, MEASURED_SECONDS) or state.uploads.speeds.get(name)
    limit = job.sessions[name].bytes_per_second
    return min(measured, limit) if measured and limit else measured or limit


def _left_bytes(state: JobState, save_id: int, name: str) -> int:
    total = state.saves.rows[save_id].save.total_bytes
    done = sum(row.flushed_bytes for row in state.journal.objects(save_id, name, ZERO))
    return max(0, total - done)
