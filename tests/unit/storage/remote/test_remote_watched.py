"""Whether an order moves: repeated requests are no motion, our own limits no standstill (P11, P17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.storage.stores.rate_limit import RateLimiter
from ckptd.storage.stores.retrying import Motion, WatchedRateLimiter, watched
from tests.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Time that passes only by sleeping or working."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def scene(rate: int | None = None) -> tuple[Clock, Motion, WatchedRateLimiter, RateLimiter]:
    clock = Clock()
    motion = Motion(clock)
    inner = RateLimiter(rate, clock=clock, sleep=clock.sleep)
    return clock, motion, WatchedRateLimiter(inner, motion), inner


def nothing() -> None:
    """No check."""


def test_a_request_that_is_repeated_in_vain_is_no_motion() -> None:
    """A server that takes all and says nothing: the library reads the part again each minute."""
    clock, motion, pacer, _ = scene()
    motion.advanced("a", 5 << 20)
    for _ in range(3):
        clock.now += 60
        for done in range(0, 5 << 20, 1 << 20):
            pacer.take(1 << 20, nothing)
            motion.advanced("a", done + (1 << 20))
    assert motion.idle_seconds == 180


def test_reading_again_for_a_while_is_motion() -> None:
    """A slow link after a connection that broke, or a long file that is hashed again."""
    clock, motion, pacer, _ = scene()
    motion.advanced("a", 50 << 20)
    for _ in range(100):
        clock.now += 2
        pacer.take(1 << 20, nothing)
    assert motion.idle_seconds == 0


def test_our_own_limit_is_no_standstill() -> None:
    clock, motion, pacer, inner = scene(rate=1000)
    pacer.take(1 << 20, nothing)
    pacer.take(1 << 20, nothing)
    assert clock.now > 1000
    assert motion.idle_seconds < 1
    inner.set_fraction(0)
    clock.now += 5
    began = clock.now

    def check() -> None:
        if clock.now > began + 500:
            inner.set_fraction(1)
            inner.set_rate(None)

    pacer.take(1, check)
    assert motion.idle_seconds < 1, "a pause is none either"


def test_reading_back_is_motion_each_time() -> None:
    clock, motion, pacer, _ = scene()
    for _ in range(5):
        clock.now += 50
        pacer.breathe(nothing)
        assert motion.idle_seconds == 0


def test_each_answer_of_the_store_is_heard() -> None:
    heard: list[int] = []
    inner = MemoryStore()
    store = watched(inner, lambda: heard.append(1))
    assert store.put_if_absent("a/b", b"1")
    store.put("a/c", b"2")
    assert store.get("a/b") == b"1"
    assert len(heard) == 3
    assert [entry.key for entry in store.list("a/")] == ["a/b", "a/c"]
    assert len(heard) >= 5
    assert store.url == inner.url
    asks: Callable[[str], object] = store.get
    assert asks("nowhere") is None
