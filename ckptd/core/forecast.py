"""What the recent saves say of the next hours: when the next one comes, how large, when the disk is full.

A pure function, so that status can warn from the first day: what fills a disk is known before it is full, and
the cures are a person's (docs/design.md P13, P17). The coming saves are played (core/playing.py); what fills
the disk is found by playing again without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ckptd.core.pieces import Ground, Pace
from ckptd.core.playing import play
from ckptd.core.retention import RetentionPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

RECENT = 6
"""Saves that count: a run that changed its cadence is believed soon."""
LEAST = 3
"""Fewer saves say nothing of a cadence."""
OVERDUE_FACTOR = 3.0
OVERDUE_SECONDS = 600.0
"""A gap beyond both is a rest: it says nothing of the cadence, and is overdue while it lasts."""
CADENCE_SECONDS = 60.0
"""Saves that are closer come in pairs, or were copied here together: they tell of no rest."""
_GRAINS = 64
"""Parts of the usual interval: within one the picture counts as unchanged."""
_KEYS = (
    "keep_every_steps",
    "keep_every_seconds",
    "keep_within_seconds",
    "keep_best",
    "keep_steps",
    "ephemeral",
    "ladder",
)
"""What keeps checkpoints beside save_total_limit, in the order in which it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One complete save: when its last shard was written (unix seconds), its bytes and its step."""

    at_seconds: float
    bytes: int
    step: int
    tag: str = ""
    written_seconds: float = 0.0
    """From its first file until it could be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """None: the saves so far do not tell."""

    production_bytes_per_second: float | None = None
    save_every_seconds: float | None = None
    save_every_steps: int | None = None
    full_in_saves: int | None = None
    """Further saves that fit, if all goes on as it did; None: it does not fill as far as is played."""
    full_in_seconds: float | None = None
    overdue_seconds: float | None = None
    """How long after its usual time the next save still has not come."""
    save_steps_for_link: int | None = None
    """Steps between saves that the link could carry; None: it carries these."""
    is_spared_by_thin: bool = False
    """With `unuploaded = "thin"` the disk would not fill."""
    is_limit_too_high: bool = False
    """It fills with what save_total_limit keeps, however fast the link is."""
    lacks_files: bool = False
    """There are bytes, and no inodes for the next save."""
    kept_by: tuple[str, ...] = ()
    """The same with what these keys of the policy keep."""


def forecast(saves: Sequence[Saved], ground: Ground, *, now_seconds: float) -> Forecast:
    """What to expect if the run goes on as it did."""
    recent = _recent(saves)
    if recent is None:
        return Forecast()
    gaps = _gaps(recent)
    production = sum(save.bytes for save in recent[1:]) / sum(gaps)
    every = median(gaps)
    steps = _steps(recent)
    pace = _pace(recent, gaps, now_seconds)
    played = play(ground, pace) if pace is not None else None
    is_full = played is not None and played.is_full
    speed = ground.link_bytes_per_second or 0.0
    late = now_seconds - recent[-1].at_seconds - every
    is_late = len(recent) >= LEAST and late + every > max(OVERDUE_FACTOR * every, OVERDUE_SECONDS)
    # where nothing of ours is rotated it presses nobody: two saves, perhaps close to each other, are too few
    is_slow = 0 < speed < production and (ground.policy.deletes or len(recent) >= LEAST)
    told = Forecast(
        production_bytes_per_second=production,
        save_every_seconds=every,
        save_every_steps=steps,
        full_in_saves=played.fit if played is not None and is_full else None,
        full_in_seconds=played.full_at_seconds if played is not None else None,
        overdue_seconds=late if is_late else None,
        save_steps_for_link=_rounded(steps * production / max(speed, 1.0))
        if is_slow and steps is not None
        else None,
    )
    if pace is None or not ground.deletes or not (is_full or is_slow):
        return told
    return _explained(told, ground, pace, is_bounded=ground.unuploaded == "delete" or speed >= production)


