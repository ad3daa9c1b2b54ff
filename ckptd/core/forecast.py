"""What the recent saves say of the next hours: when the next one comes, how large, when the disk is full.

A pure function, so that status can warn from the first day: a link slower than the trainer fills every disk,
and the only cures are a person's (docs/design.md P13, P17).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RECENT = 6
"""Saves that count: a run that changed its cadence is believed soon."""
LEAST = 3
"""Fewer saves say nothing of a cadence."""
OVERDUE_FACTOR = 3.0
OVERDUE_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One complete save: when its last shard was written (unix seconds), its bytes and its step."""

    at_seconds: float
    bytes: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The disk and what may leave it."""

    free_bytes: int
    link_bytes_per_second: float | None
    """Of the slowest required remote, as last measured; None: not known, or it is away."""
    is_rotated: bool
    """A retention key is set, so what is committed goes."""
    is_bounded: bool = False
    """What is not committed goes as well (`unuploaded`), so that no link is too slow for the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """None: the saves so far do not tell."""

    production_bytes_per_second: float | None = None
    save_every_seconds: float | None = None
    save_every_steps: int | None = None
    full_in_saves: int | None = None
    """Further saves that fit, at this pace of production and link; None: it does not fill up."""
    full_in_seconds: float | None = None
    overdue_seconds: float | None = None
    """How long after its usual time the next save still has not come."""
    save_steps_for_link: int | None = None
    """Steps between saves that the link could carry; None: it carries these."""


def forecast(saves: Sequence[Saved], room: Room, *, now_seconds: float) -> Forecast:
    """What to expect if the run goes on as it did.

    The disk fills at the speed of production, less that of the link where committed checkpoints are rotated.
    """
    recent = sorted(saves, key=lambda save: save.at_seconds)[-RECENT:]
    if len(recent) < 2 or recent[-1].at_seconds <= recent[0].at_seconds:
        return Forecast()
    seconds = recent[-1].at_seconds - recent[0].at_seconds
    production = sum(save.bytes for save in recent[1:]) / seconds
    every = median(later.at_seconds - earlier.at_seconds for earlier, later in pairwise(recent))
    steps = [later.step - earlier.step for earlier, later in pairwise(recent) if later.step > earlier.step]
    every_steps = round(median(steps)) if steps else None
    link = room.link_bytes_per_second if room.is_rotated else 0.0
    filling = 0.0 if room.is_bounded else production - (link or 0.0)
    full_seconds = room.free_bytes / filling if filling > 0 else None
    late = now_seconds - recent[-1].at_seconds - every
    is_late = len(recent) >= LEAST and late + every > max(OVERDUE_FACTOR * every, OVERDUE_SECONDS)
    is_slow = room.is_rotated and link is not None and 0 < link < production
    return Forecast(
        production_bytes_per_second=production,
        save_every_seconds=every,
        save_every_steps=every_steps,
        full_in_saves=None if full_seconds is None else int(full_seconds / (seconds / (len(recent) - 1))),
        full_in_seconds=full_seconds,
        overdue_seconds=late if is_late else None,
        save_steps_for_link=_rounded(every_steps * production / max(link, 1.0))
        if is_slow and link and every_steps is not None
        else None,
    )


def _rounded(steps: float) -> int:
    """Up to two digits, as people write intervals: 3,217 → 3,300."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(steps, 1))) - 1)
    return math.ceil(steps / unit) * unit
