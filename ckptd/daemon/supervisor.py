"""Restart a job whose own disk fails, as after a crash, until it works (docs/adr/0097, P7, P17).

When a statement of the journal or a call in the deciding thread fails, the job's memory may say more than the
journal does. Nothing of it is trusted then: the job is closed and opened anew from journal, disk and remotes,
which is what every restart does. On a full disk the reserve file frees the space for that, without a wait
(resources/reserve.py).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ckptd.daemon.resources.reserve import Reserve
from ckptd.errors import CkptdError, JournalDamaged, NotPermitted, StorageError, from_os_error
from ckptd.observe import logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.daemon.health.watched_job import WatchedJob

log = logging.getLogger("ckptd.job")

AGAIN_SECONDS = 10.0
INTERNAL_SECONDS = 3600.0


class JobSupervisor:
    """One job's; `is_patient` False: it ends with the error instead (`--once`)."""

    def __init__(
        self, job: WatchedJob, post: Callable[[Callable[[], None]], None], *, is_patient: bool
    ) -> None:
        self._job = job
        self._post = post
        self.reserve = Reserve(job.problems, job.config.save_dir)
        self._is_patient = is_patient
        self._again_at_seconds = 0.0
        self.failure = ""
        """Text of the error that closed the job; empty: a turn has gone through since."""
        self._ending: CkptdError | None = None
        """Error with which a job without patience ends at its next turn."""

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the job may be opened again; 0: now."""
        return max(0.0, self._again_at_seconds - time.monotonic())

    def turn(self, call: Callable[[], None]) -> None:
        """Make the job's turn.

        Raises:
            CkptdError, OSError: what no patience helps against, or there is none.
        """
        self.guard(call)
        if self._ending is not None:
            raise self._ending

    def guard(self, call: Callable[[], None]) -> None:
        """Make a call of the deciding thread for this job; after a lack the job begins again, or ends.

        Raises:
            CkptdError: what no patience helps against.
        """
        if self._ending is not None:
            return
        try:
            with logs.job_lines(self._job.config.name):
                call()
        except (StorageError, NotPermitted, OSError, RuntimeError) as error:
            refusal = error if isinstance(error, CkptdError) else _in_words(error)
            if refusal is None:
                raise
            if self._is_patient:
                self._begin_again(refusal)
            else:
                self._ending = refusal
                self._job.wake()

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made in the deciding thread, guarded (any thread)."""
        self._post(lambda: self.guard(call))

    def works(self) -> None:
        """A turn went through."""
        self.failure = ""
        self._job.problems.clear("job-interrupted", self._job.config.name)

    def _begin_again(self, error: CkptdError) -> None:
        job = self._job
        self.failure = error.message
        wait_seconds = 0.0 if self.reserve.helps(error, job.state_dir) else AGAIN_SECONDS
        log.error("job %s begins again in %.0f s: %s", job.config.name, wait_seconds, error)
        hint = error.hint or "tried again by itself; if it lasts, see to the disk of the state directory"
        job.problems.put("job-interrupted", job.config.name, error.message, hint)
        if isinstance(error, JournalDamaged) and job.state is not None:
            job.state.journal.give_up()
        self._again_at_seconds = time.monotonic() + wait_seconds
        job.close()
        if wait_seconds:
            job.sleep()
        else:
            job.wake()


def _in_words(error: OSError | RuntimeError) -> CkptdError | None:
    """Translate a failure of the operating system into one of the error tree; None: it is a defect of
    ckptd."""
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return from_os_error(error, f"working on this node{where}")
    if "new thread" in str(error):
        hint = "raise the limit of processes and threads (ulimit -u, TasksMax=, pids.max)"
        return StorageError(f"this process may have no more threads ({error})", hint=hint)
    return None


def report_internal_error(job: WatchedJob, error: Exception) -> None:
    """A defect, which no patience mends; what its end looks like nobody knows, so an hour after the last."""
    text = f"a defect of ckptd: {type(error).__name__}: {error}"
    next_step = "`ckptd logs JOB` has the trace; please report it"
    job.problems.put("internal", type(error).__name__, text, next_step, lasts_seconds=INTERNAL_SECONDS)
