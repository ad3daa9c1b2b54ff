"""The number of saves that fit, against a disk that is lived save by save (docs/adr/0195)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.core.model.save import Order, SaveWindow
from ckptd.core.policy import capacity, retention
from ckptd.core.policy.capacity import (
    DiskCheckpoint,
    DiskUse,
    Saved,
    SaveRhythm,
    disk_use_of,
    forecast,
    rotation_of,
    saves_that_fit,
)
from ckptd.core.policy.retention import Ephemeral, RetentionPolicy, Tier
from ckptd.core.policy.view import Disk
from ckptd.daemon.health.capacity import _CURES
from tests.support.core_views import job_view, resized, save_view, sealed

EVERY = 600.0
SIZE = 10**6

Look = tuple[list[list[float]], float | None, float]
"""Checkpoints ([step, seconds of the COMMIT or -1]), the step of what is sent, and what is left of it."""


@dataclass(slots=True)
class Lived:
    """A disk, its trainer and its link, in ticks of ten seconds: nothing here knows the formula."""

    room: int
    limit: int | None
    link: float
    """Bytes a second; 0: nothing is taken."""
    every_steps: int | None = None
    within: float | None = None
    trainer: int | None = None
    delete: bool = False
    flight: float = 0.0

    def live(self, most: int) -> tuple[int | None, list[Look]]:
        """How many saves fit, None: as many as there were; and what lay there after each."""
        here: list[list[float]] = []
        looks: list[Look] = []
        sent: list[float] | None = None
        left, tick = 0.0, 10.0
        for number in range(most):
            if self.trainer is not None and not self.limit:
                here = here[-self.trainer :]
            begins, ends = EVERY * (number + 1) - self.flight, EVERY * (number + 1)
            now = EVERY * number
            while now < ends:
                if begins <= now < begins + tick and len(here) * SIZE + SIZE > self.room:
                    return number, looks
                now += tick
                waits = [one for one in here if one[1] < 0]
                if sent is None and waits and self.link:
                    sent, left = waits[-1], SIZE
                if sent is not None:
                    left -= self.link * tick
                    if left <= 1e-6:
                        sent[1], sent = now, None
                if now < begins:
                    here = [one for one in here if one is sent or self.keeps(one, here)]
            here.append([10 * (number + 1), -1.0])
            looks.append(([list(one) for one in here], sent[0] if sent is not None else None, left))
        return None, looks

    def keeps(self, one: list[float], here: list[list[float]]) -> bool:
        counted = here if self.delete else [other for other in here if other[1] >= 0]
        if self.limit is None or one is here[-1] or (one[1] < 0 and not self.delete):
            return True
        is_old = one[0] % self.every_steps == 0 if self.every_steps else False
        newest = max((other[1] for other in counted), default=0.0)
        is_young = self.within is not None and (one[1] < 0 or newest - one[1] <= self.within)
        return one in counted[-self.limit :] or is_old or is_young


def told_after(disk: Lived, look: Look, number: int) -> Any:
    """What the forecast says right after that save."""
    here, sent, left = look
    now = EVERY * number
    saves = [Saved(at_seconds=EVERY * n, bytes=SIZE, step=10 * n) for n in range(1, number + 1)]
    saves = [replace(save, written_seconds=disk.flight) for save in saves]
    pieces = tuple(
        DiskCheckpoint(
            key=str(int(step)),
            order=Order(1, int(step), int(step)),
            bytes=SIZE,
            is_committed=at >= 0,
            committed_at_seconds=at if at >= 0 else None,
        )
        for step, at in here
    )
    policy = RetentionPolicy(
        save_total_limit=disk.limit, keep_every_steps=disk.every_steps, keep_within_seconds=disk.within
    )
    disk_use = DiskUse(
        free_bytes=disk.room - SIZE * len(here),
        pieces=pieces,
        policy=policy,
        unuploaded="delete" if disk.delete else "keep",
        link_bytes_per_second=disk.link or None,
        sent=str(int(sent)) if sent is not None else None,
        left_bytes=int(left),
        trainer_keeps=disk.trainer,
    )
    return forecast(saves, disk_use, now_seconds=now)


@st.composite
def disks(draw: Any) -> Lived:
    """Around the line: rooms for a few saves, links from none to five times what comes."""
    return Lived(
        room=draw(st.integers(5, 16)) * SIZE + draw(st.sampled_from([0, 1, SIZE - 1])),
        limit=draw(st.sampled_from([None, 1, 2, 3, 8])),
        link=SIZE / EVERY * draw(st.sampled_from([0, 0.149, 0.31, 0.57, 0.83, 1.7, 5])),
        every_steps=draw(st.sampled_from([None, None, 10, 30])),
        within=draw(st.sampled_from([None, None, 1300.0, 3100.0, 90_000.0])),
        trainer=draw(st.sampled_from([None, None, 2, 4])),
        delete=draw(st.booleans()),
        flight=draw(st.sampled_from([10.0, 60.0, 200.0])),
    )


@given(disks())
@example(Lived(room=9 * SIZE, limit=1, link=SIZE / EVERY * 0.83, every_steps=30, within=3100.0, flight=200.0))
@settings(max_examples=150, deadline=None)
def test_what_is_foretold_is_what_is_lived(disk: Lived) -> None:
    """Never silent from three saves before the disk is full, and no alarm where it does not fill.

    Within a save of the truth, or of what a link of one in a hundred more or less makes of it; within three
    where a slow link decides which saves keep_every_steps or keep_within will find, four with both.
    """
    margin = 1 + 2 * bool(disk.every_steps or disk.within) + bool(disk.every_steps and disk.within)
    if disk.limit is None and disk.trainer is None:
        disk.every_steps = disk.within = None
    if disk.limit is not None:
        disk.trainer = None
    full, looks = disk.live(60)
    near = [replace(disk, link=disk.link * by).live(60)[0] or 60 for by in (0.99, 1.0, 1.01)]
    for number in range(max(2, (full or 58) - 3), full if full is not None else 59):
        told = told_after(disk, looks[number - 1], number)
        if full is not None:
            assert told.full_in_saves is not None, (disk, number, full)
            foretold = number + told.full_in_saves
            assert min(near) - margin <= foretold <= max(near) + margin, (disk, number, near, told)
        elif min(near) == 60:
            assert told.full_in_saves is None or told.full_in_saves > 3, (disk, number, told)


def test_every_retention_key_can_be_what_fills_a_disk() -> None:
    """And a person is told what to change."""
    assert set(capacity._KEYS) == set(RetentionPolicy.model_fields) - {"save_total_limit"}
    assert set(capacity._KEYS) == set(_CURES)


def run(count: int) -> list[Saved]:
    return [Saved(at_seconds=EVERY * n, bytes=SIZE, step=10 * n) for n in range(1, count + 1)]


def disk_use(room: int, count: int, policy: RetentionPolicy, **more: Any) -> DiskUse:
    """So many committed ones, the disk has room for `room` further."""
    orders = [Order(1, 10 * n, n) for n in range(1, count + 1)]
    pieces = tuple(
        DiskCheckpoint(
            key=str(o.step), order=o, bytes=SIZE, is_committed=True, committed_at_seconds=EVERY * o.save_seq
        )
        for o in orders
    )
    settings: dict[str, Any] = {"pieces": pieces, "policy": policy, "link_bytes_per_second": math.inf}
    return DiskUse(free_bytes=room * SIZE, **settings | more)


@pytest.mark.parametrize(
    ("policy", "fit", "kept_by"),
    [
        ({"save_total_limit": 2, "keep_within_seconds": 7200.0}, 4, "keep_within_seconds"),
        ({"keep_within_seconds": 7200.0}, 4, "keep_within_seconds"),
        ({"save_total_limit": 2, "keep_every_seconds": 600.0}, 4, "keep_every_seconds"),
        # of what is here three go, and one of two that come
        ({"save_total_limit": 1, "keep_every_seconds": 1200.0}, 12, "keep_every_seconds"),
        ({"ephemeral": Ephemeral(every_steps=20, keep=1)}, 12, "ephemeral"),
        ({"save_total_limit": 1, "ladder": (Tier(form="universal", after_newer=1),)}, 4, "ladder"),
        # five go, and the newest of those that are here
        ({"save_total_limit": 1, "keep_steps": tuple(range(70, 200, 10))}, 10, "keep_steps"),
    ],
)
def test_every_key_that_keeps_fills_a_disk(policy: dict[str, Any], fit: int, kept_by: str) -> None:
    """However fast the link is; each is named."""
    told = forecast(
        run(6), disk_use(4, 6, RetentionPolicy(**policy), makes_universal=True), now_seconds=3600.0
    )
    assert told.full_in_saves is not None
    assert told.full_in_saves == fit
    assert told.kept_by == (kept_by,)
    assert not told.is_limit_too_high


def test_what_lets_go_in_time_fills_nothing() -> None:
    """A span that is over before the disk is full, and a ladder that ends."""
    ends = (Tier(form="universal", after_newer=2), Tier(form="gone", after_newer=4))
    for policy in (
        RetentionPolicy(save_total_limit=1, keep_within_seconds=1800.0),
        RetentionPolicy(save_total_limit=1, ladder=ends),
        RetentionPolicy(save_total_limit=2, ephemeral=Ephemeral(every_steps=20, keep=1)),
    ):
        both = disk_use(3, 6, policy, makes_universal=True)
        forms = frozenset({ZERO, UNIVERSAL})
        both = replace(both, pieces=tuple(replace(piece, forms=forms) for piece in both.pieces))
        assert forecast(run(6), both, now_seconds=3600.0).full_in_saves is None


def test_nothing_is_let_go_while_removals_rest() -> None:
    """A pause, a drain: what is sent does not matter."""
    here = disk_use(3, 2, RetentionPolicy(save_total_limit=2))
    assert forecast(run(6), here, now_seconds=3600.0).full_in_saves is None
    view = job_view(
        [save_view(n, resized(sealed(10 * n), SIZE)) for n in (1, 2)],
        local_retention=RetentionPolicy(save_total_limit=2),
        disk=Disk(free_bytes=3 * SIZE, reserve_bytes=0, can_clone=False),
    )
    for told, paused in ((None, False), (3, True)):
        here = disk_use_of(replace(view, is_paused=paused), math.inf, None)
        assert forecast(run(6), here, now_seconds=3600.0).full_in_saves == told


def test_a_first_commit_below_the_limit_frees_nothing() -> None:
    """Eight stay: of eleven places two are taken, and a link for three of four saves spares none."""
    saves = run(2)
    link = SIZE / EVERY * 0.75
    here = disk_use(7, 2, RetentionPolicy(save_total_limit=8), link_bytes_per_second=link)
    told = forecast(saves, here, now_seconds=1200.0)
    assert told.full_in_saves == 7


def gone(number: int, *, at: float | None, state: str = "vanished") -> Any:
    made = sealed(10 * number, save_seq=number)
    window = SaveWindow(first=int(EVERY * number * 1e9), last=int(EVERY * number * 1e9))
    return SimpleNamespace(save=made.model_copy(update={"window": window}), state=state, ended_at=at)


def test_a_trainer_that_rotates_keeps_as_many_as_it_kept() -> None:
    """Learned from what went by another hand; a rotation that is due is not one more to keep."""
    rows = [gone(n, at=EVERY * (n + 2) + 5) for n in (1, 2, 3, 4)]
    rows += [gone(n, at=None, state="present") for n in (5, 6)]
    learned = rotation_of(rows)
    assert learned is not None
    assert learned.keeps == 2
    due = rotation_of([*rows, gone(7, at=None, state="present")])
    assert due == learned
    told = forecast(run(6), disk_use(1, 2, RetentionPolicy(), trainer_keeps=2), now_seconds=3600.0)
    assert told.full_in_saves is None
    short = forecast(run(6), disk_use(1, 1, RetentionPolicy(), trainer_keeps=2), now_seconds=3600.0)
    assert short.full_in_saves == 1, "it keeps two, and the third comes before one goes"


def test_what_a_person_removed_once_is_no_rotation() -> None:
    """Several at once; and what went long ago."""
    here = [gone(n, at=None, state="present") for n in (5, 6, 7, 8)]
    at_once = [gone(n, at=EVERY * 7 + 5) for n in (1, 2, 3, 4)]
    assert rotation_of([*at_once, *here]) is None
    ago = [gone(n, at=EVERY * (n + 1) + 5) for n in (1, 2)]
    assert rotation_of([*ago, *here]) is None
    assert rotation_of([]) is None


@given(st.integers(1, 4), st.integers(4, 30), st.sampled_from([0.5, 1.0, 2.0, 3.0]))
def test_two_jobs_fill_one_disk_together(limit: int, room: int, times: float) -> None:
    """Each counts on what the other will have taken: one without a limit, one that rotates in time."""
    policy = RetentionPolicy(save_total_limit=limit)
    pace = SaveRhythm(
        sizes_bytes=(SIZE,), every_seconds=EVERY * times, flight_seconds=10.0, since_last_seconds=0.0
    )
    mine = SaveRhythm(sizes_bytes=(SIZE,), every_seconds=EVERY, flight_seconds=10.0)
    alone = saves_that_fit(DiskUse(free_bytes=room * SIZE), mine)
    rotated = ((disk_use(10**6, limit, policy), pace),)
    beside = saves_that_fit(DiskUse(free_bytes=room * SIZE, others=rotated), mine)
    assert alone.saves == room
    assert room - 1 <= beside.saves <= room, "it gives back what it takes"
    endless = ((DiskUse(free_bytes=10**6 * SIZE), pace),)
    both = saves_that_fit(DiskUse(free_bytes=room * SIZE, others=endless), mine)
    count = 0
    while (count + 1) + math.floor((count + 1) / times) <= room:
        count += 1
    assert abs(both.saves - count) <= 1


@pytest.mark.parametrize("link", [None, SIZE / EVERY * 5])
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_disk_that_cannot_hold_the_limit_and_one_is_never_silent(limit: int, link: float | None) -> None:
    """The oldest is deleted only after the newest is committed; with room for one more nothing is said."""
    policy = RetentionPolicy(save_total_limit=limit)
    short = forecast(run(6), disk_use(0, limit, policy, link_bytes_per_second=link), now_seconds=3600.0)
    assert short.full_in_saves == 0
    room = disk_use(1, limit, policy, link_bytes_per_second=SIZE / EVERY * 5)
    assert forecast(run(6), room, now_seconds=3600.0).full_in_saves is None


def asked(patch: pytest.MonkeyPatch) -> list[int]:
    """How many checkpoints each question to the policy was about."""
    found: list[int] = []
    real = retention.apply_policy

    def apply_policy(held: Any, policy: Any) -> Any:
        found.append(len(held))
        return real(held, policy)

    patch.setattr(capacity, "apply_policy", apply_policy)
    return found


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize(
    ("policy", "fit"),
    [
        (RetentionPolicy(save_total_limit=2), None),
        (RetentionPolicy(save_total_limit=2, keep_every_steps=10), 3),
        (RetentionPolicy(save_total_limit=2, keep_every_seconds=10.0), 3),
    ],
)
def test_ten_thousand_checkpoints_cost_little(
    monkeypatch: pytest.MonkeyPatch, policy: RetentionPolicy, fit: int | None, is_committed: bool
) -> None:
    """The policy is asked about 20 times, of the newest thousand; older ones count as they lie."""
    questions, count = asked(monkeypatch), 10_000
    here = disk_use(3, count, policy, link_bytes_per_second=2 * SIZE / EVERY)
    if not is_committed:
        waiting = tuple(replace(p, is_committed=False, committed_at_seconds=None) for p in here.pieces)
        here = replace(here, pieces=waiting)
    pace = SaveRhythm(sizes_bytes=(SIZE,), every_seconds=EVERY, last_step=10 * count, steps=10)
    told = saves_that_fit(here, pace)
    assert len(questions) <= 20
    assert max(questions) <= 1100
    assert not is_committed or (told.saves if told.is_full else None) == fit
