"""The coming saves of a job, lived in advance: how many of them its disk takes, and what it looks like then.

No formula: what decides for real (`retention.fates`) decides here too, over the checkpoints that are here and
those to come, so that a forecast knows every key that the job file knows (docs/adr/0160). Times are seconds
from now; a COMMIT that is played carries the unix time that it would have.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from heapq import merge
from itertools import count
from typing import TYPE_CHECKING

from ckptd.core.leaving import goes_by_number, going, moving
from ckptd.core.pieces import Piece, Played
from ckptd.core.save import Order
from ckptd.core.view import UNIVERSAL, ZERO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.pieces import Ground, Pace

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
