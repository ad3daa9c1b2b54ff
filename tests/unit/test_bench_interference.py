"""The statistics behind what docs/performance.md claims about training beside ckptd."""

from __future__ import annotations

import random

import pytest

from bench.interference_report import Memory, render
from bench.interference_stats import Pair, Segment, difference, mean_save, median_step, p99_step


def pairs(slower: float, number: int = 20, *, every: int = 0, seed: int = 7) -> list[Pair]:
    """Steps of 100 ms with 1 % of noise; the other's are `slower` percent longer, each `every`-th by half."""
    noise = random.Random(seed)

    def segment(factor: float, *, is_other: bool) -> Segment:
        steps = [0.1 * factor * (1 + noise.uniform(-0.01, 0.01)) for _ in range(50)]
        if is_other and every:
            steps[::every] = [1.5 * step for step in steps[::every]]
        return Segment(tuple(steps), (factor, factor))

    return [
        Pair(plain=segment(1, is_other=False), other=segment(1 + slower / 100, is_other=True))
        for _ in range(number)
    ]


@pytest.mark.parametrize("slower", [0.0, 0.5, 3.0, -2.0])
def test_the_interval_holds_what_was_put_in(slower: float) -> None:
    found = [difference(pairs(slower, seed=seed), median_step) for seed in range(8)]
    assert sum(one.low <= slower <= one.high for one in found) >= 6, "nineteen of twenty, in the long run"
    assert all(one.high - one.low < 0.5 for one in found)
    assert all(one.low <= one.seen <= one.high for one in found)
    assert difference(pairs(slower), mean_save).seen == pytest.approx(slower)


def test_a_hitch_shows_in_the_tail_alone() -> None:
    hitching = pairs(0, every=25)
    assert difference(hitching, p99_step).seen > 40
    assert abs(difference(hitching, median_step).seen) < 0.3


def test_a_claim_is_the_upper_end_and_is_held_against_the_control() -> None:
    slow, quiet = pairs(3), pairs(0)
    rows = [
        line
        for line in render(slow, quiet, Memory(), [4.0], 1.0, 256 << 20, 2).splitlines()
        if "time" in line
    ]
    assert sum("NOT reached" in row for row in rows) == 3
    assert "NOT" not in render(slow, pairs(9), Memory(), [4.0], 1.0, 256 << 20, 2)
    known = Memory().joined(100 << 20, 5 << 20, 0).joined(90 << 20, 6 << 20, 1)
    assert "at most 100 MiB, dirty pages 6 MiB, killed for want of memory: 1" in render(
        slow, quiet, known, [4.0], 1.0, 256 << 20, 2
    )


def test_no_pairs_are_no_claim() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        difference([], median_step)
