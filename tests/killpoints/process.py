"""A daemon's own turns in one thread of this process: no child, no pool, no clock but ours.

It exists because a real daemon with its children takes seconds to start and a life must be cut at thousands
of places. Jobs, plans, journal, workers' work, service, planning and executing are the product's.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptd.config.loader import load_daemon, load_jobs
from ckptd.core.policy.blockers import tried_again
from ckptd.daemon.health.checks import exit_code, is_idle
from ckptd.daemon.job import Job
from ckptd.daemon.loop import Daemon
from ckptd.daemon.resources.workers import Workers
from ckptd.daemon.state.problems import Problem
from tests.killpoints.seams import Seams
from tests.killpoints.standins import Clock, DirectClient, Inline, Later, open_stores, put, stand_in

WELL_SECONDS = 40.0


class Process:
    """One daemon from start to its death or its end."""

    def __init__(
        self,
        job_file: Path,
        shelf: Path,
        seams: Seams,
        clock: Clock,
        tell: Callable[[str], None],
        *,
        is_eager: bool,
        lanes: int,
    ) -> None:
        self.clock = clock
        self.seams = seams
        clock.install()
        stand_in(lanes)
        open_stores(shelf, seams, tell, lanes)
        loaded = load_jobs([job_file], load_daemon(None, {}), {})
        seams.install()
        self.daemon = Daemon(loaded, {})
        self._queue: queue.SimpleQueue[Callable[[], None]] = self.daemon._queue
        post = self._queue.put
        self.daemon._workers = Workers(post)
        put(self.daemon._workers, "_pool", Inline() if is_eager else Later(post))
        put(DirectClient, "later", None if is_eager else staticmethod(post))
        put(DirectClient, "drain", None if is_eager else staticmethod(self._take_in))
        self.daemon._open_jobs()

    @property
    def job(self) -> Job:
        """The one job."""
        if not self.daemon.jobs:
            message = f"the job ended: {self.daemon.invalid}"
            raise AssertionError(message)
        return self.daemon.jobs[0]

    @property
    def problems(self) -> list[Problem]:
        """What status would show."""
        return list(self.job.problems.all())

    @property
    def exit_code(self) -> int:
        """What `ckptd run --once` would end with."""
        return exit_code(self.job)

    def turn(self) -> None:
        """Wait for what is due, take all that happened, let the job decide."""
        now = time.monotonic()
        self._take_in()
        self.daemon._turn(self.job, now)
        self.daemon._limits.share_and_wake()
        if self._queue.empty() and self.daemon.jobs:
            self.clock.wait(min(10.0, max(0.02, self.job.seconds_to_next(time.monotonic()))))

    def _take_in(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except queue.Empty:
                return
            self.daemon._call(call)

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do, as `--once` judges it; and no file that a disk refused is to be read again:
        a trainer with one constant name would write over it."""
        job = self.job
        if not self._queue.empty() or job.phase == "waiting" or not is_idle(job):
            return False
        return job.state is None or not job.sealer._reading.seconds_to_read(time.monotonic())

    @property
    def _tries_again(self) -> bool:
        """`--once` gives up what failed thrice; a daemon does not."""
        view, state = self.job.view, self.job.state
        if view is None or state is None or state.plan is None:
            return False
        return bool(tried_again(view, state.plan.local_verdicts))

    def until_well(self, turns: int) -> None:
        """Turn until what failed was tried again and all has been safe for a while."""
        since = time.monotonic()
        for _ in range(turns):
            if (
                not self.is_idle
                or self.exit_code
                or self.job.sessions["nas"].seconds_to_wake
                or self._tries_again
            ):
                since = time.monotonic()
            elif time.monotonic() - since > WELL_SECONDS:
                return
            self.turn()

    def publish(self) -> None:
        """Write status.json."""
        self.daemon._publish(is_urgent=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The product's own lines go nowhere."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
