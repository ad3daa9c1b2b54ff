"""Run work outside the deciding thread in a few threads, whose results come back as calls in the deciding
thread.

Workers never decide and never touch the journal; an unexpected exception in one is logged with its trace and
reported as a failure of that one action, so that a bug in one place does not end the watch over the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckptd.errors import CkptdError, from_os_error
from ckptd.observe.logs import bind_job

Result = TypeVar("Result")
Guard = Callable[[Callable[[], None]], None]

log = logging.getLogger("ckptd.workers")


class InternalError(CkptdError):
    """A defect of ckptd itself; the action failed, nothing else did."""

    default_hint = "this is a bug of ckptd; `ckptd logs JOB` has the trace"


class JobWorkers:
    """The pool as one activation of a job uses it: results that arrive after its end are dropped.

    What was done is found again on disk by the next activation, as after a crash (P7).
    """

    def __init__(self, workers: Workers, guard: Guard) -> None:
        self._workers = workers
        self._guard = guard
        self._is_closed = False

    @property
    def open(self) -> int:
        """Actions under way in the whole pool."""
        return self._workers.open

    def submit(
        self,
        what: str,
        work: Callable[[], Result],
        then: Callable[[Result], None],
        failed: Callable[[CkptdError], None],
    ) -> None:
        """Submit work like `Workers.submit`; results and errors are reported through this wrapper."""
        self._workers.submit(
            what,
            work,
            lambda result: self._report(lambda: then(result)),
            lambda error: self._report(lambda: failed(error)),
        )

    def _report(self, call: Callable[[], None]) -> None:
        if not self._is_closed:
            self._guard(call)

    def close(self) -> None:
        """Drop all reports from here on."""
        self._is_closed = True


class Workers:
    """A pool of threads; `post` puts a call into the deciding thread's queue."""

    def __init__(self, post: Callable[[Callable[[], None]], None], threads: int = 4) -> None:
        self._post = post
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ckptd-worker")
        self.open = 0
        """Actions under way; counted in the deciding thread."""

    def submit(
        self,
        what: str,
        work: Callable[[], Result],
        then: Callable[[Result], None],
        failed: Callable[[CkptdError], None],
    ) -> None:
        """Run `work` in a thread; its result or error reaches `then` or `failed` in the deciding thread."""
        self.open += 1

        def run() -> None:
            try:
                result = work()
            except CkptdError as error:
                problem: CkptdError = error
            except OSError as error:
                problem = from_os_error(error, what)
            except Exception as error:  # the one place that turns a bug into a failed action
                log.exception("%s failed unexpectedly", what)
                problem = InternalError(f"{what}: {type(error).__name__}: {error}")
            else:
                self._post(lambda: self._finish(lambda: then(result)))
                return
            self._post(lambda: self._finish(lambda: failed(problem)))

        self._pool.submit(bind_job(run))

    def for_one(self, guard: Guard = lambda call: call()) -> JobWorkers:
        """The pool for one activation of one job, whose results are taken in through `guard`."""
        return JobWorkers(self, guard)

    def _finish(self, call: Callable[[], None]) -> None:
        self.open -= 1
        call()

    def stop(self) -> None:
        """Take no more work; what runs may end (its children were told to stop)."""
        self._pool.shutdown(wait=False, cancel_futures=True)
