"""What the recent saves say of the next hours: when the next one comes, how large, when the disk is full.

A pure function, so that status can warn from the first day: a link slower than the trainer fills every disk,
and the only cures are a person's (docs/design.md P13, P17).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from statistics import median
from typing import TYPE_CHECKING

from ckptd.core.keeping import is_committed
from ckptd.core.optout import unheard
from ckptd.core.view import ZERO, DerivedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.permit import Unuploaded
    from ckptd.core.retention import RetentionPolicy
    from ckptd.core.view import JobView, SaveView

RECENT = 6
"""Saves that count: a run that changed its cadence is believed soon."""
LEAST = 3
"""Fewer saves say nothing of a cadence."""
OVERDUE_FACTOR = 3.0
OVERDUE_SECONDS = 600.0
"""A gap beyond both is a rest: it says nothing of the cadence, and is overdue while it lasts."""
CADENCE_SECONDS = 60.0
"""Saves that are closer come in pairs, or were copied here together: they tell of no rest."""
_MOST_UPLOADS = 1000
"""That are played; a limit beyond says nothing of a disk."""


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
class Waiting:
    """Bytes of what may go at once, or when something newer is committed on every required remote."""

    loose_bytes: int = 0
    """Here for a moment yet: older than a committed one, or more than the limit keeps."""
    left_bytes: int | None = None
    """Of the upload under way, still to be sent; None: none is, and the newest is begun next."""
    older_bytes: int = 0
    """Of checkpoints before the one that is sent: its COMMIT lets them go under `thin`."""
    newer_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The disk and what may leave it."""

    free_bytes: int
    link_bytes_per_second: float | None
    """Of the slowest required remote, as last measured; None: it takes nothing; inf: not known."""
    is_rotated: bool
    """A retention key is set, so what is committed goes."""
    unuploaded: Unuploaded = "keep"
    waiting: Waiting = field(default_factory=Waiting)
    saves_to_limit: int = 0
    """COMMITs that still let nothing go, before save_total_limit lets one go for each."""
    limit: int | None = None
    """save_total_limit."""
    saves_here: int = 0
    """What the limit counts or lets go, committed or still waiting for that."""
    yields_bytes: int = 0
    """Taken and yet room of the next save: its own part that is written, and forms that can be made again."""
    keep_every_steps: int | None = None
    """Multiples of it stay for ever."""


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
    is_spared_by_thin: bool = False
    """With `unuploaded = "thin"` the disk would not fill."""
    is_limit_too_high: bool = False
    """It fills with what save_total_limit keeps, however fast the link is."""
    is_kept_by_steps: bool = False
    """The same with what keep_every_steps keeps."""


def room_of(
    view: JobView,
    link_bytes_per_second: float | None,
    left_bytes: int | None,
    *,
    written_bytes: int = 0,
    unsealed: int = 0,
) -> Room:
    """The disk of a job and what lies on it that may go; `left_bytes`: of the upload under way.

    `written_bytes`: of the save in flight; `unsealed`: complete ones that the view does not have yet.
    """
    required = [remote for remote in view.remotes if remote.is_required]
    here = [s for s in view.saves if s.is_present and s.is_intact and s.is_adopted and not s.is_pinned]
    committed = {s.id for s in here if is_committed(view, s)}
    safe = sorted(s.order for s in here if s.id in committed)
    waits = [s for s in here if s.id not in committed]
    ahead = [s for s in waits if not safe or s.order > safe[-1]]
    sent = {remote.ships_save for remote in required if remote.ships == ZERO}
    first = min((s.order for s in ahead if s.id in sent), default=None)
    if first is None and ahead:
        first = max(s.order for s in ahead)
    policy = view.local_retention
    limit = policy.save_total_limit
    # a remote that never answered may know of a pin, so that nothing goes by the job file alone either
    is_silent = link_bytes_per_second is None and bool(unheard(view))
    count = len(here) if view.unuploaded == "delete" else len(safe)
    beyond = set(safe[: max(0, len(safe) - limit)]) if limit is not None else set()
    # what a COMMIT has let go stays for a turn, or while a save is in flight
    past = [s for s in here if s.order in beyond] + [s for s in waits if safe and s.order < safe[-1]]
    loose = [s for s in past if not policy.keeps_step(s.order.step)]
    return Room(
        free_bytes=view.disk.free_bytes,
        link_bytes_per_second=link_bytes_per_second,
        is_rotated=bool(required) and policy.deletes,
        unuploaded="keep" if is_silent else view.unuploaded,
        waiting=Waiting(
            loose_bytes=sum(s.save.total_bytes for s in loose),
            left_bytes=left_bytes,
            older_bytes=sum(s.save.total_bytes for s in ahead if first is not None and s.order < first),
            newer_bytes=sum(s.save.total_bytes for s in ahead if first is not None and s.order > first),
        ),
        saves_to_limit=max(0, (limit or 0) - count),
        limit=limit,
        saves_here=_counted(here, policy) + unsealed,
        yields_bytes=written_bytes + _remade_bytes(view),
        keep_every_steps=policy.keep_every_steps,
    )


def _counted(here: Sequence[SaveView], policy: RetentionPolicy) -> int:
    """Those that the limit keeps or will let go: what is kept for ever takes no newer one's place."""
    steps = [s.order.step for s in sorted(here, key=lambda s: s.order, reverse=True)]
    limit = policy.save_total_limit or 0
    return len(steps[:limit]) + sum(not policy.keeps_step(step) for step in steps[limit:])


def _remade_bytes(view: JobView) -> int:
    """Universal forms here: under disk pressure they go before a save lacks room (a clone frees nothing)."""
    forms = (s.universal for s in view.saves if not s.is_busy)
    return sum(f.bytes for f in forms if f.state is DerivedState.READY and not f.is_cloned)


