"""Run work in a few threads until it is done or one fails; read an object in ranges that way.

One stream of an object store is slow; the CRCs of ranges combine, so that no byte is read or held twice.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckptd.storage.stores.checksums import crc64, crc64_combined
from ckptd.storage.stores.rate_limit import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

RANGE_BYTES = 32 << 20

T = TypeVar("T")


class LaneStopped(Cancelled):
    """Another lane failed; what it raised is raised."""


class FailFastPool:
    """Threads that share a fate: the first failure ends all, at their next `check`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._working = 0

    def check(self) -> None:
        """Raise `LaneStopped` once another lane failed."""
        if self._failure is not None:
            msg = "another lane failed"
            raise LaneStopped(msg)

    def run(self, count: int, work: Iterable[T], do: Callable[[T], None], *, name: str) -> None:
        """Run `do` on each piece of work, begun in order, `count` at a time, or as many as the limits of
        processes allow (`ulimit -u`, pids.max); without threads where one is enough.

        Raises:
            BaseException: what the first lane that failed raised, or Ctrl-C; no lane runs any more then.
        """
        begin = self.begin(work, do)
        wanted = count if count > 1 else 0
        lanes = [threading.Thread(target=begin, name=f"{name}_{number}") for number in range(wanted)]
        started: list[threading.Thread] = []
        try:
            for lane in lanes:
                with contextlib.suppress(RuntimeError):  # no thread more is to be had
                    lane.start()
                    started.append(lane)
            for lane in started:
                lane.join()
        except BaseException as error:  # Ctrl-C: the caller would close what lanes still use
            with self._changed:
                self._failure = self._failure or error
                # not `join`: it takes a thread for ended once it was interrupted, and a thread whose `start`
                # was interrupted may run
                self._changed.wait_for(lambda: not self._working)
            raise
        if not started:
            begin()
        self.settle()

    def begin(self, work: Iterable[T], do: Callable[[T], None]) -> Callable[[], None]:
        """Return the function that a lane runs: it takes pieces of the shared work until none is left or one
        failed.
        """
        left = iter(work)

        def lane() -> None:
            try:
                while True:
                    with self._changed:
                        if self._failure is not None:
                            return
                        piece = next(left, None)
                        if piece is None:
                            return
                        self._working += 1
                    try:
                        do(piece)
                    finally:
                        with self._changed:
                            self._working -= 1
                            self._changed.notify_all()
            except BaseException as error:  # noqa: BLE001 (raised again by `settle`)
                with self._changed:
                    self._failure = self._failure or error

        return lane

    def settle(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure


class OrderedTurns:
    """A few places; of those who wait for one, who has the least number comes first."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[int] = []
        self._changed = threading.Condition()
        self._numbers = itertools.count()

    def following(self) -> Callable[[], AbstractContextManager[None]]:
        """Places for one more piece of work, whose parts come after those of all before it."""
        return partial(self.place, next(self._numbers))

    @property
    def waiting(self) -> int:
        """Return how many wait for one."""
        return len(self._waiting)

    @contextmanager
    def place(self, number: int) -> Iterator[None]:
        """One of them, held within; numbers may be equal."""
        with self._changed:
            heapq.heappush(self._waiting, number)
            self._changed.wait_for(lambda: self._free > 0 and self._waiting[0] == number)
            heapq.heappop(self._waiting)
            self._free -= 1
            # of two places that came free at once the second may be another's
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()


def crc_of(
    stream: Callable[[int, int], Iterator[bytes]],
    size_bytes: int,
    told: Callable[[int], None],
    *,
    at_once: int,
    range_bytes: int = RANGE_BYTES,
) -> tuple[int, int]:
    """Read `size_bytes` of an object: bytes up to the first that is missing, and their CRC64NVME.

    `stream(offset, length)` yields a range in chunks; `told(count)` is called for each, from several threads,
    and may raise to stop.
    """
    found: dict[int, tuple[int, int]] = {}
    lanes = FailFastPool()

    def read(offset: int) -> None:
        done = crc = 0
        for chunk in stream(offset, min(range_bytes, size_bytes - offset)):
            lanes.check()
            crc, done = crc64(chunk, crc), done + len(chunk)
            told(len(chunk))
        found[offset] = (done, crc)

    offsets = range(0, size_bytes, range_bytes)
    lanes.run(min(at_once, len(offsets)), offsets, read, name="range")
    return joined(size_bytes, [found[offset] for offset in offsets], range_bytes)


def joined(size_bytes: int, ranges: Iterable[tuple[int, int]], range_bytes: int) -> tuple[int, int]:
    """Return (bytes, CRC64) of ranges of `range_bytes` in order, up to the first that ended early."""
    total = crc = 0
    for done, more in ranges:
        crc = crc64_combined(crc, more, done)
        total += done
        if total < size_bytes and done < range_bytes:
            break
    return total, crc
