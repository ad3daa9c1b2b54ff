"""What the recent saves say of the next hours: when the next one comes, how large, when the disk is full.

A pure function, so that status can warn from the first day: what fills a disk is known before it is full, and
the cures are a person's (docs/design.md P13, P17). The coming saves are played (core/policy/capacity.py);
what fills the disk is found by playing again without it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import merge
from itertools import count, pairwise
from statistics import median
from typing import TYPE_CHECKING

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState, ShipState
from ckptd.core.model.save import Order
from ckptd.core.policy.local import best_here, dates_of, is_committed, score_of
from ckptd.core.policy.permit import loose_under, unheard
from ckptd.core.policy.remote import is_configured_otherwise
from ckptd.core.policy.retention import PolicyFacts, PolicyItem, RetentionPolicy, apply_policy
from ckptd.core.policy.safety import is_to_upload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptd.core.model.records import SaveRow
    from ckptd.core.policy.view import JobView, SaveView, Unuploaded


# ---------------------------------------------------------------------------------------------------------
# What a play of the coming saves is about: a disk, its checkpoints, and the pace of a run (adr/0160).

_ZERO = frozenset({ZERO})


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A checkpoint on this disk, as far as its future there depends on it."""

    key: str
    order: Order
    bytes: int
    is_committed: bool = False
    """On every required remote."""
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
class Pace:
    """How the run goes on."""

    sizes_bytes: tuple[int, ...]
    """Of the coming saves, over and over."""
    every_seconds: float
    flight_seconds: float = 0.0
    """From the first file of a save until it may be sent; nothing is let go meanwhile."""
    last_step: int = 0
    steps: int = 1
    """From save to save."""
    since_last_seconds: float = 0.0
    now_unix_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The disk, what lies on it, and what may leave it."""

    free_bytes: int
    """With what makes room under disk pressure before a save lacks it."""
    pieces: tuple[Piece, ...] = ()
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    unuploaded: Unuploaded = "keep"
    link_bytes_per_second: float | None = None
    """Of the slowest required remote; None: it takes nothing; inf: not known, and fast enough."""
    may_delete: bool = True
    """False: removals rest (a pause, a drain, rights that are not proved)."""
    sent: str | None = None
    """Key of what is under way."""
    left_bytes: int = 0
    """Of that, still to be sent."""
    written_bytes: int = 0
    """Of the save in flight."""
    is_in_flight: bool = False
    reserve_bytes: int = 0
    """P13's line."""
    makes_universal: bool = False
    """A ladder leaves a universal form, and those to come can be made."""
    trainer_keeps: int | None = None
    """What the trainer's own rotation leaves here; None: it removes nothing."""
    others: tuple[tuple[float, int], ...] = ()
    """(seconds from now, bytes) that other jobs will have taken of this disk by then."""

    @property
    def deletes(self) -> bool:
        """Something of ours may go at all."""
        return self.may_delete and self.policy.deletes


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of it."""

    fit: int
    """Saves that found room."""
    full_at_seconds: float | None
    """When the next one runs out of it; None: it did not fill."""
    taken: tuple[tuple[float, int], ...] = ()
    """(seconds, bytes taken by then): what other jobs on this disk must reckon with."""

    @property
    def is_full(self) -> bool:
        """Within the horizon."""
        return self.full_at_seconds is not None


# ---------------------------------------------------------------------------------------------------------
# What leaves a disk that is played: as keeping.py decides it for a view, by the same policy (adr/0160).

_ALONE = frozenset({UNIVERSAL})


def moving(ground: Ground) -> tuple[Piece, ...]:
    """Without what stays for ever by its step, which takes no newer one's place where all goes by number."""
    policy = ground.policy.model_copy(update={"keep_every_steps": None, "keep_steps": (), "ephemeral": None})
    if not goes_by_number(policy):
        return ground.pieces
    first = (policy.save_total_limit or 0) + 1
    newest_first = sorted(ground.pieces, key=lambda p: p.order, reverse=True)
    rest = (
        p for p in newest_first[first:] if not p.is_committed or not ground.policy.keeps_step(p.order.step)
    )
    return (*newest_first[:first], *rest)


