"""What all jobs of a daemon share: uploads at once, one conversion at a time, bandwidth (P11, P12).

The limits are those of `ckptd.toml`. First come, first served; a job that does not ask again in its next
turn loses its place. Everything here is called in the deciding thread, so nothing needs a lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from ckptd.config_model import DaemonConfig
    from ckptd.daemon.links import RemoteLink

CONVERSIONS = 1
"""At once in the whole daemon: it may use what the memory budget leaves."""
DAEMON_BYTES = 96 << 20
CHILD_BYTES = 64 << 20
"""The daemon and a remote's child at their largest, as measured (docs/performance.md)."""
SMALLEST_CONVERSION_BYTES = 64 << 20


@dataclass(slots=True)
class _Waiting:
    wake: Callable[[], None]
    has_asked: bool = True


class Slots:
    """At most `count` of something at once; `in_use` says how many there are now."""

    def __init__(self, count: int, in_use: Callable[[], int]) -> None:
        self.count = count
        self._in_use = in_use
        self._waiting: dict[Hashable, _Waiting] = {}

    def may_start(self, who: Hashable, wake: Callable[[], None]) -> bool:
        """Whether `who` may start one now; else it waits in line, and `wake` is called when it may."""
        ahead = list(self._waiting)
        place = ahead.index(who) if who in self._waiting else len(ahead)
        if self._in_use() + place < self.count:
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
        """Who did not ask again leaves the line."""
        for who in mine:
            if who in self._waiting and not self._waiting[who].has_asked:
                del self._waiting[who]

    def leave(self, mine: Iterable[Hashable]) -> None:
        """These wait no more, whatever they asked for: nobody stands behind them for ever."""
        for who in mine:
            self._waiting.pop(who, None)

    def call(self) -> None:
        """Wake those whose turn it is."""
        free = self.count - self._in_use()
        for waiting in list(self._waiting.values())[: max(free, 0)]:
            waiting.wake()


class Totals:
    """The shared limits of a daemon; `links` are those of all its jobs, `converting` how many convert."""

    def __init__(
        self,
        daemon: DaemonConfig,
        links: Callable[[], Sequence[RemoteLink]],
        converting: Callable[[], int],
        *,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._links = links
        self._unix = unix
        self.uploads = Slots(daemon.max_uploads, lambda: sum(link.is_shipping for link in links()))
        self.conversions = Slots(CONVERSIONS, converting)
        self.change(daemon)

    def change(self, daemon: DaemonConfig) -> None:
        """Other limits, from now on."""
        self.uploads.count = daemon.max_uploads
        self._bandwidth = daemon.bandwidth
        self.memory_bytes = daemon.memory_budget_bytes(psutil.virtual_memory().total)
        """Of the whole process tree."""

    def conversion_bytes(self) -> int:
        """What a conversion may use: what the daemon and the remotes' children leave of the budget."""
        taken = DAEMON_BYTES + CHILD_BYTES * len(self._links())
        return max(SMALLEST_CONVERSION_BYTES, self.memory_bytes - taken)

    def begin_turn(self, mine: Sequence[Hashable]) -> None:
        """A turn of a job begins: who of it waits in line must ask again."""
        for slots in (self.uploads, self.conversions):
            slots.begin_turn(mine)

    def end_turn(self, mine: Sequence[Hashable]) -> None:
        """Who did not ask again leaves the line."""
        for slots in (self.uploads, self.conversions):
            slots.end_turn(mine)

    def leave(self, mine: Sequence[Hashable]) -> None:
        """A job ends, or its turn failed: who of it waits in line leaves it."""
        for slots in (self.uploads, self.conversions):
            slots.leave(mine)

    def settle(self) -> None:
        """After all turns: share the bandwidth among those who ship, and wake who may start."""
        self.share()
        self.uploads.call()
        self.conversions.call()

    def share(self, starting: RemoteLink | None = None) -> None:
        """Tell those who ship their part; who is about to start hears it before its first byte.

        Timetables are read anew each time: a limit that begins now holds with the next turn.
        """
        now = self._unix()
        active = [link for link in self._links() if link.is_shipping or link is starting]
        rates = shares(self._bandwidth.at(now), {link: link.bandwidth.at(now) for link in active})
        for link, rate in rates.items():
            link.limit(rate)


def shares(total: int | None, limits: Mapping[RemoteLink, int | None]) -> dict[RemoteLink, int | None]:
    """Bytes per second for each transfer: equal parts of `total`; what a slower remote cannot use goes on.

    `limits`: a remote's own bandwidth, None for none. The sum never exceeds `total`.
    """
    if total is None:
        return dict(limits)
    found: dict[RemoteLink, int | None] = {}
    left_bytes, left = total, len(limits)
    for link, limit in sorted(limits.items(), key=lambda pair: pair[1] if pair[1] is not None else total):
        part = left_bytes // left
        rate = max(1, part if limit is None else min(part, limit))
        found[link] = rate
        left_bytes, left = left_bytes - rate, left - 1
    return found
