"""Limit how fast a transfer moves, and stop it: a token bucket and a cancel flag.

It decorates the source, so that no store knows of it; both are honoured at the next buffer.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ckptd.errors import SourceChanged

if TYPE_CHECKING:
    from collections.abc import Callable

_SLICE_SECONDS = 0.05
_BURST_SECONDS = 0.25
_SMALLEST_BYTES = 64 << 10
_LONGEST_PAUSE_SECONDS = 5.0


class Cancelled(SourceChanged):
    """The daemon cancelled the order; what is flushed can be resumed from."""


class RateLimiter:
    """Bytes per second × a fraction that changes on the fly; also a fraction of the time when unlimited.

    `fraction` 0 pauses. Shared by all transfers of a remote; thread-safe.
    """

    def __init__(
        self,
        bytes_per_second: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._fraction = 1.0
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._credit = 0.0
        self._filled_at = clock()
        self._released = threading.local()

    def set_fraction(self, fraction: float) -> None:
        """Move at this fraction of the configured speed from the next buffer on."""
        self._fraction = min(max(fraction, 0.0), 1.0)

    def set_rate(self, bytes_per_second: int | None) -> None:
        """Change the configured speed."""
        self._rate = bytes_per_second

    def chunk_bytes(self, limit_bytes: int) -> int:
        """Return how much to ask for at once, so that a slow link is moved in small steps."""
        if self._rate is None:
            return limit_bytes
        step = int(self._rate * max(self._fraction, 0.01) * _BURST_SECONDS)
        return min(limit_bytes, max(step, _SMALLEST_BYTES))

    def take(self, count_bytes: int, check: Callable[[], None]) -> None:
        """Wait until `count_bytes` may move; calls `check` (which may raise) at least every 50 ms."""
        check()
        while self._fraction <= 0:
            self._sleep(_SLICE_SECONDS)
            check()
        if self._rate is None:
            self._rest(check)
        else:
            while (wait := self._wait_seconds(count_bytes)) > 0:
                self._sleep(min(wait, _SLICE_SECONDS))
                check()
        self._released.at = self._clock()

    def give_back(self, count_bytes: int) -> None:
        """Return granted bytes that did not move, so that they do not count as speed."""
        with self._lock:
            self._credit += count_bytes

    def breathe(self, check: Callable[[], None]) -> None:
        """Pause as `take` does, for work that does not count as bandwidth (reading back)."""
        check()
        while self._fraction <= 0:
            self._sleep(_SLICE_SECONDS)
            check()
        self._rest(check)
        self._released.at = self._clock()

    def _rest(self, check: Callable[[], None]) -> None:
        """Rest, at a fraction f, (1/f - 1) times as long as the work since the last release took."""
        worked = self._clock() - getattr(self._released, "at", self._clock())
        rested = 0.0
        while rested < min(worked * (1 / max(self._fraction, 0.01) - 1), _LONGEST_PAUSE_SECONDS):
            self._sleep(_SLICE_SECONDS)
            rested += _SLICE_SECONDS
            check()

    def _wait_seconds(self, count_bytes: int) -> float:
        """Return the seconds to wait, 0 when the bytes were granted; debt is allowed, so that a big buffer
        passes.
        """
        if self._rate is None:
            # a limit that ended while somebody waited for it
            return 0.0
        rate = self._rate * self._fraction
        if rate <= 0:
            return _SLICE_SECONDS
        with self._lock:
            now = self._clock()
            self._credit = min(self._credit + (now - self._filled_at) * rate, rate * _BURST_SECONDS)
            self._filled_at = now
            # less than a byte of debt is rounding, too little to sleep for
            if self._credit < -1:
                return -self._credit / rate
            self._credit -= count_bytes
            return 0.0