def forecast(saves: Sequence[Saved], room: Room, *, now_seconds: float) -> Forecast:
    """What to expect if the run goes on as it did."""
    recent = sorted(saves, key=lambda save: save.at_seconds)[-RECENT:]
    if len(recent) < 2 or recent[-1].at_seconds <= recent[0].at_seconds:
        return Forecast()
    gaps = _gaps(recent)
    production = sum(save.bytes for save in recent[1:]) / sum(gaps)
    size = max(save.bytes for save in recent)
    every = median(gaps)
    steps = [later.step - earlier.step for earlier, later in pairwise(recent) if later.step > earlier.step]
    every_steps = round(median(steps)) if steps else None
    speed = room.link_bytes_per_second or 0.0
    link = speed if room.is_rotated else 0.0
    is_bounded = room.unuploaded == "delete" or link >= production
    kept = _kept_share(room.keep_every_steps, recent[-1].step, every_steps)
    to_fit = _saves_to_fit(room, recent, every, size / link if link else 0.0) if is_bounded else 0
    is_too_much = to_fit * size > room.free_bytes + room.yields_bytes
    full_seconds = (
        _bounded_seconds(room, production, to_fit * size, kept)
        if is_bounded
        else _full_seconds(room, production, link, size, kept)
    )
    late = now_seconds - recent[-1].at_seconds - every
    is_late = len(recent) >= LEAST and late + every > max(OVERDUE_FACTOR * every, OVERDUE_SECONDS)
    # where nothing of ours is rotated it presses nobody: two saves, perhaps close to each other, are too few
    is_slow = 0 < speed < production and (room.is_rotated or len(recent) >= LEAST)
    return Forecast(
        production_bytes_per_second=production,
        save_every_seconds=every,
        save_every_steps=every_steps,
        full_in_saves=None if full_seconds is None else int(full_seconds * len(gaps) / sum(gaps)),
        full_in_seconds=full_seconds,
        overdue_seconds=late if is_late else None,
        save_steps_for_link=_rounded(every_steps * production / max(speed, 1.0))
        if is_slow and every_steps is not None
        else None,
        is_spared_by_thin=_thinned_seconds(room, production, link, size, 0.0) is None,
        is_limit_too_high=is_too_much,
        is_kept_by_steps=is_bounded and not is_too_much and full_seconds is not None,
    )


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


def _kept_share(keep_every_steps: int | None, step: int, every_steps: int | None) -> float:
    """Of the saves to come: those that keep_every_steps keeps; one in so many, or none."""
    if keep_every_steps is None or not every_steps:
        return 0.0
    common = math.gcd(keep_every_steps, every_steps)
    return common / keep_every_steps if step % common == 0 else 0.0


def _saves_to_fit(room: Room, recent: Sequence[Saved], every: float, upload_seconds: float) -> int:
    """Saves that must find room before each that comes has that of one that went.

    The limit and the save in flight: what that replaces goes after it is complete, and committed. One more
    where the one before it is still being sent when it begins (nothing goes while a save is in flight), and
    under `delete` where the limit would let go what is being sent.
    """
    if room.limit is None or len({save.tag or save.step for save in recent}) == 1:
        return 0  # one name for all saves: each is written over the one before
    rest = every - median(save.written_seconds for save in recent)
    sent_in_time = room.limit * every if room.unuploaded == "delete" else min(rest, every)
    return max(0, room.limit + 1 + (upload_seconds > sent_in_time) - room.saves_here)


def _bounded_seconds(room: Room, production: float, to_fit_bytes: int, kept: float) -> float | None:
    """Until it is full where each save that comes lets one go, once the limit is reached; None: never."""
    left = room.free_bytes + room.yields_bytes - to_fit_bytes
    if left < 0:
        return (left + to_fit_bytes) / production
    return (to_fit_bytes + left / kept) / production if kept else None


def _full_seconds(room: Room, production: float, link: float, size: int, kept: float) -> float | None:
    """Until the disk is full; None: it does not fill.

    It fills at the speed of production, less what of the link's committed checkpoints is rotated.
    """
    if room.unuploaded == "thin":
        return _thinned_seconds(room, production, link, size, kept)
    return room.free_bytes / (production - link * (1 - kept))


def _thinned_seconds(room: Room, production: float, link: float, size: int, kept: float) -> float | None:
    """The same under `thin`: while one checkpoint is sent nothing goes, at its COMMIT what is older does.

    So the disk must take all that is saved meanwhile, twice: what came during one upload leaves at the end of
    the next. From the third upload on each gives back what it takes (docs/adr/0132), less what is kept.
    """
    if link <= 0:
        return room.free_bytes / production
    waiting, taken = room.waiting, production * size / link
    first = taken if waiting.left_bytes is None else production * waiting.left_bytes / link
    backs = chain((waiting.older_bytes, max(waiting.newer_bytes + first - size, 0.0)), repeat(taken - size))
    free, seconds = float(room.free_bytes + waiting.loose_bytes), 0.0
    for upload in range(min(room.saves_to_limit, _MOST_UPLOADS) + 3):
        takes = taken if upload else first
        if takes > free:
            return seconds + free / production
        seconds += takes / production
        # the one that is committed stays, and lets the oldest of the limit go once that is reached
        free += (next(backs) + (size if upload >= room.saves_to_limit else 0)) * (1 - kept) - takes
    return seconds + max(free, 0.0) / (production * kept) if kept else None


def _rounded(steps: float) -> int:
    """Up to two digits, as people write intervals: 3,217 → 3,300."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(steps, 1))) - 1)
    return math.ceil(steps / unit) * unit
