"""Forecast from the recent saves: when the next one comes, how large it is, when the disk is full.

Pure functions, so that status can warn from the first day: what fills a disk is known before it is full, and
only a person can save less often or keep less (docs/design.md P13, P17). The room of each coming save is free
space plus what lies here, less what the policy keeps by then; the cause is found by asking again without one
key of the policy (docs/adr/0195).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState, UploadState
from ckptd.core.model.save import Order
from ckptd.core.policy.local import best_here, dates_of, is_committed, score_of
from ckptd.core.policy.permit import unobserved_remotes
from ckptd.core.policy.remote import is_configured_otherwise
from ckptd.core.policy.retention import PolicyFacts, PolicyItem, RetentionPolicy, Unuploaded, apply_policy
from ckptd.core.policy.safety import is_to_upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.core.model.records import SaveRow
    from ckptd.core.policy.view import JobView, SaveView


# --- The disk of a job, and the pace at which its run saves ----------------------------------------------

_ZERO = frozenset({ZERO})
_ALONE = frozenset({UNIVERSAL})
_BOTH = frozenset({ZERO, UNIVERSAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCheckpoint:
    """A checkpoint on this disk, as far as its future there depends on it."""

    key: str
    order: Order
    bytes: int
    is_committed: bool = False
    """True: on every required remote."""
    committed_at_seconds: float | None = None
    """Unix time."""
    is_pinned: bool = False
    score: float | None = None
    may_go: bool = True
    """False: it stays whatever the policy says (found at the first start, the best, others' files)."""
    is_sent: bool = True
    """It waits for the link while it is not committed."""
    is_trainers: bool = True
    """The trainer's own rotation counts it."""
    forms: frozenset[str] = _ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRhythm:
    """Describe the rhythm of the run: sizes of saves, and the time between them."""

    sizes_bytes: tuple[int, ...]
    """Sizes of the last saves; of the last one alone where they grow."""
    every_seconds: float
    flight_seconds: float = 0.0
    """Seconds from the first file of a save until its upload; nothing is deleted meanwhile."""
    last_step: int = 0
    steps: int = 1
    """Steps between two saves."""
    since_last_seconds: float = 0.0
    now_unix_seconds: float = 0.0

    @property
    def usual_bytes(self) -> int:
        """Return the mean size of a save."""
        return round(sum(self.sizes_bytes) / len(self.sizes_bytes))

    @property
    def largest_bytes(self) -> int:
        """Return the room that the next save may need."""
        return max(self.sizes_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """The disk, what lies on it, and what may be deleted from it."""

    free_bytes: int
    """Includes the derived forms that are deleted under disk pressure before a save lacks room."""
    pieces: tuple[DiskCheckpoint, ...] = ()
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    unuploaded: Unuploaded = "keep"
    link_bytes_per_second: float | None = None
    """Speed of the slowest required remote; None: it takes nothing; inf: not known, and fast enough."""
    may_delete: bool = True
    """False: deletions rest (a pause, a drain, rights that are not proved)."""
    sent: str | None = None
    """Key of the save that is uploaded just now."""
    left_bytes: int = 0
    """Bytes of that save that are still to be uploaded."""
    written_bytes: int = 0
    """Bytes written of the save in flight."""
    is_in_flight: bool = False
    makes_universal: bool = False
    """A ladder leaves a universal form, and those to come can be made."""
    trainer_keeps: int | None = None
    """Number of checkpoints that the trainer's own rotation leaves here; None: it removes nothing."""
    others: tuple[tuple[DiskUse, SaveRhythm], ...] = ()
    """Other jobs that save to this disk."""

    @property
    def deletes(self) -> bool:
        """Whether ckptd may delete anything here at all."""
        return self.may_delete and self.policy.deletes


# --- How many more saves fit: free space, and what the policy keeps of those here and those to come ------

HORIZON_SAVES = 100
"""A disk that takes so many more does not fill, as far as anybody is told."""
_LOOKS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 15, 20, 28, 38, 52, 72, HORIZON_SAVES)
"""Numbers of further saves at which the room is computed; between two of them the first that fails is found
by halving, so that a policy is asked about 20 times and not 100."""
_MOST_JUDGED = 1000
"""The newest so many are put to the policy; older ones count as they lie. That keeps a turn short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Tell how many more saves fit on the disk, and when one no longer does."""

    saves: int = 0
    full_at_seconds: float | None = None
    """Seconds from now; None: the disk does not fill within the horizon."""

    @property
    def is_full(self) -> bool:
        """Whether the disk fills within the horizon."""
        return self.full_at_seconds is not None


def saves_that_fit(disk_use: DiskUse, pace: SaveRhythm) -> Fit:
    """Return how many more saves fit, if the run goes on at this pace.

    Save n + 1 fits if its bytes fit into: free + bytes here now − bytes that are kept after n more saves.
    """
    disk = _Disk(disk_use, pace)
    others = [_Disk(other, its_pace) for other, its_pace in disk_use.others]

    def room(count: int, lying: Callable[[_Disk, int], int] = _Disk.kept_bytes) -> int:
        at_seconds = disk.begins_seconds(count) + disk.flight_seconds
        return disk.room_bytes(count, lying) - sum(other.taken_bytes(at_seconds, lying) for other in others)

    def lacks_room(count: int) -> bool:
        # the policy is asked only where the room depends on what is deleted
        needed = disk.needed_bytes(count)
        return room(count, _Disk.all_bytes) < needed and room(count) < needed

    good = -1
    for bad in _LOOKS:
        if lacks_room(bad):
            break
        good = bad
    else:
        return Fit(saves=HORIZON_SAVES)
    while bad - good > 1:
        middle = (good + bad) // 2
        if lacks_room(middle):
            bad = middle
        else:
            good = middle
    written = pace.largest_bytes - disk.needed_bytes(bad)
    share = min(max((written + room(bad)) / pace.largest_bytes, 0.0), 1.0)
    ends_seconds = disk.begins_seconds(bad) + disk.flight_seconds
    return Fit(saves=bad, full_at_seconds=max(ends_seconds - (1 - share) * pace.every_seconds, 0.0))


class _Disk:
    """The bytes that one job keeps on its disk after so many more saves."""

    def __init__(self, disk_use: DiskUse, pace: SaveRhythm) -> None:
        self.disk_use, self.pace = disk_use, pace
        self.flight_seconds = min(pace.flight_seconds, pace.every_seconds)
        self.here_bytes = sum(piece.bytes for piece in disk_use.pieces)
        newest_first = sorted(disk_use.pieces, key=lambda p: p.order, reverse=True)
        self._judged = newest_first[:_MOST_JUDGED]
        self._older_bytes = sum(piece.bytes for piece in newest_first[_MOST_JUDGED:])
        self._top = newest_first[0].order if newest_first else Order(1, pace.last_step, 0)
        self._safe = max((piece.order for piece in disk_use.pieces if piece.is_committed), default=None)
        self._coming: list[DiskCheckpoint] = []
        self._kept: dict[int, int] = {}

    def begins_seconds(self, count: int) -> float:
        """Return when the save after `count` more begins to be written, from now."""
        pace = self.pace
        first = max(pace.every_seconds - pace.since_last_seconds - self.flight_seconds, 0.0)
        return first + count * pace.every_seconds

    def needed_bytes(self, count: int) -> int:
        """Return what the save after `count` more still has to write."""
        written = self.disk_use.written_bytes if count == 0 else 0
        return max(self.pace.largest_bytes - written, 0)

    def room_bytes(self, count: int, lying: Callable[[_Disk, int], int]) -> int:
        """Return the free bytes that the save after `count` more finds; below 0: one before lacked it.

        `lying`: `kept_bytes` or `all_bytes`.
        """
        written = self.disk_use.written_bytes if count else 0
        return self.disk_use.free_bytes + self.here_bytes + written - lying(self, count)

    def taken_bytes(self, at_seconds: float, lying: Callable[[_Disk, int], int]) -> int:
        """Return what this job will have taken of the free space by then, a save in flight included."""
        pace = self.pace
        done = int(max(at_seconds + pace.since_last_seconds, 0.0) / pace.every_seconds)
        done = min(done, HORIZON_SAVES)
        return lying(self, done) - self.here_bytes + self.needed_bytes(done)

    def all_bytes(self, count: int) -> int:
        """Return the bytes that lie here after `count` more saves if nothing is deleted."""
        return self.here_bytes + count * self.pace.usual_bytes

    def kept_bytes(self, count: int) -> int:
        """Return the bytes that lie here after `count` more saves, before the next one is written."""
        if count not in self._kept:
            self._kept[count] = self._older_bytes + sum(piece.bytes for piece in self._stays(count))
        return self._kept[count]

    def _stays(self, count: int) -> list[DiskCheckpoint]:
        pieces = [*self._come(count)[::-1], *self._judged]
        if count == 0 and self.disk_use.is_in_flight:
            return pieces  # nothing is deleted while a save is written
        if self.disk_use.deletes:
            open_ones = [p for p in pieces if not p.is_committed and not self._is_passed(p)]
            waiting = [p for p in open_ones if p.is_sent]
            number = self._waiting(waiting, count)
            fixed = self._fixed(number, count)
            # the newest is uploaded first, so that the oldest wait longest
            undated = {p.key for p in waiting[len(waiting) - number :]}
            unsent = {p.key for p in waiting[len(waiting) - fixed :]}
            if not self._may_skip:
                unsent |= {p.key for p in open_ones if not p.is_sent}
            pieces = self._by_policy(pieces, unsent, undated)
        keeps = self.disk_use.trainer_keeps
        if keeps is not None:
            rotated = [p for p in pieces if p.is_trainers and ZERO in p.forms][keeps:]
            gone = {piece.key for piece in rotated}
            pieces = [piece for piece in pieces if piece.key not in gone]
        return pieces

    def _come(self, count: int) -> list[DiskCheckpoint]:
        branch, step, seq = self._top
        pace = self.pace
        forms = _BOTH if self.disk_use.makes_universal else _ZERO
        upload_seconds = pace.usual_bytes / (self.disk_use.link_bytes_per_second or math.inf)
        between = max(pace.every_seconds, upload_seconds)
        for n in range(len(self._coming) + 1, count + 1):
            at = pace.now_unix_seconds - pace.since_last_seconds + n * between
            self._coming.append(
                DiskCheckpoint(
                    key=f"+{n}",
                    order=Order(branch, step + n * max(pace.steps, 1), seq + n),
                    bytes=pace.usual_bytes,
                    committed_at_seconds=at,
                    forms=forms,
                )
            )
        return self._coming[:count]

    def _by_policy(
        self, newest_first: Sequence[DiskCheckpoint], unsent: set[str], undated: set[str]
    ) -> list[DiskCheckpoint]:
        """Return what stays: what waits for its upload, and what the policy keeps of the rest."""
        now = self.pace.now_unix_seconds
        counted = [
            _held(piece, None if piece.key in undated else piece.committed_at_seconds or now)
            for piece in newest_first
            if piece.key not in unsent
        ]
        kept = apply_policy(counted, self.disk_use.policy)
        top = newest_first[0].key if newest_first else ""
        return [
            piece
            for piece in newest_first
            if piece.key in unsent
            or piece.key == top
            or not piece.may_go
            or any(verdict.keeps for verdict in kept[piece.key].values())
        ]

    @property
    def _may_skip(self) -> bool:
        """Whether a save may be deleted without an upload."""
        return self.disk_use.unuploaded == "delete"

    def _is_passed(self, piece: DiskCheckpoint) -> bool:
        """Return whether it needs no upload: with `thin` a newer one is committed already."""
        if self.disk_use.unuploaded != "thin" or piece.key == self.disk_use.sent:
            return False
        return self._safe is not None and self._safe > piece.order

    def _waiting(self, waiting: Sequence[DiskCheckpoint], count: int) -> int:
        """Return how many saves wait for the link when the save after `count` more begins."""
        link, pace = self.disk_use.link_bytes_per_second, self.pace
        if link == math.inf:
            return 0
        if not link:
            return len(waiting)
        size = max(pace.usual_bytes, 1)
        now = [piece for piece in waiting if not piece.key.startswith("+")]
        backlog = sum(self.disk_use.left_bytes if p.key == self.disk_use.sent else p.bytes for p in now)
        least = size - link * max(pace.every_seconds - self.flight_seconds, 0.0) if count else 0.0
        left = max(backlog + count * size - link * self.begins_seconds(count), least, 0.0)
        return min(math.ceil(left / size - 1e-6), len(waiting))

    def _fixed(self, waiting: int, count: int) -> int:
        """Return how many of those that wait cannot be deleted before they are uploaded."""
        link, pace, disk_use = self.disk_use.link_bytes_per_second, self.pace, self.disk_use
        if not link or link == math.inf:
            return 0 if self._may_skip else waiting
        upload_saves = pace.usual_bytes / link / pace.every_seconds
        if self._may_skip:  # the limit counts it, unless so many newer ones came while it was uploaded
            return min(waiting, int(upload_saves > (disk_use.policy.save_total_limit or 1)))
        first = disk_use.left_bytes if disk_use.sent is not None else pace.usual_bytes
        if disk_use.unuploaded == "thin" and link * self.begins_seconds(count) >= first:
            # what came during one upload is deleted at the end of the next; the coming save is one of it
            coming = 2 * upload_saves + self.flight_seconds / pace.every_seconds
            return min(waiting, max(math.ceil(coming - 1e-6) - 1, 1))
        return waiting


def _held(piece: DiskCheckpoint, committed_at_seconds: float | None) -> PolicyFacts:
    item = PolicyItem(
        key=piece.key,
        order=piece.order,
        bytes=piece.bytes,
        pinned=piece.is_pinned,
        committed_at_seconds=committed_at_seconds,
        score=piece.score,
    )
    return PolicyFacts(item=item, forms=piece.forms, standing=piece.forms & _ALONE)


# --- What the last saves tell, and why a disk fills ------------------------------------------------------

RECENT = 6
"""Saves that count: a run that changed its cadence is believed soon."""
LEAST = 3
"""Fewer saves say nothing of a cadence."""
OVERDUE_FACTOR = 3.0
OVERDUE_SECONDS = 600.0
"""A gap beyond both is a rest: it says nothing of the cadence, and is overdue while it lasts."""
CADENCE_SECONDS = 60.0
"""Saves that are closer come in pairs, or were copied here together: they tell of no rest."""
LEAST_GAP_SECONDS = 1.0
"""No trainer saves more often: what is closer was copied here, and no save is overdue after it."""
_GRAINS = 64
"""Parts of the usual interval: within one the picture counts as unchanged."""
_KEYS = (
    "keep_bytes",
    "keep_every_steps",
    "keep_every_seconds",
    "keep_within_seconds",
    "keep_best",
    "keep_steps",
    "ephemeral",
    "ladder",
)
"""Keys that keep checkpoints beside save_total_limit, in the order in which messages name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One complete save: when its last shard was written (unix seconds), its bytes and its step."""

    at_seconds: float
    bytes: int
    step: int
    tag: str = ""
    written_seconds: float = 0.0
    """Seconds from its first file until its upload could begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskForecast:
    """Hold the forecast of a job; a value is None where the saves so far do not tell."""

    production_bytes_per_second: float | None = None
    save_every_seconds: float | None = None
    full_in_saves: int | None = None
    """Further saves that fit, if all goes on as it did; None: it does not fill within the horizon."""
    full_in_seconds: float | None = None
    overdue_seconds: float | None = None
    """Seconds that the next save is late."""
    save_steps_for_link: int | None = None
    """Steps between saves that the link could carry; None: it carries these."""
    is_spared_by_thin: bool = False
    """With `unuploaded = "thin"` the disk would not fill."""
    is_limit_too_high: bool = False
    """It fills with what save_total_limit keeps, however fast the link is."""
    lacks_files: bool = False
    """There are bytes, and no inodes for the next save."""
    kept_by: tuple[str, ...] = ()
    """Keys of the policy that keep so much that the disk fills, however fast the link is."""


def forecast(saves: Sequence[Saved], disk_use: DiskUse, *, now_seconds: float) -> DiskForecast:
    """Return what to expect if the run goes on as it did."""
    recent = _recent(saves)
    if recent is None:
        return DiskForecast()
    gaps = _gaps(recent)
    production = sum(save.bytes for save in recent[1:]) / sum(gaps)
    every = median(gaps)
    steps = _steps(recent)
    pace = _pace(recent, gaps, now_seconds)
    fit = saves_that_fit(disk_use, pace) if pace is not None else Fit()
    is_full = fit.is_full
    speed = disk_use.link_bytes_per_second or 0.0
    late = now_seconds - recent[-1].at_seconds - every
    is_paced = len(recent) >= LEAST and every >= LEAST_GAP_SECONDS
    is_late = is_paced and late + every > max(OVERDUE_FACTOR * every, OVERDUE_SECONDS)
    # where nothing of ours is rotated it presses nobody: two saves, perhaps close to each other, are too few
    is_slow = 0 < speed < production and (disk_use.policy.deletes or len(recent) >= LEAST)
    expected = DiskForecast(
        production_bytes_per_second=production,
        save_every_seconds=every,
        full_in_saves=fit.saves if is_full else None,
        full_in_seconds=fit.full_at_seconds,
        overdue_seconds=late if is_late else None,
        save_steps_for_link=_rounded(steps * production / max(speed, 1.0))
        if is_slow and steps is not None
        else None,
    )
    if pace is None or not disk_use.deletes or not (is_full or is_slow):
        return expected
    return _explained(
        expected, disk_use, pace, is_bounded=disk_use.unuploaded == "delete" or speed >= production
    )


def pace_of(saves: Sequence[Saved], now_seconds: float) -> SaveRhythm | None:
    """Return the rhythm of the run. None: the saves so far do not tell, each is written over the one before,
    or the run rests or has ended and takes no more disk space."""
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


def _pace(recent: Sequence[Saved], gaps: Sequence[float], now_seconds: float) -> SaveRhythm | None:
    if len({save.tag or save.step for save in recent}) == 1:
        return None
    sizes = [save.bytes for save in recent]
    is_growing = sizes == sorted(sizes)
    every = sum(gaps) / len(gaps)
    last = recent[-1].at_seconds
    since = round((now_seconds - last) / every * _GRAINS) / _GRAINS * every
    since = min(max(since, 0.0), every)
    return SaveRhythm(
        sizes_bytes=(sizes[-1],) if is_growing else tuple(sizes),
        every_seconds=every,
        flight_seconds=median(save.written_seconds for save in recent),
        last_step=recent[-1].step,
        steps=_steps(recent) or 1,
        since_last_seconds=since,
        now_unix_seconds=last + since,
    )


def _explained(
    expected: DiskForecast, disk_use: DiskUse, pace: SaveRhythm, *, is_bounded: bool
) -> DiskForecast:
    """Add to a forecast what would keep this disk from filling: `thin`, a lower limit, or other keys."""
    if disk_use.unuploaded != "delete" and not is_bounded:
        thin = saves_that_fit(replace(disk_use, unuploaded="thin"), pace)
        expected = replace(expected, is_spared_by_thin=disk_use.policy.limits and not thin.is_full)
        disk_use = replace(disk_use, link_bytes_per_second=math.inf)
    fast = saves_that_fit(disk_use, pace)
    if expected.full_in_saves is None or not fast.is_full or 2 * fast.saves > 3 * expected.full_in_saves + 2:
        return expected  # a faster link would help for long
    policy = disk_use.policy
    limits = RetentionPolicy(save_total_limit=policy.save_total_limit, keep_bytes=policy.keep_bytes)
    if policy.save_total_limit is not None and _fills(disk_use, pace, limits):
        return replace(expected, is_limit_too_high=True)
    keys = [key for key in _KEYS if getattr(policy, key)]
    spare = [key for key in keys if not _fills(disk_use, pace, _without(policy, key))]
    return replace(expected, kept_by=tuple(spare or keys))


def _fills(disk_use: DiskUse, pace: SaveRhythm, policy: RetentionPolicy) -> bool:
    return saves_that_fit(replace(disk_use, policy=policy), pace).is_full


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


# ---------------------------------------------------------------------------------------------------------
# The disk of a job out of the view that the planner decides on.

_NEVER_SENT = (UploadState.REFUSED, UploadState.DELETED)
_LEAST_REMOVALS = 2
_GAPS = 3
"""Gaps between saves that are looked at: if others removed checkpoints in two of them, the trainer
rotates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Describe the trainer's own rotation, as learned from checkpoints that ckptd did not delete."""

    keeps: int
    """The newest so many."""
    newest_gone: Order
    """Newest checkpoint that it deleted; it leaves older ones that are still here alone."""


def rotation_of(rows: Iterable[SaveRow]) -> Rotation | None:
    """Recognise the trainer's own rotation; None: ckptd alone deletes, or a person removed some once."""
    known = sorted((r for r in rows if r.state != "superseded"), key=lambda r: r.save.window.last)
    gone = [r for r in known if r.state == "vanished" and r.ended_at is not None]
    ends = [r.save.window.last / 1e9 for r in known]
    gaps = {sum(end <= (r.ended_at or 0.0) for end in ends[-_GAPS - 1 :]) for r in gone} - {0}
    if len(gaps) < _LEAST_REMOVALS:
        return None
    newest = max(r.save.order for r in gone)
    keeps = sum(r.save.order > newest for r in known)
    # between the newest save and the rotation that follows it there is one more
    is_pending = max(r.ended_at or 0.0 for r in gone) < ends[-1]
    return Rotation(keeps=max(keeps - is_pending, 1), newest_gone=newest)


def disk_use_of(
    view: JobView,
    link_bytes_per_second: float | None,
    left_bytes: int | None,
    *,
    written_bytes: int = 0,
    unsealed: Sequence[tuple[str, int, int]] = (),
    rotation: Rotation | None = None,
) -> DiskUse:
    """The disk of a job; `left_bytes`: of the upload under way, `unsealed`: (tag, step, bytes) without a row.

    `written_bytes`: of the save in flight; it counts as free, for that save has it already.
    """
    pieces = _pieces(view, rotation)
    newest = max((piece.order for piece in pieces), default=Order(1, 0, 0))
    for tag, step, size in unsealed:
        newest = Order(newest.branch, max(step, newest.step), newest.save_seq + 1)
        pieces.append(DiskCheckpoint(key=tag, order=newest, bytes=size))
    required = [remote for remote in view.remotes if remote.is_required]
    uploading = [
        r.uploading_save_id for r in required if r.uploading == ZERO and r.uploading_save_id is not None
    ]
    sent = next((p for p in pieces if p.key in {str(n) for n in uploading} and not p.is_committed), None)
    # a remote that never answered may know of a pin, so that nothing goes by the job file alone either
    is_silent = link_bytes_per_second is None and bool(unobserved_remotes(view))
    rests = view.is_paused or view.drain is not None or not view.may_delete
    return DiskUse(
        free_bytes=view.disk.free_bytes + _remade_bytes(view),
        pieces=tuple(pieces),
        policy=view.local_retention,
        unuploaded="keep" if is_silent else view.unuploaded,
        link_bytes_per_second=None if rests or not required else link_bytes_per_second,
        may_delete=not rests and not any(is_configured_otherwise(view, r) for r in view.remotes),
        sent=sent.key if sent is not None else None,
        left_bytes=sent.bytes if sent is not None and left_bytes is None else left_bytes or 0,
        written_bytes=written_bytes,
        is_in_flight=view.is_save_in_flight or written_bytes > 0,
        makes_universal=_makes_universal(view),
        trainer_keeps=rotation.keeps if rotation is not None else None,
    )


def _pieces(view: JobView, rotation: Rotation | None) -> list[DiskCheckpoint]:
    """List the checkpoints of the kind that the run saves now; those of the other kind are left alone."""
    newest = max(view.saves, key=lambda s: s.save.window.last, default=None)
    kind = [s for s in view.saves if newest is not None and s.is_model_only == newest.is_model_only]
    here = [s for s in kind if s.is_present and s.is_intact]
    if view.local_retention.has_rung(UNIVERSAL):
        here += [s for s in kind if not s.is_present and s.is_pruned and _is_ready(s)]
    dates, best = dates_of(view), best_here(view)
    required = [remote.name for remote in view.remotes if remote.is_required]
    return [_piece(view, save, required, dates, best, rotation) for save in here]


def _piece(
    view: JobView,
    save: SaveView,
    required: Sequence[str],
    dates: dict[tuple[str, str], float | None],
    best: str | None,
    rotation: Rotation | None,
) -> DiskCheckpoint:
    records = [save.upload(name, ZERO) for name in required]
    times = [dates.get((record.remote, record.commit_key or "")) for record in records]
    known = [at for at in times if at is not None]
    safe = is_committed(view, save)
    written_at = save.save.window.last / 1e9
    return DiskCheckpoint(
        key=str(save.id),
        order=save.order,
        bytes=save.save.total_bytes if save.is_present else save.universal.bytes,
        is_committed=safe,
        # not read yet: in a moment it is
        committed_at_seconds=(max(known) if known else written_at) if safe else None,
        is_pinned=save.is_pinned or save.save.tag in view.damaged_tags,
        score=score_of(view, save.save.best),
        may_go=save.is_adopted and not save.has_unlisted and save.save.tag != best,
        is_sent=is_to_upload(view, save) and not any(record.state in _NEVER_SENT for record in records),
        is_trainers=rotation is not None and save.order > rotation.newest_gone,
        forms=_forms(view, save),
    )


def _forms(view: JobView, save: SaveView) -> frozenset[str]:
    """The universal form of a ladder counts where it will be made; beside a folder it makes room first."""
    if not save.is_present:
        return frozenset({UNIVERSAL})
    is_made = view.local_retention.has_rung(UNIVERSAL) and save.save.roots == ("",) and _is_makable(save)
    return frozenset({ZERO, UNIVERSAL}) if is_made else frozenset({ZERO})


def _is_ready(save: SaveView) -> bool:
    return save.universal.state is DerivedState.READY


def _is_makable(save: SaveView) -> bool:
    return save.is_convertible and save.universal.state is not DerivedState.REFUSED


def _makes_universal(view: JobView) -> bool:
    """Tell whether a ladder makes universal forms, judged by the newest save: the next one is like it."""
    newest = next(iter(view.intact[False]), None)
    return newest is not None and UNIVERSAL in _forms(view, newest)


def _remade_bytes(view: JobView) -> int:
    """Universal forms beside their source: under disk pressure they go before a save lacks room.

    A clone frees nothing, and what a ladder left instead of its source stays.
    """
    is_left = view.local_retention.has_rung(UNIVERSAL)
    forms = (s.universal for s in view.saves if not s.is_busy and (s.is_present or not is_left))
    return sum(f.bytes for f in forms if f.state is DerivedState.READY and not f.is_cloned)
