"""The forecast of disk and cadence against a simulated run (docs/design.md P13, P17)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.model.records import ZERO, DerivedRecord, DerivedState
from ckptd.core.model.save import Order
from ckptd.core.policy.capacity import DiskCheckpoint, DiskForecast, DiskUse, Saved, disk_use_of, forecast
from ckptd.core.policy.retention import RetentionPolicy
from tests.model.disk import CHUNKS, DiskWorld, Scenario, drawn, live
from tests.support.core_views import job_view, resized, save_view, sealed

GB = 10**9


def run(
    count: int, *, every_seconds: float = 600.0, gigabytes: float = 60.0, steps: int = 500
) -> list[Saved]:
    return [
        Saved(at_seconds=n * every_seconds, bytes=int(gigabytes * GB), step=n * steps)
        for n in range(1, count + 1)
    ]


def disk_use(
    free_gb: float,
    link: float | None,
    policy: RetentionPolicy,
    *,
    here: int = 0,
    waiting: int = 0,
    **more: Any,
) -> DiskUse:
    """A disk with the last `here` of six saves of 60 GB every 500 steps; the newest `waiting` not sent."""
    pieces = tuple(
        DiskCheckpoint(
            key=str(n),
            order=Order(1, 500 * n, n),
            bytes=60 * GB,
            is_committed=n <= 6 - waiting,
            committed_at_seconds=600.0 * n if n <= 6 - waiting else None,
        )
        for n in range(7 - here, 7)
    )
    free = int(free_gb * GB)
    return DiskUse(free_bytes=free, link_bytes_per_second=link, policy=policy, pieces=pieces, **more)


ONE = RetentionPolicy(save_total_limit=1)


def test_a_link_that_keeps_up_never_fills_the_disk() -> None:
    told = forecast(run(6), disk_use(130, GB, ONE, here=1), now_seconds=3600.0)
    assert told.full_in_saves is None
    assert told.save_steps_for_link is None
    assert told.production_bytes_per_second == pytest.approx(0.1 * GB)


@pytest.mark.parametrize("link", [None, 50 * 10**6])
def test_without_rotation_or_remote_production_alone_counts(link: float | None) -> None:
    """Nothing is deleted without a key; a remote that is away takes nothing. Slow is still slow."""
    saves = run(6)
    here = disk_use(150, link, ONE if link is None else RetentionPolicy(), here=1)
    told = forecast(saves, here, now_seconds=3600.0)
    assert told.full_in_saves == 2
    assert told.full_in_seconds == pytest.approx(1500.0)
    assert told.save_steps_for_link == (None if link is None else 1000)
    two = forecast(saves[:2], replace(here, policy=RetentionPolicy()), now_seconds=1200.0)
    assert two.save_steps_for_link is None


def filled_by_kept(fit: int, *, limit: int, here: int, every: int, period: int) -> int:
    """Saves until one does not fit on a disk for `fit` more; each multiple of `every` stays for ever."""
    steps = [period * n for n in range(7 - here, 7)]
    room, count = fit + here, 0
    while len(steps) < room:
        steps.append(steps[-1] + period)
        count += 1
        old = [step for step in steps[:-limit] if step % every]
        steps = [step for step in steps if step not in old]
    return count


@pytest.mark.parametrize("how", ["keep", "delete"])
@pytest.mark.parametrize(("every", "limit", "fit"), [(500, 3, 5), (1000, 3, 9), (2000, 6, 8), (5000, 2, 3)])
def test_what_keep_every_steps_keeps_fills_a_disk(how: Any, every: int, limit: int, fit: int) -> None:
    """However fast the link is."""
    policy = RetentionPolicy(save_total_limit=limit, keep_every_steps=every)
    here = disk_use(fit * 60, GB, policy, here=2, unuploaded=how)
    told = forecast(run(6), here, now_seconds=3600.0)
    assert told.kept_by == ("keep_every_steps",)
    assert not told.is_limit_too_high
    assert told.full_in_saves is not None
    simulated = filled_by_kept(fit, limit=limit, here=2, every=every, period=500)
    # the save that comes needs its room before one goes
    assert simulated - 1 <= told.full_in_saves <= simulated
    without = replace(here, policy=RetentionPolicy(save_total_limit=limit))
    assert forecast(run(6), without, now_seconds=3600.0).full_in_saves is None


def test_a_slow_link_carries_less_away_where_some_stay() -> None:
    """100 MB/s come, 50 MB/s are sent, and a third of that stays: 67 MB/s fill the disk."""
    policy = RetentionPolicy(save_total_limit=1, keep_every_steps=1500)
    told = forecast(run(6), disk_use(600, 50e6, policy, here=1), now_seconds=3600.0)
    assert told.full_in_saves is not None
    assert abs(told.full_in_saves - 600 / 60 * 3 / 2) <= 1
    assert not told.kept_by


@pytest.mark.parametrize(("last", "every"), [(3000, 700), (3001, 1000)])
def test_steps_that_meet_no_multiple_are_not_kept(last: int, every: int) -> None:
    """Of saves every 500 steps from 1 on none is a multiple of 1000; every seventh is one of 700."""
    saves = [replace(save, step=save.step - 3000 + last) for save in run(6)]
    policy = RetentionPolicy(save_total_limit=1, keep_every_steps=every)
    full = forecast(saves, disk_use(600, GB, policy), now_seconds=3600.0).full_in_saves
    assert full == (pytest.approx(60, abs=7) if every == 700 else None)


def test_a_slow_link_gets_the_interval_that_it_could_carry() -> None:
    """Production 100 MB/s every 500 steps, link 30 MB/s: every 1,700 steps."""
    told = forecast(run(6), disk_use(600, 30e6, ONE, here=1), now_seconds=3600.0)
    assert told.save_steps_for_link == 1700


@pytest.mark.parametrize(
    ("count", "quiet_seconds", "late"), [(6, 1700, None), (6, 1900, 1300.0), (2, 9000, None), (6, 0, None)]
)
def test_a_save_is_overdue_after_three_times_the_usual(
    count: int, quiet_seconds: float, late: float | None
) -> None:
    saves = run(count)
    room = DiskUse(free_bytes=GB)
    told = forecast(saves, room, now_seconds=saves[-1].at_seconds + quiet_seconds)
    assert told.overdue_seconds == late


def test_saves_that_were_copied_in_one_second_make_none_overdue() -> None:
    """It said "no save for 3h, usually every 0s"."""
    told = forecast(run(4, every_seconds=0.2), DiskUse(free_bytes=GB), now_seconds=10_000.0)
    assert told.overdue_seconds is None


def test_quick_saves_are_not_overdue_before_ten_minutes() -> None:
    saves = run(6, every_seconds=2.0)
    room = DiskUse(free_bytes=GB)
    assert forecast(saves, room, now_seconds=saves[-1].at_seconds + 590).overdue_seconds is None
    assert forecast(saves, room, now_seconds=saves[-1].at_seconds + 610).overdue_seconds is not None


def test_one_save_or_saves_of_one_instant_say_nothing() -> None:
    room = DiskUse(free_bytes=GB)
    assert forecast(run(1), room, now_seconds=0.0) == DiskForecast()
    assert forecast(run(3, every_seconds=0.0), room, now_seconds=0.0) == DiskForecast()


@pytest.mark.parametrize("every_seconds", [600.0, 60.0])
def test_a_rest_is_not_saving_time(every_seconds: float) -> None:
    """One night among six saves: production, cadence and the disk are as they were before it."""
    saves = run(12, every_seconds=every_seconds, gigabytes=100.0)
    link = 0.3 * 100 * GB / every_seconds
    room = disk_use(300, link, ONE)
    for before in range(3, 12):
        rested = [
            replace(save, at_seconds=save.at_seconds + 36_000 * (n >= before))
            for n, save in enumerate(saves[: max(before + 1, 5)])
        ]
        last = rested[-1].at_seconds
        told = forecast(rested, room, now_seconds=last)
        assert told.production_bytes_per_second == pytest.approx(100 * GB / every_seconds)
        assert told.save_every_seconds == every_seconds
        assert told.full_in_saves == 3
        assert told.save_steps_for_link == 1700
        late = forecast(rested, room, now_seconds=last + max(3 * every_seconds, 600.0) + 1)
        assert late.overdue_seconds is not None


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_what_was_copied_here_together_tells_no_cadence(seconds: float) -> None:
    """Five from elsewhere, then the run's own first one an hour later."""
    saves = [*run(5, every_seconds=seconds), Saved(at_seconds=3600.0, bytes=60 * GB, step=3000)]
    room = disk_use(600, 0.2 * GB, ONE)
    told = forecast(saves, room, now_seconds=3600.0)
    assert told.production_bytes_per_second == pytest.approx(300 * GB / 3600.0, rel=0.01)
    assert told.full_in_saves is None


