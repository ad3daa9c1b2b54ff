"""The statistics behind what docs/performance.md claims about training beside ckptd."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.interference_report import Memory, Work, render
from bench.interference_stats import (
    Pair,
    Segment,
    difference,
    left_cache,
    mean_save,
    median_step,
    p99_step,
)


def pairs(
    slower: float, number: int = 40, *, every: int = 0, seed: int = 7, drift: float = 0.0, wild: int = 0
) -> list[Pair]:
    """Steps of 100 ms with 1 % of noise; the other's are `slower` percent longer, each `every`-th by half.

    With `drift` the whole machine is slower by up to that factor, for whole pairs; with `wild` each `wild`-th
    pair's other segment takes twice as long.
    """
    noise = random.Random(seed)

    def segment(factor: float, *, is_other: bool) -> Segment:
        steps = [0.1 * factor * (1 + noise.uniform(-0.01, 0.01)) for _ in range(50)]
        if is_other and every:
            steps[::every] = [1.5 * step for step in steps[::every]]
        return Segment(tuple(steps), (factor, factor))

    def pair(number: int) -> Pair:
        machine = 1 + noise.uniform(0, drift)
        other = machine * (1 + slower / 100) * (2 if wild and number % wild == 0 else 1)
        return Pair(plain=segment(machine, is_other=False), other=segment(other, is_other=True))

    return [pair(number) for number in range(number)]


@pytest.mark.parametrize("slower", [0.0, 0.5, 3.0, -2.0])
def test_the_interval_holds_what_was_put_in(slower: float) -> None:
    found = [difference(pairs(slower, seed=seed), median_step) for seed in range(8)]
    assert sum(one.low <= slower <= one.high for one in found) >= 6, "nineteen of twenty, in the long run"
    assert all(one.high - one.low < 0.5 for one in found)
    assert all(one.low <= one.seen <= one.high for one in found)
    assert difference(pairs(slower), mean_save).seen == pytest.approx(slower)


def test_a_machine_that_drifts_is_not_taken_for_ckptd() -> None:
    drifting = pairs(0.5, drift=1.0)
    assert difference(drifting, mean_save).seen == pytest.approx(0.5)
    for quantity in (median_step, p99_step):
        found = difference(drifting, quantity)
        assert abs(found.seen - (0.5 if quantity is median_step else 0)) < 0.8
        assert found.high - found.low < 1


def test_a_few_wild_pairs_do_not_move_the_middle_but_the_tail() -> None:
    disturbed = pairs(0, wild=20)
    assert abs(difference(disturbed, median_step).seen) < 0.3
    assert abs(difference(disturbed, mean_save).seen) < 0.3
    assert difference(disturbed, p99_step).seen > 20


def test_a_hitch_shows_in_the_tail_alone() -> None:
    hitching = pairs(0, every=25)
    assert difference(hitching, p99_step).seen > 40
    assert abs(difference(hitching, median_step).seen) < 0.3


def test_a_claim_is_the_upper_end_and_is_held_against_the_control() -> None:
    slow, quiet = pairs(3, 8), pairs(0, 8)
    work = [Work(4.0, 6.0, 2_000_000_000, 400_000_000), Work(8.0, 8.0, 2_000_000_000, 0)]
    told = render(slow, quiet, Memory(), work, 6_000_000_000, 256 << 20, 2)
    assert sum("NOT reached" in row for row in told.splitlines() if "time" in row) == 3
    assert "375 (least 250) MB sent, 50 (least 0) MB converted, 1.25 (least 1.00) s of CPU" in told
    assert "6.0 GB waited beside each segment; at most 2.0 GB were sent in one" in told
    assert "NOT" not in render(slow, pairs(9, 8), Memory(), work, 6_000_000_000, 256 << 20, 2)
    known = Memory().joined(100 << 20, 5 << 20, 0).joined(90 << 20, 6 << 20, 1)
    assert "at most 100 MiB, dirty pages 6 MiB, killed for want of memory: 1" in render(
        slow, quiet, known, work, 6_000_000_000, 256 << 20, 2
    )


def test_pages_that_left_are_a_share_of_the_file() -> None:
    """The kernel took 2 % of the trainer's file without ckptd, and 12 % beside it."""
    lost = [
        replace(p, plain=replace(p.plain, cached=0.98), other=replace(p.other, cached=0.88)) for p in pairs(0)
    ]
    assert difference(lost, left_cache).seen == pytest.approx(10)
    told = render(lost, pairs(0), Memory(), [], 1, 1, 2)
    assert (
        "data pages lost from cache | +10.0 % (+10.0 – +10.0) | +0.0 % (+0.0 – +0.0) | at most +10.0 %"
        in told
    )


def test_where_the_time_of_the_slowest_steps_lies() -> None:
    """Each 25th step beside ckptd takes half as long again, for want of a core."""

    def accounted(one: Segment, *, is_other: bool) -> Segment:
        waits = [0.05 if is_other and number % 25 == 0 else 0.001 for number in range(50)]
        return replace(one, cpu=(0.09,) * 50, queued=tuple(waits), disk=(0.0,) * 50, taken=(3.0,) * 50)

    hitching = [
        replace(p, plain=accounted(p.plain, is_other=False), other=accounted(p.other, is_other=True))
        for p in pairs(0, 8, every=25)
    ]
    told = render(hitching, hitching, Memory(), [], 1, 1, 2)
    assert "| ready, without a core, ms | 1.0 | 1.0 | 3.0 | 50.0 |" in told
    assert "| times that a core was taken away | 3.0 | 3.0 | 3.0 | 3.0 |" in told
    assert "without a core" not in render(pairs(0, 8), pairs(0, 8), Memory(), [], 1, 1, 2)


def test_no_pairs_are_no_claim() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        difference([], median_step)
