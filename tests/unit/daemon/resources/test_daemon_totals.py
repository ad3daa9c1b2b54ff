"""What jobs share: places in line, and the bandwidth (never more than the total, nothing wasted)."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.config.schema import DaemonConfig
from ckptd.config.timetable import Timetable, parse_timetable
from ckptd.daemon.resources.limits import HostLimits, Slots, shares
from ckptd.storage.stores.rate_limit import RateLimiter

if TYPE_CHECKING:
    from ckptd.daemon.uploads.session import RemoteSession


class Line:
    """Slots, what runs, and who was woken."""

    def __init__(self, count: int) -> None:
        self.running: set[str] = set()
        self.woken: list[str] = []
        self.slots = Slots(lambda: count, lambda: len(self.running))

    def ask(self, who: str) -> bool:
        """Ask, and start when allowed."""
        may = self.slots.may_start(who, lambda: self.woken.append(who))
        if may:
            self.running.add(who)
        return may


def test_first_come_first_served() -> None:
    line = Line(2)
    assert [line.ask(who) for who in "abcd"] == [True, True, False, False]
    line.running.discard("a")
    assert not line.ask("d"), "c came first"
    line.slots.call()
    assert line.woken == ["c"]
    assert line.ask("c")
    line.running.discard("b")
    line.slots.call()
    assert line.woken == ["c", "d"]
    assert line.ask("d")


def test_who_does_not_ask_again_loses_its_place() -> None:
    line = Line(1)
    assert line.ask("a")
    assert not line.ask("b")
    assert not line.ask("c")
    line.slots.begin_turn(["b"])
    line.slots.end_turn(["b"])
    line.running.discard("a")
    assert line.ask("c")


def test_who_asks_again_keeps_it() -> None:
    line = Line(1)
    assert line.ask("a")
    assert not line.ask("b")
    line.slots.begin_turn(["b"])
    assert not line.ask("b")
    line.slots.end_turn(["b"])
    line.running.discard("a")
    assert not line.ask("c")
    assert line.ask("b")


def shared(total: int | None, limits: list[int | None]) -> list[int | None]:
    """`shares` of transfers that are only told apart."""
    sessions = [cast("RemoteSession", object()) for _ in limits]
    found = shares(total, dict(zip(sessions, limits, strict=True)))
    return [found[session] for session in sessions]


def test_bandwidth_is_shared_and_what_one_leaves_goes_to_others() -> None:
    assert shared(None, [None, 5]) == [None, 5]
    assert shared(90, [None, None, None]) == [30, 30, 30]
    assert shared(90, [None, 10, None]) == [40, 10, 40]
    assert shared(90, [100]) == [90]
    assert shared(90, []) == []


@given(st.integers(100, 10**10), st.lists(st.none() | st.integers(1, 10**10), min_size=1, max_size=20))
def test_never_more_than_the_total_and_nothing_left_over(total: int, limits: list[int | None]) -> None:
    rates = shared(total, limits)
    assert all(rate is not None and rate >= 1 for rate in rates)
    assert sum(rate or 0 for rate in rates) <= total
    wanted = sum(total if limit is None else limit for limit in limits)
    assert sum(rate or 0 for rate in rates) >= min(total, wanted) - len(limits)
    assert all(limit is None or (rate or 0) <= limit for rate, limit in zip(rates, limits, strict=True))


def test_who_ended_in_the_line_holds_nobody_up() -> None:
    """A job that is closed or fails never asks again, and nobody takes a turn for it."""
    line = Line(1)
    assert line.ask("a")
    assert not line.ask("b")
    assert not line.ask("c")
    line.slots.leave(["b"])
    line.running.discard("a")
    line.slots.call()
    assert line.woken == ["c"]
    assert line.ask("c")


class Link:
    """A transfer under way that remembers what it was told."""

    is_transferring = True

    def __init__(self, bandwidth: Timetable) -> None:
        self.bandwidth = bandwidth
        self.told: list[int | None] = []

    def limit(self, bytes_per_second: int | None) -> None:
        """Remember."""
        self.told.append(bytes_per_second)


def test_timetables_are_followed_on_the_fly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's and a remote's own, with nothing started anew; a clock that jumps is only another time."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    hour = 3600.0
    clock = [7 * hour]
    links = [Link(Timetable()), Link(parse_timetable("12:00,10B/s 13:00,off"))]
    daemon = DaemonConfig.model_validate(
        {"bandwidth": "08:00,90B/s 20:00,off", "convert_bandwidth": "12:00,7B/s 13:00,off"}
    )
    found_links = cast("list[RemoteSession]", links)
    limits = HostLimits(daemon, lambda: found_links, lambda: 0, remotes=list, unix=lambda: clock[0])
    found, converted = [], []
    for now in (7, 8, 12.5, 13, 20, 12.5 - 24 * 365):
        clock[0] = now * hour
        limits.share_and_wake()
        found.append([link.told[-1] for link in links])
        converted.append(limits.conversion_bytes_per_second())
    assert found == [[None, None], [45, 45], [80, 10], [45, 45], [None, None], [80, 10]]
    assert converted == [None, None, 7, None, None, 7]
    monkeypatch.undo()
    time.tzset()


def test_lanes_of_one_remote_share_its_part() -> None:
    """However many threads take from one pacer, together they stay below the rate and lose little of it."""
    rate, taken = 4_000_000, [0] * 8
    pacer = RateLimiter(rate)
    begun = time.monotonic()

    def lane(number: int) -> None:
        while (now := time.monotonic()) < begun + 1.5 or (not all(taken) and now < begun + 200):
            count = pacer.chunk_bytes(1 << 20)
            pacer.take(count, lambda: None)
            taken[number] += count

    threads = [threading.Thread(target=lane, args=(n,)) for n in range(len(taken))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    # the burst, and one chunk of debt
    assert sum(taken) <= rate * (took + 0.25) + (1 << 20)
    assert sum(taken) >= rate * 0.3 * took
    assert all(taken)