def test_saves_in_pairs_are_no_rests() -> None:
    """A best one beside each regular one: half of the gaps are long, and all of them count."""
    saves = [
        Saved(at_seconds=at, bytes=60 * GB, step=int(at)) for n in range(3) for at in (n * 1200, n * 1200 + 2)
    ]
    room = DiskUse(free_bytes=GB)
    for some in (saves, saves[:5], saves[:4], saves[1:], saves[:3]):
        told = forecast(some, room, now_seconds=3000.0)
        span = some[-1].at_seconds - some[0].at_seconds
        assert told.production_bytes_per_second == pytest.approx(60 * GB * (len(some) - 1) / span)


def thin_room(world: DiskWorld, scenario: Scenario) -> DiskUse:
    """What a daemon would know of this disk."""
    view = world.view()
    left = int(world.left_to_send or scenario.sizes[0])
    remotes = tuple(
        replace(r, uploading=ZERO, uploading_save_id=world.remotes["nas"].shipping) for r in view.remotes
    )
    left_bytes = left if remotes[0].uploading_save_id is not None else None
    return disk_use_of(replace(view, remotes=remotes), scenario.link, left_bytes, written_bytes=world.written)


def foretold(scenario: Scenario) -> tuple[bool, list[int | None]]:
    """Whether the disk filled, and what was said after each save."""
    saves: list[Saved] = []
    told: list[int | None] = []

    def watch(world: DiskWorld, tick: int) -> None:
        saves.append(Saved(at_seconds=tick, bytes=96, step=len(saves), written_seconds=CHUNKS))
        told.append(forecast(saves, thin_room(world, scenario), now_seconds=tick).full_in_saves)

    return live(scenario, watch).is_full, told


