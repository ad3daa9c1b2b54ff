"""What paired segments say about interference: bootstrap intervals of relative differences.

A pair is two neighbouring segments of one training, one of them beside a working ckptd (A/B) or none (A/A).
Every quantity compares the two segments of a pair with each other before anything else, so that a machine
that is slower for a minute is slower for both; then pairs are put together. What is claimed is the upper end
of the 95 % interval over whole pairs; A/A pairs show what the machine alone does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 1_000
SEED = 20_261_121


@dataclass(frozen=True, slots=True)
class Segment:
    """Seconds of each step and of each save; of each step its CPU seconds, and what it waited for."""

    steps: tuple[float, ...]
    saves: tuple[float, ...]
    cpu: tuple[float, ...] = ()
    queued: tuple[float, ...] = ()
    """Seconds that threads were ready and had no core."""
    disk: tuple[float, ...] = ()
    """Seconds that threads waited for a disk."""
    taken: tuple[float, ...] = ()
    """Times that a thread lost its core."""
    stolen: float = 0.0
    """Share of the time of the trainer's cores that the host gave to others."""
    cached: float = 1.0
    """Share of the trainer's data file in the page cache at its end; all of it was there at its begin."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two segments next to each other in time; `other` is the one with ckptd in A/B pairs."""

    plain: Segment
    other: Segment


@dataclass(frozen=True, slots=True)
class Interval:
    """A relative difference in percent: as seen, and the bounds of its 95 % bootstrap interval."""

    seen: float
    low: float
    high: float


Statistic = Callable[[npt.NDArray[np.int64]], float]
"""Of the pairs with these numbers, in percent."""
Quantity = Callable[[Sequence[Pair]], Statistic]
"""How much longer the other segments take than the plain ones, for any draw of the pairs."""


def median_step(pairs: Sequence[Pair]) -> Statistic:
    """Of the ratios of the segments' median steps: the mean of their middle half."""
    return _middle([float(np.median(p.other.steps) / np.median(p.plain.steps)) for p in pairs])


def p99_step(pairs: Sequence[Pair]) -> Statistic:
    """Of all steps of either kind, each in units of its pair's usual step: the ratio of the 99th percentiles.

    Every step of every pair has its part: a hitch in one segment of a hundred is not averaged away.
    """
    usual = [float(np.median(p.plain.steps + p.other.steps)) for p in pairs]
    plain = [np.asarray(p.plain.steps) / unit for p, unit in zip(pairs, usual, strict=True)]
    other = [np.asarray(p.other.steps) / unit for p, unit in zip(pairs, usual, strict=True)]

    def p99(steps: list[npt.NDArray[np.float64]], draw: npt.NDArray[np.int64]) -> float:
        return float(np.quantile(np.concatenate([steps[i] for i in draw]), 0.99))

    return lambda draw: 100 * (p99(other, draw) / p99(plain, draw) - 1)


def mean_save(pairs: Sequence[Pair]) -> Statistic:
    """Of the ratios of the segments' mean saves: the mean of their middle half."""
    return _middle([float(np.mean(p.other.saves) / np.mean(p.plain.saves)) for p in pairs])


def left_cache(pairs: Sequence[Pair]) -> Statistic:
    """Take the mean of the pairs' differences in the share of the data file that left the page cache."""
    lost = np.asarray([100 * (p.plain.cached - p.other.cached) for p in pairs])
    return lambda draw: float(lost[draw].mean())


def median_cpu(pairs: Sequence[Pair]) -> Statistic:
    """As `median_step`, of the CPU time of steps: without waits for a core."""
    return _middle([float(np.median(p.other.cpu) / np.median(p.plain.cpu)) for p in pairs])


def slowest(pairs: Sequence[Pair], name: str, *, is_other: bool) -> tuple[float, float]:
    """Mean of a part of the account over all steps of one kind, and over the slowest of a hundred of them."""
    segments = [pair.other if is_other else pair.plain for pair in pairs]
    steps = np.concatenate([np.asarray(one.steps) / np.median(one.steps) for one in segments])
    values = np.concatenate([getattr(one, name) for one in segments])
    return float(values.mean()), float(values[steps >= np.quantile(steps, 0.99)].mean())


def _middle(ratios: list[float]) -> Statistic:
    """Interquartile mean of logarithms, in percent: no single disturbed pair moves it."""
    logs = np.log(ratios)
    cut = len(logs) // 4

    def of(draw: npt.NDArray[np.int64]) -> float:
        return 100 * float(np.expm1(np.sort(logs[draw])[cut : len(draw) - cut].mean()))

    return of


def difference(pairs: Sequence[Pair], quantity: Quantity) -> Interval:
    """Of a quantity, in percent; whole pairs are drawn, so a pair stays a pair.

    Raises:
        ValueError: no pairs.
    """
    if not pairs:
        raise ValueError("no pairs")
    of = quantity(pairs)
    draws = np.random.default_rng(SEED).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    low, high = np.quantile([of(draw) for draw in draws], (0.025, 0.975))
    return Interval(of(np.arange(len(pairs))), float(low), float(high))
