"""Share a daemon's limits between its jobs: uploads at once, one conversion at a time, bandwidth, memory
(P11, P12: training comes first).

The limits are those of `ckptd.toml`, and what `config.budget` derives from them. First come, first served; a
job that does not ask again in its next turn loses its place. Everything here is called in the deciding
thread, so nothing needs a lock. Freed memory is returned to the kernel here too.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ckptd.base.process import limit_malloc
from ckptd.config.budget import Division, divide, shortage
from ckptd.core.policy.uploads import EARLY
from ckptd.daemon.resources.disk_yield import DiskYield
from ckptd.daemon.resources.memory_pressure import MemoryPressure
from ckptd.storage.child.slots import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from ckptd.config.schema import DaemonConfig
    from ckptd.daemon.state.problems import Problems
    from ckptd.daemon.uploads.session import RemoteSession

log = logging.getLogger("ckptd")

CONVERSIONS = 1
"""Conversions at a time in the whole daemon: one may use what the memory budget leaves."""


@dataclass(slots=True)
class _Waiting:
    wake: Callable[[], None]
    has_asked: bool = True


class Slots:
    """Admit at most `count` of something at a time; `in_use` says how many there are."""

    def __init__(self, count: Callable[[], int], in_use: Callable[[], int]) -> None:
        self._count = count
        self._in_use = in_use
        self._waiting: dict[Hashable, _Waiting] = {}

    def may_start(self, who: Hashable, wake: Callable[[], None]) -> bool:
        """Tell whether `who` may start one now; else it waits in line, and `wake` is called when it may."""
        ahead = list(self._waiting)
        place = ahead.index(who) if who in self._waiting else len(ahead)
        if self._in_use() + place < self._count():
            self._waiting.pop(who, None)
            return True
        self._waiting[who] = _Waiting(wake)
        return False

    def begin_turn(self, mine: Iterable[Hashable]) -> None:
        """A turn of whoever these belong to begins: who wants to stay in line asks again in it."""
        for who in mine:
            if who in self._waiting:
                self._waiting[who].has_asked = False

    def end_turn(self, mine: Iterable[Hashable]) -> None:
        """Remove from the line those that did not ask again."""
        for who in mine:
            if who in self._waiting and not self._waiting[who].has_asked:
                del self._waiting[who]

    def leave(self, mine: Iterable[Hashable]) -> None:
        """Remove these from the line, whatever they asked for."""
        for who in mine:
            self._waiting.pop(who, None)

    def call(self) -> None:
        """Wake those whose turn it is."""
        free = self._count() - self._in_use()
        for waiting in list(self._waiting.values())[: max(free, 0)]:
            waiting.wake()


class HostLimits:
    """The shared limits of a daemon; `sessions` are those of all its jobs, `converting` how many convert.

    `remotes`: what the child of each job's remotes takes (`child_bytes`): the budget is divided for all.
    """

    def __init__(
        self,
        daemon: DaemonConfig,
        sessions: Callable[[], Sequence[RemoteSession]],
        converting: Callable[[], int],
        *,
        remotes: Callable[[], Sequence[Sequence[int]]],
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._sessions = sessions
        self._remotes = remotes
        self._unix = unix
        self.uploads = Slots(
            lambda: self.division.uploads, lambda: sum(session.is_transferring for session in sessions())
        )
        self.conversions = Slots(lambda: CONVERSIONS, converting)
        self.child_slots = SlotPool(lambda: self.division.children)
        self.disk_yield = DiskYield()
        self.memory_pressure = MemoryPressure()
        self._told: tuple[str, str] | None = None
        self.change(daemon)

    def change(self, daemon: DaemonConfig) -> None:
        """Other limits, from now on."""
        self._max_uploads = daemon.max_uploads
        self._bandwidth = daemon.bandwidth
        self._convert_bandwidth = daemon.convert_bandwidth
        self.memory_bytes = daemon.memory_budget_bytes(psutil.virtual_memory().total)
        """Budget of the whole process tree."""

    @property
    def division(self) -> Division:
        """Shares of the budget for the jobs that there are now."""
        return divide(self.memory_bytes, self._remotes(), self._max_uploads)

    @property
    def takes_turns(self) -> bool:
        """The budget has no room for a child of each remote: a look may cost the start of one."""
        return self.division.children < sum(map(len, self._remotes()))

    def conversion_bytes(self) -> int:
        """Return the memory that a conversion may use: the budget less the daemon's and the remotes'
        children's shares.
        """
        return self.division.conversion_bytes

    def conversion_bytes_per_second(self) -> int | None:
        """Return what a conversion that begins now may copy and compare each second; None: all it can."""
        return self._convert_bandwidth.at(self._unix())

    def begin_turn(self, mine: Sequence[Hashable]) -> None:
        """A turn of a job begins: who of it waits in line must ask again."""
        for slots in (self.uploads, self.conversions):
            slots.begin_turn(mine)

    def end_turn(self, mine: Sequence[Hashable]) -> None:
        """Remove from the line those that did not ask again."""
        for slots in (self.uploads, self.conversions):
            slots.end_turn(mine)

    def leave(self, mine: Sequence[Hashable]) -> None:
        """A job ends, or its turn failed: who of it waits in line leaves it."""
        for slots in (self.uploads, self.conversions):
            slots.leave(mine)

    def share_and_wake(self) -> None:
        """Share the bandwidth among the uploads and wake who may start; called after all turns."""
        self.share()
        self.child_slots.settle()
        self.uploads.call()
        self.conversions.call()

    def report_shortage(self, of_jobs: Sequence[Problems]) -> None:
        """Report a budget that these jobs cannot keep to as a problem of each, for as long as it is."""
        found = shortage(self.division, self.memory_bytes)
        if found is not None and found != self._told:
            log.error("%s; %s", *found)
        self._told = found
        for problems in of_jobs:
            if found is None:
                problems.clear("memory-short", "memory_budget")
            else:
                problems.put("memory-short", "memory_budget", *found)

    def cancel_early(self) -> None:
        """Cancel what any job uploads of saves that are not whole yet: a whole one waits for its place."""
        for session in self._sessions():
            if session.uploading == EARLY:
                session.cancel_transfer()

    def share(self, starting: RemoteSession | None = None) -> None:
        """Tell sessions that upload their part; one that is about to start hears it before its first byte.

        Timetables are read anew each time: a limit that begins now holds with the next turn.
        """
        now = self._unix()
        active = [session for session in self._sessions() if session.is_transferring or session is starting]
        rates = shares(self._bandwidth.at(now), {session: session.bandwidth.at(now) for session in active})
        for session, rate in rates.items():
            session.limit(rate)


def shares(total: int | None, limits: Mapping[RemoteSession, int | None]) -> dict[RemoteSession, int | None]:
    """Bytes per second for each transfer: equal parts of `total`; what a slower remote cannot use goes on.

    `limits`: a remote's own bandwidth, None for none. The sum never exceeds `total`.
    """
    if total is None:
        return dict(limits)
    found: dict[RemoteSession, int | None] = {}
    left_bytes, left = total, len(limits)
    for session, limit in sorted(limits.items(), key=lambda pair: pair[1] if pair[1] is not None else total):
        part = left_bytes // left
        rate = max(1, part if limit is None else min(part, limit))
        found[session] = rate
        left_bytes, left = left_bytes - rate, left - 1
    return found


# --- The daemon's own memory: returned to the kernel after a burst, for the RAM is the trainer's ---------

_M_ARENA_MAX = -8
_ARENAS = 2


def keep_small() -> None:
    """Limit malloc to few arenas (glibc alone); called before any thread, whose memory they keep."""
    limit_malloc({_M_ARENA_MAX: _ARENAS})


def give_back() -> None:
    """Hand free pages back to the kernel (glibc alone)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, no search for cycles: a plan makes none, and with many records a search costs as much as it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def tree_bytes() -> int:
    """Resident bytes of this process and its children."""
    process = psutil.Process(os.getpid())
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
