"""What paired segments say about interference: bootstrap intervals of relative differences.

A pair is two neighbouring segments of one training, one of them beside a working ckptd (A/B) or none (A/A).
What is claimed is the upper end of the 95 % interval; A/A pairs show what the machine alone does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1_000
SEED = 20_261_121


@dataclass(frozen=True, slots=True)
class Segment:
    """Seconds of each step and of each save."""

    steps: tuple[float, ...]
    saves: tuple[float, ...]


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


Quantity = Callable[[Sequence[Segment]], float]


def median_step(segments: Sequence[Segment]) -> float:
    """Median of all steps, seconds."""
    return float(np.median(np.concatenate([s.steps for s in segments])))


def p99_step(segments: Sequence[Segment]) -> float:
    """99th percentile of all steps, seconds."""
    return float(np.quantile(np.concatenate([s.steps for s in segments]), 0.99))


def mean_save(segments: Sequence[Segment]) -> float:
    """Mean of all saves, seconds."""
    return float(np.mean(np.concatenate([s.saves for s in segments])))


def difference(pairs: Sequence[Pair], quantity: Quantity) -> Interval:
    """Of a quantity, in percent of the plain segments'; whole pairs are drawn, so a pair stays a pair.

    Raises:
        ValueError: no pairs.
    """
    if not pairs:
        raise ValueError("no pairs")
    draws = np.random.default_rng(SEED).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    found = [_percent([pairs[i] for i in draw], quantity) for draw in draws]
    low, high = np.quantile(found, (0.025, 0.975))
    return Interval(_percent(pairs, quantity), float(low), float(high))


def _percent(pairs: Sequence[Pair], quantity: Quantity) -> float:
    plain = quantity([pair.plain for pair in pairs])
    return 100 * (quantity([pair.other for pair in pairs]) / plain - 1)
