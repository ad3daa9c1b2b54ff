"""Places for remotes' children: first come, first served, and who has nothing to do makes room (ADR 0113)."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.heartbeat import send_final
from ckptd.storage.child.slots import SlotPool

if TYPE_CHECKING:
    from ckptd.daemon.job import Job as DaemonJob


class Guest:
    """A child that is busy until it is told otherwise, and what happened to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_busy = True
        self.said: list[str] = []

    def make_room(self) -> bool:
        if not self.is_busy:
            self.said.append("ended")
        return not self.is_busy

    def begin(self) -> None:
        self.is_busy = True
        self.said.append("began")


def guests(names: str) -> list[Guest]:
    return [Guest(name) for name in names]


def test_each_lasts_where_there_is_room_for_all() -> None:
    places, some = SlotPool(), guests("abc")
    assert all(places.take(one) for one in some)
    for one in some:
        one.is_busy = False
    places.settle()
    assert not any(one.said for one in some)
    assert all(places.take(one) for one in some)


def test_who_has_nothing_to_do_makes_room_for_the_next_in_line() -> None:
    places = SlotPool(lambda: 2)
    a, b, c, d = guests("abcd")
    assert [places.take(one) for one in (a, b, c, d, c)] == [True, True, False, False, False]
    places.settle()
    assert (places.is_crowded, c.said) == (True, [])
    b.is_busy = False
    places.settle()
    assert (b.said, c.said, d.said) == (["ended"], ["began"], [])
    assert not places.take(b), "d came first"
    a.is_busy = c.is_busy = False
    places.settle()
    assert (d.said, b.said) == (["began"], ["ended", "began"])
    assert not places.is_crowded
    assert places.take(d)


def test_the_last_that_came_goes_first() -> None:
    """A visitor makes room again, and those who were there keep their children."""
    places = SlotPool(lambda: 3)
    *lasting, d, e = guests("abcde")
    for one in lasting:
        assert places.take(one)
        one.is_busy = False
    for one in (d, e, d, e):
        assert places.take(one), "somebody made room at once"
        one.is_busy = False
    assert [one.said for one in lasting] == [[], [], ["ended"]]


def test_who_leaves_is_not_waited_for() -> None:
    places = SlotPool(lambda: 1)
    a, b, c = guests("abc")
    assert [places.take(one) for one in (a, b, c)] == [True, False, False]
    places.leave(b)
    places.leave(a)
    assert (b.said, c.said) == ([], []), "nothing begins while jobs end"
    places.settle()
    assert (b.said, c.said) == ([], ["began"])


def test_fewer_places_end_nobody_in_the_middle() -> None:
    """A reload with a smaller budget: children that have nothing to do end, the others later."""
    count = [3]
    places, some = SlotPool(lambda: count[0]), guests("abc")
    assert all(places.take(one) for one in some)
    some[0].is_busy = False
    count[0] = 1
    places.settle()
    assert [one.said for one in some] == [["ended"], [], []]
    some[1].is_busy = some[2].is_busy = False
    places.settle()
    assert [one.said for one in some] == [["ended"], [], ["ended"]]


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_never_more_than_there_are_places_and_everybody_gets_one(
    count: int, steps: list[tuple[int, bool]]
) -> None:
    """Each step somebody asks, or comes to rest; in the end all that waited have begun."""
    some = guests("abcdef")
    places = SlotPool(lambda: count)
    has: set[str] = set()
    for number, asks in steps:
        one = some[number]
        if asks:
            one.is_busy = True
            places.take(one)
        else:
            one.is_busy = False
        places.settle()
        has = {guest.name for guest in places._here}  # type: ignore[attr-defined]
        assert len(has) <= count
    for _ in some:
        for one in some:
            one.is_busy = False
        places.settle()
    assert not places.is_crowded


def test_who_waits_for_a_place_hears_that_it_ended_too() -> None:
    results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    places = SlotPool(lambda: 1)

    class Link(Guest):
        heartbeat: int | None = None

        def begin(self) -> None:
            super().begin()
            results.put(self.heard)

        def heard(self) -> None:
            self.heartbeat, self.is_busy = None, False

    class Job:
        state = object()

        def __init__(self, names: str) -> None:
            self.sessions = {name: Link(name) for name in names}
            self.peers = self

        def send_last_heartbeats(self) -> None:
            for link in self.sessions.values():
                link.heartbeat = 1
                if places.take(link):
                    link.begin()

    def reload() -> None:
        raise AssertionError("which jobs there are changes under their last words")

    job = Job("abc")
    results.put(reload)
    send_final(cast("list[DaemonJob]", [job]), results, lambda call: call(), places.settle, reload)
    assert [link.said.count("began") for link in job.sessions.values()] == [1, 1, 1]
    assert results.get_nowait() == reload, "it comes after them"
