"""When what failed is tried again: jitter that never ends in an overflow, and what is left alone in words."""

from __future__ import annotations

import time

import pytest

from ckptd.base.retry import PATIENCE, Breaker, RetryTimer, backoff_seconds, seldom_seconds


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_full_jitter_up_to_a_minute() -> None:
    for tries, most in ((1, 2), (2, 4), (5, 32), (6, 60), (40, 60)):
        drawn = [backoff_seconds(tries) for _ in range(400)]
        assert 0.5 <= min(drawn) < 0.5 + 0.1 * most
        assert 0.9 * most < max(drawn) <= most


@pytest.mark.parametrize("tries", [0, 1023, 1024, 5000, 10**6])
def test_a_day_of_failures_is_no_overflow(tries: int) -> None:
    """2.0 ** 1024 is one: an outage of some nine hours brought a defect instead of a pause."""
    assert 0.5 <= backoff_seconds(tries) <= 60
    assert 0.5 <= seldom_seconds(tries) <= 60


def test_after_some_failures_in_a_row_it_is_left_alone_at_growing_intervals() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock, unix=lambda: clock.now + 7 * 86400)
    for _ in range(PATIENCE - 1):
        breaker.failed("no answer")
        assert breaker.backed_off is None
    waits = []
    for _ in range(7):
        breaker.failed("still no answer")
        waits.append(breaker.seconds_left)
    for wait, most in zip(waits, (30, 60, 60, 60, 60, 60, 60), strict=True):
        assert 0.75 * most <= wait <= most
    alone = breaker.backed_off
    assert alone is not None
    until = time.strftime("%H:%M:%S", time.localtime(clock.now + 7 * 86400 + waits[-1]))
    assert str(alone) == f"left alone until {until} after {PATIENCE + 6} failures: still no answer"
    clock.now += 301
    assert not breaker.seconds_left, "the probe may go"
    assert str(breaker.backed_off) == str(alone), "until it has succeeded"
    assert [breaker.succeeded(), breaker.succeeded()] == [True, False]
    assert str(breaker.backed_off) == "None"


def test_one_success_begins_anew() -> None:
    breaker = Breaker(clock=Clock())
    for _ in range(20):
        for _ in range(PATIENCE - 1):
            breaker.failed("flaps")
        assert not breaker.succeeded()
    assert breaker.backed_off is None


def test_what_fails_is_asked_once_at_a_time_and_more_seldom() -> None:
    clock = Clock()
    asking = RetryTimer(clock=clock)
    assert asking.begin("s1")
    assert not asking.begin("s1"), "it is under way"
    waits = []
    for _ in range(8):
        asking.end("s1", is_done=False)
        waits.append(asking.seconds_left)
        assert not asking.begin("s1")
        assert asking.begin("s2"), "another is not concerned"
        asking.end("s2", is_done=True)
        clock.now += waits[-1]
        assert asking.seconds_left == 0
        assert asking.begin("s1")
    assert min(waits) >= 0.5
    assert 4 < max(waits) <= 60
    asking.end("s1", is_done=True)
    assert asking.begin("s1")
