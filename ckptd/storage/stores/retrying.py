"""Decorate stores and rate limiters: small verbs tried again at once, signs of life, stores that are full.

Over NFS a handle goes stale when a server restarts or another node renames a folder: opened anew by name the
same call works. Everything that lasts longer is the daemon's to try again, with its own back-off
(docs/internals/stores.md).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from ckptd.base.retry import jittered_seconds
from ckptd.storage.stores.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage.stores.base import Store

P = ParamSpec("P")
T = TypeVar("T")
_TRIES = 3
_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 2.0
_PASSING = {errno.ESTALE, errno.EAGAIN}
_VERBS = ("probe", "get", "put", "stat", "read_at", "verify", "delete", "discard", "free_bytes")
"""Each may be done twice; an upload goes on at the next attempt, a listing is asked for again as a whole."""


def briefly(action: Callable[P, T], *kinds: type[Exception]) -> Callable[P, T]:
    """Wrap `action` in at most three tries, full jitter after the second: on these errors, or what passes."""

    def is_worth_it(error: BaseException) -> bool:
        return isinstance(error, kinds) if kinds else _is_passing(error)

    def tried(*arguments: P.args, **more: P.kwargs) -> T:
        for failures in range(1, _TRIES):
            try:
                return action(*arguments, **more)
            except Exception as error:
                if not is_worth_it(error):
                    raise
            if failures > 1:
                time.sleep(jittered_seconds(_FIRST_SECONDS, failures - 1, _LONGEST_SECONDS))
        return action(*arguments, **more)

    return tried


def tried_again(store: Store) -> Store:
    """Wrap a store so that its small verbs are tried again after a passing failure."""
    return cast("Store", _TriedAgain(store))


def _is_passing(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__
    return False


class _TriedAgain:
    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _VERBS:
            return found

        def verb(*arguments: Any, **more: Any) -> Any:
            return briefly(found)(*arguments, **more)

        return verb

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object, trying again; after a failed try look whether that try created it after all."""
        inner, asked = self._inner, 0

        def create() -> bool:
            nonlocal asked
            asked += 1
            return inner.put_if_absent(key, data) or (asked > 1 and inner.get(key) == data)

        return briefly(create)()


# --- uploads that found the store full -------------------------------------------------------------------
# An upload begun in vain moves its bytes for nothing. Blocks are counted by the file system; a quota (Lustre,
# GPFS, NFS) often shows in no count, so after one was met only time or a removal is a reason to try again
# (docs/adr/0161).

_QUOTA_SECONDS, _QUOTA_MOST_SECONDS = 60.0, 900.0
"""After a quota an object is begun again after so long, twice as long each further time."""
_MOST_DOUBLINGS = 6


class FullStoreMemory:
    """Remember the uploads that found a store full; one object for a store, shared by its lanes."""

    def __init__(self) -> None:
        self._lacked: dict[str, tuple[int, float]] = {}
        """Key → how often in a row, until when (monotonic) a count of free blocks is not believed."""

    def is_in_vain(self, key: str, size_bytes: int, free_bytes: Callable[[], int | None]) -> bool:
        """Tell whether beginning it would, as far as is known, send its bytes for nothing."""
        tries, until_seconds = self._lacked.get(key, (0, 0.0))
        return tries > 0 and (time.monotonic() < until_seconds or (free_bytes() or 0) < size_bytes)

    def missed(self, key: str, size_bytes: int, free_bytes: int | None) -> None:
        """Note that an upload found no room; `free_bytes`: as counted then, None: not known."""
        tries = self._lacked.get(key, (0, 0.0))[0]
        has_quota = free_bytes is not None and free_bytes >= size_bytes
        wait_seconds = min(_QUOTA_SECONDS * 2 ** min(tries, _MOST_DOUBLINGS), _QUOTA_MOST_SECONDS)
        self._lacked[key] = (tries + 1, time.monotonic() + wait_seconds if has_quota else 0.0)

    def found(self, key: str) -> None:
        """Note that an upload found room."""
        self._lacked.pop(key, None)

    def freed(self) -> None:
        """Note that something was removed there: a quota may have room again."""
        self._lacked = {key: (tries, 0.0) for key, (tries, _) in list(self._lacked.items())}


# --- signs of life of an order ---------------------------------------------------------------------------
# A server that accepts and then hangs looks like a slow one. What tells them apart is kept here, for every
# kind of remote alike: when a byte last moved, an answer last came, or our own rate limit last made the
# transfer wait. One decorator is around the store, one around the rate limiter (docs/internals/stores.md).

_SUSTAINED_SECONDS = 5.0


class Motion:
    """Record when something last moved in one order; called from all its threads.

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
        """Return the seconds since the last motion."""
        return self._clock() - self._moved_at

    def moved(self) -> None:
        """Note that something moved."""
        self._moved_at = self._clock()

    def advanced(self, key: str, done_bytes: int) -> None:
        """Note that so many bytes of an object are done: motion only if never so many before."""
        if done_bytes > self._furthest.get(key, -1):
            self._furthest[key] = done_bytes
            self.moved()

    def read(self) -> None:
        """Note that some bytes of the source were asked for."""
        now = self._clock()
        if now - self._read_at > _SUSTAINED_SECONDS:
            self._reading_since = now
        self._read_at = now
        if now - self._reading_since > _SUSTAINED_SECONDS:
            self.moved()


class WatchedRateLimiter(RateLimiter):
    """The remote's pacer as one order uses it: waiting for our own limit is no standstill."""

    def __init__(self, inner: RateLimiter, motion: Motion) -> None:
        self._inner = inner
        self._motion = motion

    def chunk_bytes(self, limit_bytes: int) -> int:
        """Return the chunk size of the inner rate limiter."""
        return self._inner.chunk_bytes(limit_bytes)

    def take(self, count_bytes: int, check: Callable[[], None]) -> None:
        """Take bytes from the inner rate limiter; each wait after the first counts as a sign of life."""
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
        """Give bytes back to the inner rate limiter."""
        self._inner.give_back(count_bytes)

    def breathe(self, check: Callable[[], None]) -> None:
        """Let the inner rate limiter pause; it is called after bytes came back, which counts as a sign of
        life.
        """
        self._motion.moved()
        self._inner.breathe(check)


def watched(store: Store, heard: Callable[[], None]) -> Store:
    """Wrap a store so that `heard` is called whenever it answers, and for each entry of a listing."""
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
