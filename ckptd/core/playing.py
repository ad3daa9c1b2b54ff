"""The coming saves of a job, lived in advance: how many of them its disk takes, and what it looks like then.

No formula: what decides for real (`retention.fates`) decides here too, over the checkpoints that are here and
those to come, so that a forecast knows every key that the job file knows (docs/adr/0160). Times are seconds
from now; a COMMIT that is played carries the unix time that it would have.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import merge
from itertools import count
from typing import TYPE_CHECKING

from ckptd.core.optout import loose_under
from ckptd.core.retention import Held, Item, RetentionPolicy, fates
from ckptd.core.save import Order
from ckptd.core.view import UNIVERSAL, ZERO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.permit import Unuploaded

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
_ZERO = frozenset({ZERO})
_BOTH = frozenset({ZERO, UNIVERSAL})
_ALONE = frozenset({UNIVERSAL})


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


def play(ground: Ground, pace: Pace) -> Played:
    """Live the coming saves; the same ground and pace always give the same, so what was played is known."""
    if len(ground.pieces) > MOST_PIECES:
        ground = replace(ground, pieces=_moving(ground))
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
        if self.ground.others or not _counts_alone(policy) or self.ground.trainer_keeps is not None:
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
            if is_at_rest:
                self._settle()
            elif self.ground.unuploaded != "keep":
                self._judge()
        self.now = max(self.now, until)

    def _begin(self) -> bool:
        """The newest that waits."""
        waiting = (p for p in self.pieces.values() if p.is_sent and not p.is_committed)
        willing = (p for p in waiting if p.key not in self.going)
        newest = max(willing, key=lambda p: p.order, default=None)
        if newest is None:
            return False
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
        is_short = self.free < self.ground.reserve_bytes
        self.going = _going(list(self.pieces.values()), self.ground, self.sent, is_short=is_short)

    # --- other jobs --------------------------------------------------------------------------------------

    def _tell(self, in_flight: int) -> None:
        self.taken.append((self.now, self.ground.free_bytes - self.free + in_flight))

    def _others(self, at: float) -> int:
        """What they will have taken by then, or give back."""
        place = bisect_right(self.ground.others, (at, math.inf))
        return self.ground.others[place - 1][1] if place else 0


def _moving(ground: Ground) -> tuple[Piece, ...]:
    """Without what stays for ever by its step, which takes no newer one's place where all goes by number."""
    policy = ground.policy.model_copy(update={"keep_every_steps": None, "keep_steps": (), "ephemeral": None})
    if not _counts_alone(policy):
        return ground.pieces
    first = (policy.save_total_limit or 0) + 1
    newest_first = sorted(ground.pieces, key=lambda p: p.order, reverse=True)
    rest = (
        p for p in newest_first[first:] if not p.is_committed or not ground.policy.keeps_step(p.order.step)
    )
    return (*newest_first[:first], *rest)


def _counts_alone(policy: RetentionPolicy) -> bool:
    """What goes is a matter of how many there are."""
    keys = (policy.keep_every_steps, policy.keep_every_seconds, policy.keep_within_seconds, policy.keep_best)
    others = (policy.keep_steps, policy.ephemeral, policy.ladder)
    return not any(keys) and not any(others)


def _going(
    pieces: Sequence[Piece], ground: Ground, sent: str | None, *, is_short: bool
) -> dict[str, frozenset[str]]:
    """What may go now, with the forms that stay of it: as core/keeping.py decides it for a view."""
    committed = [p for p in pieces if p.is_committed]
    safe = max((p.order for p in committed), default=None)
    loose = [p for p in pieces if not p.is_committed and _may_go_uncommitted(p, ground, safe)]
    by_policy = fates([_held(p) for p in committed], ground.policy)
    mine = by_policy
    if loose:
        everything = [_held(p) for p in (*committed, *loose)]
        policy = loose_under(ground.policy, ground.unuploaded, is_short=is_short)
        mine = fates(everything, policy)
        if ground.unuploaded == "delete":
            by_policy = fates(everything, ground.policy)
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


def _held(piece: Piece) -> Held:
    item = Item(
        key=piece.key,
        order=piece.order,
        pinned=piece.is_pinned,
        committed_at_seconds=piece.committed_at_seconds,
        score=piece.score,
    )
    return Held(item=item, forms=piece.forms, standing=piece.forms & _ALONE)
