"""Decorators that notice whether an order moves: one around the store, one around the pacer (docs/adr/0090).

A server that accepts and then hangs looks like a slow one. What tells them apart is kept here, for every kind
of remote alike: when a byte last moved, an answer last came, or our own limit last made the transfer wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from ckptd.remote.pacing import Pacer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.remote.store import Store

_SUSTAINED_SECONDS = 5.0


class Motion:
    """When something last moved in one order; called from all its threads.

    A request that is tried again reads the same bytes once more, in one go into the socket's buffer: that is
    no motion. Bytes read again for longer than a few seconds without a pause are (a slow link, hashing).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved_at = clock()
        self._read_at = self._reading_since = clock()
        self._furthest: dict[str, int] = {}

    @property
    def idle_seconds(self) -> float:
        """Since the last motion."""
        return self._clock() - self._moved_at

    def moved(self) -> None:
        """Something did."""
        self._moved_at = self._clock()

    def advanced(self, key: str, done_bytes: int) -> None:
        """That many bytes of an object are done: motion, if never so many before."""
        if done_bytes > self._furthest.get(key, -1):
            self._furthest[key] = done_bytes
            self.moved()

    def read(self) -> None:
        """Some bytes of the source were asked for."""
        now = self._clock()
        if now - self._read_at > _SUSTAINED_SECONDS:
            self._reading_since = now
        self._read_at = now
        if now - self._reading_since > _SUSTAINED_SECONDS:
            self.moved()


class WatchedPacer(Pacer):
    """The remote's pacer as one order uses it: waiting for our own limit is no standstill."""

    def __init__(self, inner: Pacer, motion: Motion) -> None:
        self._inner = inner
        self._motion = motion

    def chunk_bytes(self, limit_bytes: int) -> int:
        """As the inner one."""
        return self._inner.chunk_bytes(limit_bytes)

    def take(self, count_bytes: int, check: Callable[[], None]) -> None:
        """As the inner one."""
        is_first = True

        def still_waiting() -> None:
            nonlocal is_first
            if not is_first:
                self._motion.moved()
            is_first = False
            check()

        self._inner.take(count_bytes, still_waiting)
        self._motion.read()

    def give_back(self, count_bytes: int) -> None:
        """As the inner one."""
        self._inner.give_back(count_bytes)

    def breathe(self, check: Callable[[], None]) -> None:
        """As the inner one; called after bytes came back."""
        self._motion.moved()
        self._inner.breathe(check)


def watched(store: Store, heard: Callable[[], None]) -> Store:
    """The same store; `heard` is called whenever it answers, and for each entry of a listing."""
    return cast("Store", _WatchedStore(store, heard))


class _WatchedStore:
    def __init__(self, inner: Store, heard: Callable[[], None]) -> None:
        self._inner = inner
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def verb(*arguments: Any, **more: Any) -> Any:
            answer = found(*arguments, **more)
            self._heard()
            return self._each(answer) if isinstance(answer, Iterator) else answer

        return verb

    def _each(self, entries: Iterator[Any]) -> Iterator[Any]:
        for entry in entries:
            self._heard()
            yield entry
