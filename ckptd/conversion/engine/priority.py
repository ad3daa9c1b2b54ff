"""Run a converting child after everybody else, until it starves (P11; docs/adr/0223).

Where the kernel groups processes by session (autogroup, the default of most kernels), nice values and
SCHED_IDLE count within a session alone: a child in a session of its own takes half of a core from a trainer
in another one. There the session itself has a nice value, which its owner may raise and lower again.
"""

from __future__ import annotations

import contextlib
import os
import time

from ckptd.base.owned_dirs import list_dir
from ckptd.base.process import set_session_nice

LOWEST_NICE, LOW_NICE = 19, 10
"""Nice values of the session, until it starves and afterwards: 1.5 % of a busy core, and a tenth of it."""
YOUNG_SECONDS = 0.5
"""Leave alone what has run for less: a small conversion is over by then."""
LOOK_SECONDS = 0.25
WINDOW_SECONDS = 2.0
STARVING_SHARE = 0.05
"""Share of a window: it starves if it runs for less, and waited for a core for half of it."""

_CPUCLOCK_SCHED = 2
"""Bits of the clock of a process, as clock_getcpuclockid(3) makes it."""


class LowestPriority:
    """Keep a child that leads its session behind all others; called by the loop that watches it.

    Made before the child restricts itself: in a user namespace its files in /proc belong to root. The parent
    judges, since a thread of the child that waits for a core may hold Python's lock.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._autogroup = _opened(f"/proc/{pid}/autogroup", os.O_WRONLY)
        self._tasks = _opened(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY)
        self._nice_to_set: int | None = None
        self._looked_at = 0.0
        self._ran_seconds = 0.0
        self._waited_ns: dict[str, int] = {}
        self.is_lowest = self.has_starved = False

    def close(self) -> None:
        """Close what is open of /proc."""
        for fd in (self._autogroup, self._tasks):
            if fd is not None:
                os.close(fd)

    def look(self, now_seconds: float) -> None:
        """Lower the child's priority once it is not young, and raise it again once it starves."""
        seconds = now_seconds - self._looked_at
        if not self.has_starved and seconds >= (WINDOW_SECONDS if self.is_lowest else LOOK_SECONDS):
            self._looked_at = now_seconds
            before, self._ran_seconds = self._ran_seconds, self._cpu_seconds()
            waited_seconds = self._waited_seconds()
            is_seen = bool(self._waited_ns)  # /proc mounted with hidepid may not tell of its threads
            if not self.is_lowest and is_seen and self._ran_seconds >= YOUNG_SECONDS:
                self.is_lowest = True
                self._enter(LOWEST_NICE, os.SCHED_IDLE if self._may_leave_idle() else os.SCHED_BATCH)
            elif self.is_lowest and waited_seconds > seconds / 2:
                self.has_starved = self._ran_seconds - before < STARVING_SHARE * seconds
                if self.has_starved:  # to its end: on a node that is never idle it would have none
                    self._enter(LOW_NICE, os.SCHED_BATCH)
        if (nice := self._nice_to_set) is not None and (
            self._autogroup is None or set_session_nice(self._autogroup, nice)
        ):
            self._nice_to_set = None

    def _cpu_seconds(self) -> float:
        """Return what all its threads ran, those that have ended included."""
        try:
            return time.clock_gettime(~self._pid << 3 | _CPUCLOCK_SCHED)
        except OSError:  # it has ended
            return self._ran_seconds

    def _waited_seconds(self) -> float:
        """Return how long its threads waited for a core since the last call."""
        before, self._waited_ns = self._waited_ns, {}
        for thread in _listed(self._tasks):
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._waited_ns[thread] = int(_read(f"{thread}/schedstat", self._tasks).split()[1])
        return sum(waited - before.get(thread, 0) for thread, waited in self._waited_ns.items()) / 1e9

    def _may_leave_idle(self) -> bool:
        """Tell whether SCHED_IDLE can be left: RLIMIT_NICE must allow the nice value, by default it does not.

        The kernel asks for the same right where a nice value is lowered (sched(7)), so that is tried.
        """
        try:
            nice = os.getpriority(os.PRIO_PROCESS, self._pid)
            os.setpriority(os.PRIO_PROCESS, self._pid, nice - 1)
            os.setpriority(os.PRIO_PROCESS, self._pid, nice)
        except OSError:
            return False
        return True

    def _enter(self, session_nice: int, policy: int) -> None:
        """Give all threads a policy, which those to come inherit; the session's nice value follows."""
        self._nice_to_set = session_nice
        for thread in _listed(self._tasks):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))


def _opened(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        return None


def _listed(fd: int | None) -> list[str]:
    """Return the threads of a /proc/PID/task; none: the process has ended."""
    try:
        return list_dir(fd) if fd is not None else []
    except OSError:
        return []


def _read(name: str, dir_fd: int | None) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return os.read(fd, 256)
    finally:
        os.close(fd)