def pace_of(saves: Sequence[Saved], now_seconds: float) -> Pace | None:
    """How the run goes on; None: the saves so far do not tell, each is written over the one before, or it
    rests or has ended: then it takes nothing of a disk."""
    recent = _recent(saves)
    if recent is None:
        return None
    gaps = _gaps(recent)
    if now_seconds - recent[-1].at_seconds > max(OVERDUE_FACTOR * median(gaps), OVERDUE_SECONDS):
        return None
    return _pace(recent, gaps, now_seconds)


def _recent(saves: Sequence[Saved]) -> list[Saved] | None:
    recent = sorted(saves, key=lambda save: save.at_seconds)[-RECENT:]
    return None if len(recent) < 2 or recent[-1].at_seconds <= recent[0].at_seconds else recent


def _steps(recent: Sequence[Saved]) -> int | None:
    steps = [later.step - earlier.step for earlier, later in pairwise(recent) if later.step > earlier.step]
    return round(median(steps)) if steps else None


def _pace(recent: Sequence[Saved], gaps: Sequence[float], now_seconds: float) -> Pace | None:
    if len({save.tag or save.step for save in recent}) == 1:
        return None
    sizes = [save.bytes for save in recent]
    is_growing = sizes == sorted(sizes)
    every = sum(gaps) / len(gaps)
    last = recent[-1].at_seconds
    since = round((now_seconds - last) / every * _GRAINS) / _GRAINS * every
    since = min(max(since, 0.0), every)
    return Pace(
        sizes_bytes=(sizes[-1],) if is_growing else tuple(sizes),
        every_seconds=every,
        flight_seconds=median(save.written_seconds for save in recent),
        last_step=recent[-1].step,
        steps=_steps(recent) or 1,
        since_last_seconds=since,
        now_unix_seconds=last + since,
    )


def _explained(told: Forecast, ground: Ground, pace: Pace, *, is_bounded: bool) -> Forecast:
    """What would spare this disk: `thin`, a lower limit, or other keys."""
    if ground.unuploaded != "delete" and not is_bounded:
        thin = play(replace(ground, unuploaded="thin"), pace)
        told = replace(told, is_spared_by_thin=ground.policy.limits and not thin.is_full)
        ground = replace(ground, link_bytes_per_second=math.inf)
    fast = play(ground, pace)
    if told.full_in_saves is None or not fast.is_full or 2 * fast.fit > 3 * told.full_in_saves + 2:
        return told  # a faster link would help for long
    limit = ground.policy.save_total_limit
    if limit is not None and _fills(ground, pace, RetentionPolicy(save_total_limit=limit)):
        return replace(told, is_limit_too_high=True)
    keys = [key for key in _KEYS if getattr(ground.policy, key)]
    spare = [key for key in keys if not _fills(ground, pace, _without(ground.policy, key))]
    return replace(told, kept_by=tuple(spare or keys))


def _fills(ground: Ground, pace: Pace, policy: RetentionPolicy) -> bool:
    return play(replace(ground, policy=policy), pace).is_full


def _without(policy: RetentionPolicy, key: str) -> RetentionPolicy:
    """A policy that has only this key lets go all but the newest without it."""
    nothing = () if key in ("keep_steps", "ladder") else None
    return policy.model_copy(update={key: nothing, "save_total_limit": policy.save_total_limit or 1})


def _gaps(recent: Sequence[Saved]) -> list[float]:
    """Seconds from save to save; a rest counts as the longest of the other gaps.

    One night would make the production of six saves a tenth of what it is. By the longest and not the median:
    of saves that come in pairs every other gap is long. Of two gaps neither is borne out.
    """
    gaps = [later.at_seconds - earlier.at_seconds for earlier, later in pairwise(recent)]
    *others, longest = sorted(gaps)
    is_cadence = len(others) >= 2 and others[-1] >= CADENCE_SECONDS
    is_rest = is_cadence and longest > max(OVERDUE_FACTOR * others[-1], OVERDUE_SECONDS)
    return [min(gap, others[-1]) for gap in gaps] if is_rest else gaps


def _rounded(steps: float) -> int:
    """Up to two digits, as people write intervals: 3,217 → 3,300."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(steps, 1))) - 1)
    return math.ceil(steps / unit) * unit