def goes_by_number(policy: RetentionPolicy) -> bool:
    """What goes is a matter of how many there are."""
    keys = (policy.keep_every_steps, policy.keep_every_seconds, policy.keep_within_seconds, policy.keep_best)
    others = (policy.keep_steps, policy.ephemeral, policy.ladder)
    return not any(keys) and not any(others)


def going(
    pieces: Sequence[Piece], ground: Ground, sent: str | None, *, is_short: bool
) -> dict[str, frozenset[str]]:
    """What may go now, with the forms that stay of it: as core/policy/local.py decides it for a view."""
    committed = [p for p in pieces if p.is_committed]
    safe = max((p.order for p in committed), default=None)
    loose = [p for p in pieces if not p.is_committed and _may_go_uncommitted(p, ground, safe)]
    by_policy = apply_policy([_held(p) for p in committed], ground.policy)
    mine = by_policy
    if loose:
        everything = [_held(p) for p in (*committed, *loose)]
        policy = loose_under(ground.policy, ground.unuploaded, is_short=is_short)
        mine = apply_policy(everything, policy)
        if ground.unuploaded == "delete":
            by_policy = apply_policy(everything, ground.policy)
    top = max(pieces, key=lambda p: p.order, default=None)
    found: dict[str, frozenset[str]] = {}
    for piece in (*committed, *loose):
        is_newest = top is not None and (piece is top or piece.order.step >= top.order.step)
        if is_newest or not piece.may_go or piece.key == sent:
            continue
        fate = (by_policy if piece.is_committed else mine)[piece.key]
        stay = frozenset(form for form, one in fate.items() if one.keeps)
        if stay != piece.forms:
            found[piece.key] = stay
    return found


def _may_go_uncommitted(piece: Piece, ground: Ground, safe: Order | None) -> bool:
    if ground.unuploaded == "thin":
        return safe is not None and safe > piece.order
    return ground.unuploaded == "delete"


def _held(piece: Piece) -> PolicyFacts:
    item = PolicyItem(
        key=piece.key,
        order=piece.order,
        pinned=piece.is_pinned,
        committed_at_seconds=piece.committed_at_seconds,
        score=piece.score,
    )
    return PolicyFacts(item=item, forms=piece.forms, standing=piece.forms & _ALONE)


# ---------------------------------------------------------------------------------------------------------
# The coming saves of a job, lived in advance: how many of them its disk takes, and what it looks like then.
# No formula: what decides for real (`retention.fates`) decides here too, over the checkpoints that are here
# and
# those to come, so that a forecast knows every key that the job file knows (docs/adr/0160). Times are seconds
# from now; a COMMIT that is played carries the unix time that it would have.

HORIZON_SAVES = 100
"""A disk that takes so many more does not fill, as far as anybody is told."""
LEAST_SAVES = 5
"""Are played however many checkpoints there are: an alarm looks three ahead."""
_MOST_JUDGED = 8000
"""Checkpoints judged in one play, in all; after so many it ends early."""
MOST_PIECES = 1000
"""Of more that go by time, or one by one, no play is worth its cost."""
_MOST_KNOWN = 500
"""A ground of more checkpoints is not remembered."""
_BOTH = frozenset({ZERO, UNIVERSAL})


def play(ground: Ground, pace: Pace) -> Played:
    """Live the coming saves; the same ground and pace always give the same, so what was played is known."""
    if len(ground.pieces) > MOST_PIECES:
        ground = replace(ground, pieces=moving(ground))
        judged = sum(piece.is_committed or ground.unuploaded != "keep" for piece in ground.pieces)
        if judged > MOST_PIECES and ground.deletes:
            return Played(fit=0, full_at_seconds=None)
    return _known(ground, pace) if len(ground.pieces) <= _MOST_KNOWN else _Play(ground, pace).run()