def plain(limit: int, how: Any, share: float, pause: int = 6) -> Scenario:
    """Saves of one size; the link takes `share` of what is saved."""
    return replace(
        drawn(0),
        sizes=(96,) * 26,
        pause=pause,
        link=96 / (pause + CHUNKS) * share,
        away=range(0),
        limit=limit,
        min_free=16,
        trainer_limit=None,
        pinned=frozenset(),
        unuploaded=how,
        makes_universal=False,
        can_clone=False,
    )


@pytest.mark.parametrize(("limit", "saves_during_upload"), [(1, 2.5), (2, 3.5)])
def test_thin_fills_a_disk_as_foretold(limit: int, saves_during_upload: float) -> None:
    """The real planner over disks of every size: one that fills is foretold in time, no other alarms.

    What comes during one upload leaves at the end of the next: room for twice that and the limit is enough.
    """
    scenario = plain(limit, "thin", 1 / saves_during_upload)
    endings = set()
    for fit in range(limit + 3, limit + int(2 * saves_during_upload) + 2):
        is_full, told = foretold(replace(scenario, capacity=fit * 96 + 8))
        endings.add(is_full)
        if is_full:
            assert all(full is not None and full <= n for n, full in enumerate(told[:-4:-1])), (fit, told)
        else:
            assert not any(full is not None and full <= 3 for full in told[1:]), (fit, told)
    assert endings == {True, False}


def test_forms_that_can_be_made_again_are_room() -> None:
    """Under disk pressure they go before a save lacks room; a clone frees nothing."""
    for is_cloned, yields in ((False, 50 * GB), (True, 0)):
        form = DerivedRecord(state=DerivedState.READY, is_cloned=is_cloned, bytes=50 * GB)
        here = [save_view(n, resized(sealed(500 * n), 60 * GB), universal=form) for n in (1,)]
        view = job_view(here)
        assert disk_use_of(view, None, None).free_bytes == view.disk.free_bytes + yields
    room = disk_use(70, GB, RetentionPolicy(save_total_limit=3), here=3)
    assert forecast(run(6), room, now_seconds=3600.0).full_in_saves is None
    short = replace(room, free_bytes=20 * GB)
    assert forecast(run(6), short, now_seconds=3600.0).is_limit_too_high


def test_one_name_for_all_saves_fills_no_disk() -> None:
    """Each is written over the one before."""
    saves = [replace(save, tag="last") for save in run(6)]
    room = disk_use(1, GB, RetentionPolicy(save_total_limit=3), here=1)
    assert forecast(saves, room, now_seconds=3600.0).full_in_saves is None
    named = [replace(save, tag=f"step{save.step}") for save in saves]
    assert forecast(named, room, now_seconds=3600.0).full_in_saves == 0


def told_at_each_tick(scenario: Scenario) -> tuple[bool, list[tuple[int, DiskForecast]]]:
    """Whether the disk filled, and what was said when there were so many saves."""
    saves: list[Saved] = []
    told: list[tuple[int, DiskForecast]] = []

    def watch(_: DiskWorld, tick: int) -> None:
        saves.append(Saved(at_seconds=tick, bytes=96, step=len(saves), written_seconds=CHUNKS))

    def at_tick(world: DiskWorld, tick: int) -> None:
        told.append((len(saves), forecast(saves, thin_room(world, scenario), now_seconds=tick)))

    return live(scenario, watch, at_tick).is_full, told


@pytest.mark.parametrize(
    ("how", "share", "pause"),
    [
        ("keep", 10, 6),
        ("keep", 1.6, 20),
        ("keep", 1.1, 20),
        ("thin", 3, 6),
        ("thin", 1.4, 6),
        ("delete", 1.5, 6),
        ("delete", 0.7, 6),
        ("delete", 0.15, 6),
    ],
)
@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_fills_a_disk_as_foretold(how: Any, share: float, pause: int, limit: int) -> None:
    """The real planner over disks around the line: the old checkpoint goes only after the new one is there.

    Said in each tick from two saves before the disk is full, with the limit for a cause; else never.
    """
    scenario = replace(plain(limit, how, share, pause), sizes=(96,) * 12)
    endings = set()
    for fit in (n / 2 for n in range(2 * limit, 2 * limit + 7)):
        is_full, told = told_at_each_tick(replace(scenario, capacity=int(fit * 96) + 4))
        endings.add(is_full)
        last = told[-1][0]
        said = [(count, one) for count, one in told if one.full_in_saves is not None]
        if is_full:
            late = [one for count, one in told if count >= max(2, last - 1)]
            assert all(one.is_limit_too_high for one in late), (fit, told)
            assert all((one.full_in_saves or 0) <= last - n for n, one in said), (fit, told)
        else:
            assert said == [], (fit, said)
    assert endings == {True, False}
