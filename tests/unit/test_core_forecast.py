"""The forecast of disk and cadence against a simulated run (docs/design.md P13, P17)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.forecast import Forecast, Room, Saved, forecast

GB = 10**9


def run(
    count: int, *, every_seconds: float = 600.0, gigabytes: float = 60.0, steps: int = 500
) -> list[Saved]:
    return [
        Saved(at_seconds=n * every_seconds, bytes=int(gigabytes * GB), step=n * steps)
        for n in range(1, count + 1)
    ]


def filled_after(free: int, production: float, link: float, size: int) -> int:
    """A run that goes on: saves until one does not fit; what is sent goes at once."""
    count, pause = 0, size / production
    while count < 10_000:
        free = min(free + int(link * pause), 10**15)
        if free < size:
            return count
        free -= size
        count += 1
    return count


@given(st.floats(5, 500), st.floats(0, 0.95), st.integers(1, 60))
def test_full_in_saves_is_when_a_simulated_disk_is_full(gigabytes: float, share: float, fit: int) -> None:
    """Within a save, for links from none up to 95 % of production."""
    saves = run(6, gigabytes=gigabytes)
    size = saves[0].bytes
    production = size / 600.0
    free = fit * size
    told = forecast(
        saves,
        Room(free_bytes=free, link_bytes_per_second=production * share, is_rotated=True),
        now_seconds=saves[-1].at_seconds,
    )
    assert told.full_in_saves is not None
    simulated = filled_after(free, production, production * share, size)
    # the disk is not full but too small for the last save, and what is left of the link's work is fluid
    assert abs(told.full_in_saves - simulated) <= 1 + 1 / (1 - share)


def test_a_link_that_keeps_up_never_fills_the_disk() -> None:
    saves = run(6)
    told = forecast(
        saves, Room(free_bytes=60 * GB, link_bytes_per_second=GB, is_rotated=True), now_seconds=3600.0
    )
    assert told.full_in_saves is None
    assert told.save_steps_for_link is None
    assert told.production_bytes_per_second == pytest.approx(0.1 * GB)


@pytest.mark.parametrize("link", [None, 50 * 10**6])
def test_without_rotation_or_remote_production_alone_counts(link: float | None) -> None:
    """Nothing is deleted without a key; a remote that is away takes nothing."""
    saves = run(6)
    is_rotated = link is None
    told = forecast(
        saves,
        Room(free_bytes=150 * GB, link_bytes_per_second=link, is_rotated=is_rotated),
        now_seconds=3600.0,
    )
    assert told.full_in_saves == 2
    assert told.full_in_seconds == pytest.approx(1500.0)
    assert told.save_steps_for_link is None


def test_a_slow_link_gets_the_interval_that_it_could_carry() -> None:
    """Production 100 MB/s every 500 steps, link 30 MB/s: every 1,700 steps."""
    told = forecast(
        run(6), Room(free_bytes=600 * GB, link_bytes_per_second=30e6, is_rotated=True), now_seconds=3600.0
    )
    assert told.save_steps_for_link == 1700


@pytest.mark.parametrize(
    ("count", "quiet_seconds", "late"), [(6, 1700, None), (6, 1900, 1300.0), (2, 9000, None), (6, 0, None)]
)
def test_a_save_is_overdue_after_three_times_the_usual(
    count: int, quiet_seconds: float, late: float | None
) -> None:
    saves = run(count)
    room = Room(free_bytes=GB, link_bytes_per_second=None, is_rotated=False)
    told = forecast(saves, room, now_seconds=saves[-1].at_seconds + quiet_seconds)
    assert told.overdue_seconds == late


def test_quick_saves_are_not_overdue_before_ten_minutes() -> None:
    saves = run(6, every_seconds=2.0)
    room = Room(free_bytes=GB, link_bytes_per_second=None, is_rotated=False)
    assert forecast(saves, room, now_seconds=saves[-1].at_seconds + 590).overdue_seconds is None
    assert forecast(saves, room, now_seconds=saves[-1].at_seconds + 610).overdue_seconds is not None


def test_one_save_or_saves_of_one_instant_say_nothing() -> None:
    room = Room(free_bytes=GB, link_bytes_per_second=None, is_rotated=False)
    assert forecast(run(1), room, now_seconds=0.0) == Forecast()
    assert forecast(run(3, every_seconds=0.0), room, now_seconds=0.0) == Forecast()