@lru_cache(maxsize=32)
def _known(ground: Ground, pace: Pace) -> Played:
    return _Play(ground, pace).run()


def _when(event: tuple[float, int, int]) -> float:
    return event[0]


def summed(one: Sequence[tuple[float, int]], other: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """What two have taken together, by time."""
    if not one or not other:
        return [*one, *other]
    events = merge(((at, 0, taken) for at, taken in one), ((at, 1, taken) for at, taken in other), key=_when)
    latest, found = [0, 0], []
    for at, who, taken in events:
        latest[who] = taken
        found.append((at, sum(latest)))
    return found


class _Play:
    def __init__(self, ground: Ground, pace: Pace) -> None:
        self.ground, self.pace = ground, pace
        self.pieces = {piece.key: piece for piece in ground.pieces}
        self.now = 0.0
        self.free = ground.free_bytes
        self.sent = ground.sent if ground.sent in self.pieces else None
        self.left = float(ground.left_bytes)
        self.going: dict[str, frozenset[str]] = {}
        """What nothing keeps, with the forms that stay of it; it is not sent any more."""
        self.queue: list[Piece] | None = None
        """What waits for the link, the newest last; None: to be made anew."""
        self.has_news = True
        self.judged = 0
        self.marks: set[tuple[object, ...]] = set()
        self.taken: list[tuple[float, int]] = []
        self.top = max((piece.order for piece in ground.pieces), default=Order(1, pace.last_step, 0))

    def run(self) -> Played:
        pace = self.pace
        flight = min(pace.flight_seconds, pace.every_seconds)
        done = max(pace.every_seconds - pace.since_last_seconds, 0.0)
        written = self.ground.written_bytes
        self._rotate()
        if not self.ground.is_in_flight:
            self._settle()
        for fit in count():
            begins = max(done - flight, self.now)
            size = pace.sizes_bytes[fit % len(pace.sizes_bytes)]
            if fit or not self.ground.is_in_flight:
                self._pass(begins, is_at_rest=True)
            needed = max(size - written, 0)
            self._tell(needed)
            room = self.free - self._others(max(done, begins))
            if needed > room:
                share = min(max((written + room) / size, 0.0), 1.0)
                at = max(done - (1 - share) * pace.every_seconds, 0.0)
                return Played(fit=fit, full_at_seconds=at, taken=tuple(self.taken))
            if (
                fit >= HORIZON_SAVES
                or self._comes_round(fit)
                or (self.judged > _MOST_JUDGED and fit >= LEAST_SAVES)
            ):
                return Played(fit=fit, full_at_seconds=None, taken=tuple(self.taken))
            self._pass(max(done, begins), is_at_rest=False)
            self._add(fit, size, needed)
            self._settle()
            written, done = 0, self.now + pace.every_seconds
        raise AssertionError("a play ends")

    def _comes_round(self, fit: int) -> bool:
        """The disk was as it is now before another save, and all goes by number: for ever so."""
        policy = self.ground.policy
        if self.ground.others or not goes_by_number(policy) or self.ground.trainer_keeps is not None:
            return False
        waiting = tuple(p.is_committed for p in sorted(self.pieces.values(), key=lambda p: p.order))
        sent = self.top.save_seq - self.pieces[self.sent].order.save_seq if self.sent else None
        phase = fit % len(self.pace.sizes_bytes)
        mark = (self.free, waiting, sent, round(self.left / max(self.pace.sizes_bytes), 6), phase)
        if mark not in self.marks:
            self.marks.add(mark)
            return False
        self.taken.append((self.now, max(taken for _, taken in self.taken)))
        return True

    # --- the link ----------------------------------------------------------------------------------------

    def _pass(self, until: float, *, is_at_rest: bool) -> None:
        """Time goes on: what is sent arrives, and lets go of others, but not while a save is written."""
        link = self.ground.link_bytes_per_second
        if link == math.inf:
            self._commit_all(is_at_rest=is_at_rest)
        while link and (self.sent is not None or self._begin()):
            arrives = self.now + self.left / link
            if arrives > until:
                self.left -= link * (until - self.now)
                break
            self.now = arrives
            self._commit(self.pieces[self.sent or ""])
            if self.judged > _MOST_JUDGED:
                continue
            if is_at_rest:
                self._settle()
            elif self.ground.unuploaded != "keep":
                self._judge()
        if is_at_rest and self.has_news:
            self._settle()
        self.now = max(self.now, until)

    def _begin(self) -> bool:
        """The newest that waits."""
        if self.queue is None:
            waiting = (p for p in self.pieces.values() if p.is_sent and not p.is_committed)
            self.queue = sorted((p for p in waiting if p.key not in self.going), key=lambda p: p.order)
        if not self.queue:
            return False
        newest = self.queue.pop()
        self.sent, self.left = newest.key, float(newest.bytes)
        return True

    def _commit_all(self, *, is_at_rest: bool) -> None:
        """A link that nobody knows keeps nothing back."""
        for piece in list(self.pieces.values()):
            if piece.is_sent and not piece.is_committed and piece.key not in self.going:
                self._commit(piece)
        if is_at_rest and self.has_news:
            self._settle()

    def _commit(self, piece: Piece) -> None:
        at = self.pace.now_unix_seconds + self.now
        self.pieces[piece.key] = replace(piece, is_committed=True, committed_at_seconds=at)
        self.sent, self.has_news = None, True

    # --- the disk ----------------------------------------------------------------------------------------

    def _add(self, number: int, size: int, needed: int) -> None:
        """A save is whole."""
        branch, step, seq = self.top
        self.top = Order(branch, step + max(self.pace.steps, 1), seq + 1)
        key = f"+{number}"
        forms = _BOTH if self.ground.makes_universal else _ZERO
        self.pieces[key] = Piece(key=key, order=self.top, bytes=size, forms=forms)
        self.free -= needed
        self.queue = None
        self._rotate()

    def _rotate(self) -> None:
        """The trainer's own."""
        keeps = self.ground.trainer_keeps
        if keeps is None:
            return
        mine = [p for p in self.pieces.values() if p.is_trainers and ZERO in p.forms]
        for old in sorted(mine, key=lambda p: p.order)[:-keeps]:
            self._remove(old)

    def _remove(self, piece: Piece) -> None:
        del self.pieces[piece.key]
        self.queue = None
        self.going.pop(piece.key, None)
        self.free += piece.bytes
        if self.sent == piece.key:
            self.sent = None

    def _settle(self) -> None:
        """Let go what nothing keeps."""
        self._judge()
        for key, forms in list(self.going.items()):
            if forms:
                self.pieces[key] = replace(self.pieces[key], forms=forms)
            else:
                self._remove(self.pieces[key])
        self.going = {}
        self._tell(0)

    def _judge(self) -> None:
        # what is committed goes by what is committed: without an opt-out a COMMIT alone is news
        if not self.ground.deletes or (self.ground.unuploaded == "keep" and not self.has_news):
            return
        self.judged, self.has_news = self.judged + len(self.pieces), False
        self.queue = None
        is_short = self.free < self.ground.reserve_bytes
        self.going = going(list(self.pieces.values()), self.ground, self.sent, is_short=is_short)

    # --- other jobs --------------------------------------------------------------------------------------

    def _tell(self, in_flight: int) -> None:
        self.taken.append((self.now, self.ground.free_bytes - self.free + in_flight))

    def _others(self, at: float) -> int:
        """What they will have taken by then, or give back."""
        place = bisect_right(self.ground.others, (at, math.inf))
        return self.ground.others[place - 1][1] if place else 0


# ---------------------------------------------------------------------------------------------------------

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


# ---------------------------------------------------------------------------------------------------------
# What a play of the coming saves starts from, out of the view that the planner decides on (adr/0160).

_NEVER_SENT = (ShipState.REFUSED, ShipState.RETIRED)
_LEAST_REMOVALS = 2
_GAPS = 3
"""In two of the last three gaps between saves somebody else removed some: the trainer rotates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How the trainer rotates by itself, learned from what went lately by another hand."""

    keeps: int
    """The newest so many."""
    newest_gone: Order
    """What is older and still here is none of its business."""


def rotation_of(rows: Iterable[SaveRow]) -> Rotation | None:
    """None: what goes goes by our hand, or a person removed some once."""
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


def ground_of(
    view: JobView,
    link_bytes_per_second: float | None,
    left_bytes: int | None,
    *,
    written_bytes: int = 0,
    is_in_flight: bool = False,
    unsealed: Sequence[tuple[str, int, int]] = (),
    rotation: Rotation | None = None,
) -> Ground:
    """The disk of a job; `left_bytes`: of the upload under way, `unsealed`: (tag, step, bytes) without a row.

    `written_bytes`: of the save in flight; it counts as free, for that save has it already.
    """
    pieces = _pieces(view, rotation)
    newest = max((piece.order for piece in pieces), default=Order(1, 0, 0))
    for tag, step, size in unsealed:
        newest = Order(newest.branch, max(step, newest.step), newest.save_seq + 1)
        pieces.append(Piece(key=tag, order=newest, bytes=size))
    required = [remote for remote in view.remotes if remote.is_required]
    ships = [r.ships_save for r in required if r.ships == ZERO and r.ships_save is not None]
    sent = next((p for p in pieces if p.key in {str(n) for n in ships} and not p.is_committed), None)
    # a remote that never answered may know of a pin, so that nothing goes by the job file alone either
    is_silent = link_bytes_per_second is None and bool(unheard(view))
    rests = view.is_paused or view.drain is not None or not view.may_delete
    return Ground(
        free_bytes=view.disk.free_bytes + _remade_bytes(view),
        pieces=tuple(pieces),
        policy=view.local_retention,
        unuploaded="keep" if is_silent else view.unuploaded,
        link_bytes_per_second=None if rests or not required else link_bytes_per_second,
        may_delete=not rests and not any(is_configured_otherwise(view, r) for r in view.remotes),
        sent=sent.key if sent is not None else None,
        left_bytes=sent.bytes if sent is not None and left_bytes is None else left_bytes or 0,
        written_bytes=written_bytes,
        is_in_flight=is_in_flight or view.is_save_in_flight or written_bytes > 0,
        reserve_bytes=view.disk.reserve_bytes,
        makes_universal=_makes_universal(view),
        trainer_keeps=rotation.keeps if rotation is not None else None,
    )


def _pieces(view: JobView, rotation: Rotation | None) -> list[Piece]:
    """Of the kind that the run saves: the other kind lies where it lies."""
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
) -> Piece:
    records = [save.ship(name, ZERO) for name in required]
    times = [dates.get((record.remote, record.commit_key or "")) for record in records]
    known = [at for at in times if at is not None]
    safe = is_committed(view, save)
    written_at = save.save.window.last / 1e9
    return Piece(
        key=str(save.id),
        order=save.order,
        bytes=save.save.total_bytes if save.is_present else save.universal.bytes,
        is_committed=safe,
        # not read yet: in a moment it is
        committed_at_seconds=(max(known) if known else written_at) if safe else None,
        is_pinned=save.is_pinned,
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
    """By the newest: what the run saves next is like it."""
    newest = next(iter(view.intact[False]), None)
    return newest is not None and UNIVERSAL in _forms(view, newest)


def _remade_bytes(view: JobView) -> int:
    """Universal forms beside their source: under disk pressure they go before a save lacks room.

    A clone frees nothing, and what a ladder left instead of its source stays.
    """
    is_left = view.local_retention.has_rung(UNIVERSAL)
    forms = (s.universal for s in view.saves if not s.is_busy and (s.is_present or not is_left))
    return sum(f.bytes for f in forms if f.state is DerivedState.READY and not f.is_cloned)
