"""Bandwidth by the clock: what is understood, what is refused with which words, what holds when."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.config.timetable import Timetable, constant, parse_timetable

GB = 10**9
OFFICE = "08:00,1GB/s 20:00,none"


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    """Unix seconds of a local time."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


def test_each_entry_holds_until_the_next_one_and_over_midnight() -> None:
    table = parse_timetable(OFFICE)
    expected = {"07:59:59": None, "08:00": GB, "19:59:59": GB, "20:00": None, "00:00": None, "23:59": None}
    for clock, speed in expected.items():
        assert table.at(at(f"2026-03-04T{clock}")) == speed, clock


def test_days_of_the_week_win_over_every_day() -> None:
    table = parse_timetable("08:00,8Gb/s 20:00,off Sat-08:00,off saturday-12:00,2GB/s Sun-00:00,4MB/s")
    assert table.at(at("2026-03-06T12:00")) == GB, "a Friday"
    assert table.at(at("2026-03-07T10:00")) is None
    assert table.at(at("2026-03-07T13:00")) == 2 * GB
    assert table.at(at("2026-03-08T07:00")) == 4 * 10**6
    assert table.at(at("2026-03-08T09:00")) == GB, "every day's entry, Sunday as well"


def test_one_weekly_entry_holds_all_week() -> None:
    table = parse_timetable("Wed-10:00,1MB/s")
    assert {table.at(at(f"2026-03-0{day}T09:00")) for day in range(2, 9)} == {10**6}


def test_the_list_is_the_same_and_a_plain_speed_is_a_table_too() -> None:
    assert parse_timetable(["08:00,1GB/s", "20:00,none"]) == parse_timetable(OFFICE)
    assert parse_timetable("1GB/s") == constant(GB)
    assert parse_timetable("off") == parse_timetable("none") == parse_timetable(None) == Timetable()
    assert parse_timetable(constant(5)).at(0) == 5


def test_it_is_echoed_in_both_units_with_what_holds_now() -> None:
    shown = parse_timetable(OFFICE).shown(at("2026-03-04T12:00"))
    assert shown == "08:00 1 GB/s = 8 Gb/s, 20:00 none (local time; now 1 GB/s = 8 Gb/s)"
    assert constant(None).shown(0) == "none"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("08:00 1GB/s", "'08:00' is no entry"),
        ("08:00-20:00,1GB/s", "no entry of a timetable"),
        ("25:00,1GB/s", "there is no 25:00"),
        ("08:60,1GB/s", "there is no 08:60"),
        ("Foo-08:00,1GB/s", "'Foo' is no day; write Mon, Tue"),
        ("M-08:00,1GB/s", "'M' is no day"),
        ("08:00,1G", "'1G' is no bandwidth; write it as \"1GB/s\" (bytes)"),
        ("08:00,0B/s", "moves nothing"),
        ("08:00,1GB/s 8:00,2GB/s", "two entries of the timetable begin at 8:00"),
        ("08:00,1GB/s:1MB/s", "is no bandwidth"),
        ([], "or a timetable"),
        ([5], "or a timetable"),
        (5, "or a timetable"),
    ],
)
def test_what_is_wrong_is_quoted(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_timetable(value)


def test_summer_time_and_jumps_of_the_clock_change_nothing_but_the_hour() -> None:
    """02:30 does not exist in one night and comes twice in another; the clock goes back a year."""
    table = parse_timetable("02:30,1MB/s 03:30,2MB/s 04:00,none")
    spring = at("2026-03-29T01:59:59")
    assert table.at(spring) is None
    assert table.at(spring + 1) == 10**6, "03:00, since 02:30 was leapt over"
    assert table.at(spring + 1 + 1800) == 2 * 10**6
    autumn = at("2026-10-25T02:45")
    assert [table.at(autumn + hours * 3600) for hours in (0, 1)] == [10**6, 10**6], "the hour comes twice"
    assert table.at(autumn + 2 * 3600) == 2 * 10**6
    assert table.at(at("2025-06-01T03:45")) == 2 * 10**6, "back by months"


ENTRIES = st.lists(
    st.tuples(st.integers(0, 23), st.integers(0, 59), st.none() | st.integers(1, 10**6)),
    min_size=1,
    max_size=8,
    unique_by=lambda entry: entry[:2],
)


@given(ENTRIES, st.integers(-(2**33), 2**33))
def test_at_any_time_it_is_the_last_entry_that_began(
    entries: list[tuple[int, int, int | None]], now: int
) -> None:
    text = " ".join(f"{h:02}:{m:02},{'off' if s is None else f'{s}kB/s'}" for h, m, s in entries)
    local = time.localtime(now)
    begun = [entry for entry in sorted(entries) if entry[:2] <= (local.tm_hour, local.tm_min)]
    speed = (begun or sorted(entries))[-1][2]
    assert parse_timetable(text).at(now) == (None if speed is None else speed * 1000)


@given(st.text(max_size=20))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        parse_timetable(text)
    except ValueError as error:
        assert str(error)
