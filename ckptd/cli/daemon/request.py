"""Ask daemons for a pause, its end or a drain: a file in each state directory, and a signal to read it.

The daemon answers in status.json, as it does for `reload` (docs/adr/0108).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ckptd.cli.output import print_note
from ckptd.errors import CkptdError, NotFoundError, NotPermitted, from_os_error
from ckptd.maintenance.status.places import state_places
from ckptd.maintenance.status.published import is_meant, published
from ckptd.storage.local.job_names import is_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pydantic import BaseModel

    from ckptd.config.schema import JobConfig
    from ckptd.daemon.job import Job
    from ckptd.observe.status import DaemonStatus, JobStatus

POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedJob:
    """A job with a state directory: where it is, and the daemon that runs it, if one does."""

    name: str
    state_dir: Path
    pid: int | None

    def job(self) -> JobStatus | None:
        """Return the job as it is published now; None while it is not."""
        try:
            jobs = published(None, self.state_dir)[0].status.jobs
        except CkptdError:
            return None
        return next((job for job in jobs if job.name == self.name), None)


def requested_jobs(job: str | None, state_dir: Path | None, config_dir: Path | None) -> list[RequestedJob]:
    """Return every job that is meant and has begun, whether its daemon runs or not.

    Raises:
        NotFoundError: none has.
    """
    found = []
    for document in published(job, state_dir, config_dir, say=print_note):
        for one in document.status.jobs:
            is_wanted = (job is None or is_meant(one, job, config_dir)) and one.state != "invalid"
            home = _begun(document.place, None if state_dir else job, config_dir) if is_wanted else None
            if home is not None:
                found.append(
                    RequestedJob(name=one.name, state_dir=home, pid=_listening(document.status.daemon))
                )
    if not found:
        msg = f"{job or 'no job'} has no checkpoint yet" if job else "no job has a checkpoint yet"
        raise NotFoundError(msg, hint="there is nothing of it to upload before; ckptd status")
    return found


def requested_job(job: str, config: JobConfig, directory: Path) -> RequestedJob:
    """Return where the job's requests are read, and the daemon that reads them, if one runs.

    Raises:
        NotFoundError: this user has no state of it.
    """
    from ckptd.recover.select.job import state_dir_for

    try:
        found = requested_jobs(job, None, directory)
    except NotFoundError:
        found = []
    if len(found) == 1:
        return found[0]
    path = state_dir_for(config, os.environ, directory)
    if not path.is_dir():
        msg = f"no daemon of this user has kept a state of job {config.name} ({path} is not there)"
        hint = "type it on the node and as the user whose daemon watches the job"
        raise NotFoundError(msg, hint=hint)
    return RequestedJob(name=config.name, state_dir=path, pid=None)


def work_alone(config: JobConfig, directory: Path, is_done: Callable[[Sequence[Job]], bool]) -> None:
    """Answer a request to a job that no daemon runs, under its lock; nothing else is done.

    Raises:
        LockHeld: one runs it after all (75). CkptdError: what the job stopped with.
    """
    from ckptd.config import loader
    from ckptd.daemon.loop import Daemon
    from ckptd.observe import logs

    logs.configure_plainly("ERROR")
    daemon = loader.load_daemon(directory / "ckptd.toml", os.environ)
    loaded = loader.LoadedConfig(daemon=daemon, jobs=(config,))
    alone = Daemon(loaded, os.environ, removes_until=is_done)
    alone.run()
    if alone.invalid:
        raise alone.invalid[0].error


def _begun(place: Path, job: str | None, config_dir: Path | None) -> Path | None:
    """Return the directory of the job's journal; the status of a new one may still be published elsewhere."""
    others = state_places(job, config_dir) if job is not None else ()
    return next((one for one in chain((place,), others) if (one / "journal.db").exists()), None)


def _listening(daemon: DaemonStatus) -> int | None:
    if not daemon.alive:
        return None
    try:
        return daemon_pid(daemon.pid, signal.SIGUSR1)
    except NotFoundError:
        return None


def daemon_pid(pid: int, number: signal.Signals, start_command: str = "") -> int:
    """Return the process, proved to be a daemon of ours that listens to a signal before it gets one.

    `start_command`: what started the one that is gone, as it published it.

    Raises:
        NotFoundError: there is none.
    """
    if not is_daemon(pid, number):
        msg = f"no daemon runs (status names process {pid})"
        raise NotFoundError(msg, hint=f"start it: {start_command or 'ckptd run SAVE_DIR URL'}")
    return pid


def send_request(asked: RequestedJob, name: str, document: BaseModel) -> None:
    """Write the request; a daemon that runs looks at once.

    Raises:
        NotPermitted: it is somebody else's job.
    """
    from ckptd.daemon.actions.control import write_control

    try:
        write_control(asked.state_dir, name, document)
        if asked.pid is not None:
            os.kill(asked.pid, signal.SIGUSR1)
    except PermissionError as error:
        msg = f"job {asked.name} belongs to another user ({asked.state_dir})"
        raise NotPermitted(msg, hint="run this as the user that ckptd runs as") from error
    except ProcessLookupError:
        return
    except OSError as error:
        raise from_os_error(error, f"asking job {asked.name}") from error


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until `done` returns true; tell whether it did in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True
