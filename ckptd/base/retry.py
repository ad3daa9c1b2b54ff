"""Decide when what failed is tried again: full jitter first; what keeps failing is left alone.

Jitter keeps nodes that lost one server from coming back to it all at once. A remote that failed six times in
a row gets one order at growing intervals, until one succeeds: it costs no more than that.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 6
"""Failures in a row before something is left alone."""
_LONGEST_SECONDS, _LEAST_SECONDS = 60.0, 0.5
_SOON_SECONDS, _SELDOM_SECONDS = 2.0, 30.0
_LEAST_SHARE = 0.75
_CHANGED_SECONDS, _CHANGED_MOST_SECONDS = 2.0, 3600.0


def backoff_seconds(tries: int) -> float:
    """Return a full-jitter delay: anywhere up to 2, 4, 8 … 60 s; never less than half a second."""
    return random.uniform(_LEAST_SECONDS, doubled(_SOON_SECONDS, tries, _LONGEST_SECONDS))  # noqa: S311 — no secret


def seldom_seconds(failures: int) -> float:
    """Return the delay between probes of what keeps failing: 30 s, then a minute, a quarter less at most."""
    longest = doubled(_SELDOM_SECONDS, failures - PATIENCE + 1, _LONGEST_SECONDS)
    return longest * random.uniform(_LEAST_SHARE, 1.0)  # noqa: S311 — no secret


def changed_seconds(tries: int) -> float:
    """Return the delay before a whole save is read again: 2 s … an hour.

    It is read again as its source changed or a disk refused.
    """
    return doubled(_CHANGED_SECONDS, tries, _CHANGED_MOST_SECONDS)


def jittered_seconds(first_seconds: float, tries: int, most_seconds: float) -> float:
    """Return a random wait of up to `first_seconds`, twice as long for each further try."""
    return random.uniform(0.0, doubled(first_seconds, tries, most_seconds))  # noqa: S311 — no secret


def doubled(first_seconds: float, tries: int, most_seconds: float) -> float:
    """Return the first delay, twice as long after each further failure, at most `most_seconds`.

    >>> doubled(60.0, 1, 3600.0), doubled(60.0, 3, 3600.0), doubled(60.0, 100_000, 3600.0)
    (60.0, 240.0, 3600.0)
    """
    return min(first_seconds * 2.0 ** min(max(tries, 1) - 1, 32), most_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedOff:
    """Something that is left alone: until when (unix seconds), after how many failures, why."""

    until: float
    failures: int
    reason: str

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.until))
        return f"left alone until {clock} after {self.failures} failures: {self.reason}"


class RetryTimer:
    """Schedule questions to a remote: each subject once at a time, and more seldom while it fails."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: set[str] = set()
        self._failed: dict[str, tuple[int, float]] = {}
        """Failures in a row, and when it may be asked again."""

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the next failed subject may be asked again; 0 when none waits."""
        waits = [at - self._clock() for _, at in self._failed.values()]
        return min((wait for wait in waits if wait > 0), default=0.0)

    def begin(self, what: str) -> bool:
        """Tell whether it is due now, and mark it as under way if it is."""
        if what in self._open or self._clock() < self._failed.get(what, (0, 0.0))[1]:
            return False
        self._open.add(what)
        return True

    def end(self, what: str, *, is_done: bool) -> None:
        """Note that a subject was answered, or failed."""
        self._open.discard(what)
        failures = self._failed.pop(what, (0, 0.0))[0] + 1
        if not is_done:
            self._failed[what] = failures, self._clock() + backoff_seconds(failures)


class Breaker:
    """Failures in a row of one kind of order, and when the next one may be tried."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._unix = unix
        self._failures = 0
        self._retry_at_seconds = 0.0
        self._alone: BackedOff | None = None

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the next order may be tried; 0 when it may be now."""
        return max(0.0, self._retry_at_seconds - self._clock())

    @property
    def backed_off(self) -> BackedOff | None:
        """Return what status shows while `PATIENCE` is spent; also while the probe is under way."""
        return self._alone

    def failed(self, reason: str) -> None:
        """Note one more failure in a row."""
        self._failures += 1
        is_spent = self._failures >= PATIENCE
        wait = seldom_seconds(self._failures) if is_spent else backoff_seconds(self._failures)
        self._retry_at_seconds = self._clock() + wait
        if is_spent:
            self._alone = BackedOff(until=self._unix() + wait, failures=self._failures, reason=reason)

    def succeeded(self) -> bool:
        """Forget all failures: it works. True when it had been left alone."""
        was_alone = self._alone is not None
        self._failures, self._retry_at_seconds, self._alone = 0, 0.0, None
        return was_alone
