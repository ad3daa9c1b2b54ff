"""A disk under the small world: what lies on it, what a save costs, and what might legally have made room.

Bytes are counted from the world's own books (extents that clones share count once), and the judge of a full
disk reads those books too: nothing here asks the planner what it thinks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedState
from ckptd.core.policy.actions import Action, DropDerived, PointUniversal
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy, Unuploaded
from ckptd.core.policy.view import Disk, JobView, SaveView
from tests.model.world import Remote, World, order_of

CHUNKS = 8
"""A save is written in so many pieces; the daemon has its turns between them."""
TURNS = 6
"""Turns between two pieces, at most: it is woken by each result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One history, drawn from a seed; sizes in bytes, times in ticks."""

    capacity: int
    min_free: int
    sizes: tuple[int, ...]
    pause: int
    """Ticks between saves."""
    convert: int
    """Ticks that a conversion takes; it rests during a save."""
    link: float
    """Bytes a tick that the required remote takes."""
    away: range
    can_clone: bool
    makes_universal: bool
    unuploaded: Unuploaded
    limit: int | None
    trainer_limit: int | None
    """What the trainer keeps by its own rotation."""
    pinned: frozenset[int]
    """Numbers of saves that somebody pins."""


def drawn(seed: int) -> Scenario:
    """Any history: links from a tenth to three times the production, growing saves, outages."""
    dice = random.Random(seed)
    count = dice.randint(6, 14)
    base, size, sizes = 96, 96.0, []
    for _ in range(count):
        if dice.random() < 0.08:
            size *= dice.uniform(1.1, 1.6)
        sizes.append(int(size * dice.uniform(0.95, 1.0)))
    pause = dice.randint(4, 14)
    production = base / (pause + CHUNKS)
    begin = dice.randint(0, count * pause)
    unuploaded: Unuploaded = dice.choice(("keep", "keep", "thin", "delete"))
    return Scenario(
        capacity=int(base * dice.uniform(2.2, 9.0)),
        min_free=dice.randint(16, 40),
        sizes=tuple(sizes),
        pause=pause,
        convert=dice.choice((2, 12)),
        link=production * dice.choice((0.1, 0.3, 0.7, 1.0, 1.5, 3.0)),
        away=range(begin, begin + dice.choice((0, 0, 20, 100))),
        can_clone=dice.random() < 0.5,
        makes_universal=dice.random() < 0.7,
        unuploaded=unuploaded,
        limit=dice.choice((1, 2, 3)) if unuploaded != "keep" else dice.choice((None, 1, 2, 3)),
        trainer_limit=dice.choice((None, None, 2, 3)),
        pinned=frozenset(n for n in range(count) if dice.random() < 0.05),
    )


@dataclass(slots=True)
class DiskWorld(World):
    """The world of a scenario; `written` is the save in flight."""

    scenario: Scenario = field(default_factory=lambda: drawn(0))
    written: int = 0
    left_to_send: float = 0.0
    left_to_convert: int = 0
    removable: frozenset[int] = frozenset()
    """Folders that could legally have gone when the trainer was last at rest."""

    # --- bytes -------------------------------------------------------------------------------------------

    def used(self, without: frozenset[int] = frozenset(), *, is_ours_gone: bool = False) -> int:
        """Bytes on the disk; `without` those folders, and without all that is ours and not being read."""
        total = self.written
        for save in self.saves.values():
            size, busy = save.save.total_bytes, save.id in self.busy()
            is_folder = save.is_present and save.id not in without
            is_ours = busy or not is_ours_gone
            is_hold = save.is_held and is_ours
            is_form = self.converting == save.id and not is_ours_gone
            is_form |= save.universal.state is DerivedState.READY and is_ours
            owners = [is_folder, is_hold, is_form]
            total += size * (min(1, sum(owners)) if self.can_clone else sum(owners))
        return total

    def free(self) -> int:
        """Bytes that the trainer can still write."""
        return self.scenario.capacity - self.used()

    def busy(self) -> frozenset[int]:
        """Saves that a worker reads."""
        sent = {r.shipping for r in self.remotes.values() if r.shipping is not None}
        return frozenset(sent | ({self.converting} if self.converting is not None else set()))

    # --- the daemon --------------------------------------------------------------------------------------

    def view(self) -> JobView:
        """As the daemon would gather it: what is gone altogether is no part of it."""
        view = World.view(self)
        busy = self.busy()
        here = (s for s in view.saves if s.is_present or s.is_held or s.universal.state is DerivedState.READY)
        complete = sorted(self.saves.values(), key=lambda s: s.id)[-5:]
        next_save = int(max((s.save.total_bytes for s in complete), default=0) * 1.1)
        return replace(
            view,
            saves=tuple(replace(s, is_busy=s.id in busy) for s in here),
            local_forms=(UNIVERSAL,) if self.scenario.makes_universal else (),
            remotes=tuple(
                r if self.scenario.makes_universal else replace(r, forms=(ZERO,)) for r in view.remotes
            ),
            unuploaded=self.scenario.unuploaded,
            deletions_left=20,
            disk=Disk(
                free_bytes=self.free(),
                reserve_bytes=next_save + self.scenario.min_free,
                min_free_bytes=self.scenario.min_free,
                can_clone=self.can_clone,
            ),
        )

    def turns(self) -> None:
        """Until nothing more is planned, as results wake the daemon."""
        for _ in range(TURNS):
            actions = plan(self.view()).actions
            for action in actions:
                self.execute(action)
            self.first_scan = False
            if not actions:
                return

    def execute(self, action: Action) -> None:
        """As the world does, and `latest_universal` names what is there."""
        if isinstance(action, DropDerived):
            named = (self.latest_universal or "").rpartition("/")[2]
            assert named != self.saves[action.save_id].save.tag, "latest_universal names what is dropped"
        World.execute(self, action)
        if isinstance(action, PointUniversal) and action.tag:
            forms = {s.save.tag for s in self.saves.values() if s.universal.state is DerivedState.READY}
            assert action.tag in forms, "latest_universal names what is not there"

    def work(self) -> None:
        """One tick of uploads and conversions."""
        self.now_seconds += 1
        for remote in self.remotes.values():
            if remote.shipping is not None:
                if self.left_to_send <= 0:
                    self.left_to_send = float(self.saves[remote.shipping].save.total_bytes)
                self.left_to_send -= self.scenario.link
                if self.left_to_send <= 0 or not remote.is_there:
                    self.left_to_send = 0.0
                    self.finish_upload(remote)
            remote.observe()
        if self.converting is not None and not self.in_flight:
            self.left_to_convert = (self.left_to_convert or self.scenario.convert) - 1
            if self.left_to_convert == 0:
                self.finish_conversion()

    # --- the judge ---------------------------------------------------------------------------------------

    def look_for_room(self) -> None:
        """Remember what could legally go now, while no save is in flight."""
        view = self.view()
        present = [s for s in view.saves if s.is_present and s.is_intact]
        self.removable = frozenset(s.id for s in present if self._may_go(s, present, view.disk.is_short))

    def _may_go(self, save: SaveView, present: list[SaveView], is_short: bool) -> bool:
        """P1, P5 and the policy, by what remotes truly hold."""
        newest = max(s.save.order for s in present)
        order, limit, how = save.save.order, self.local.save_total_limit, self.scenario.unuploaded
        if order == newest or save.save.tag == self.latest or save.is_busy or save.is_pinned or limit is None:
            return False
        safe = [s for s in present if self._is_safe(s)]
        newer_safe = [s for s in safe if s.save.order > order]
        newer = [s for s in present if s.save.order > order and (s in safe or self._is_loose(s))]
        are_there = all(r.is_there for r in self.remotes.values() if r.is_required)
        if how == "delete":
            return sum(s.save.order > order for s in present) >= limit
        if save in safe:
            return are_there and len(newer_safe) >= limit
        return how == "thin" and are_there and self._is_loose(save) and (is_short or len(newer) >= limit)

    def _is_safe(self, save: SaveView) -> bool:
        return all(r.holds(save.save) for r in self.remotes.values() if r.is_required)

    def _is_loose(self, save: SaveView) -> bool:
        """A newer one is held by every required remote."""
        required = [r for r in self.remotes.values() if r.is_required]
        held = [{order_of(c) for c in r.commits.values() if c.form == ZERO} for r in required]
        return any(order > save.save.order for order in set.intersection(*held))

    def was_avoidable(self, size: int) -> bool:
        """The save that did not fit would have, had all that may go made room in time."""
        least = self.used(self.removable, is_ours_gone=True) - self.written
        return self.scenario.capacity - least >= size


@dataclass(frozen=True, slots=True)
class Ending:
    """How a history ended."""

    saves: int
    is_full: bool
    was_avoidable: bool = False


def live(
    scenario: Scenario,
    watch: Callable[[DiskWorld, int], None] | None = None,
    at_tick: Callable[[DiskWorld, int], None] | None = None,
) -> Ending:
    """Play one history until its last save, or until one does not fit.

    `watch`: (world, tick) after each save; `at_tick`: the same after each tick.
    """
    policy = RetentionPolicy(save_total_limit=scenario.limit)
    remotes = {"nas": Remote("nas", True, RetentionPolicy())}
    world = DiskWorld(local=policy, remotes=remotes, can_clone=scenario.can_clone, scenario=scenario)
    tick = 0
    for number, size in enumerate(scenario.sizes):
        for _ in range(scenario.pause):
            tick += 1
            _tick(world, tick, at_tick)
        world.look_for_room()
        world.in_flight = True
        for written in (size * n // CHUNKS for n in range(1, CHUNKS + 1)):
            if written - world.written > world.free():
                return Ending(number, is_full=True, was_avoidable=world.was_avoidable(size))
            world.written = written
            tick += 1
            _tick(world, tick, at_tick)
        _complete(world, number, size)
        if watch is not None:
            watch(world, tick)
    return Ending(len(scenario.sizes), is_full=False)


def _tick(world: DiskWorld, tick: int, at_tick: Callable[[DiskWorld, int], None] | None) -> None:
    for remote in world.remotes.values():
        remote.is_there = tick not in world.scenario.away
    world.work()
    world.turns()
    if at_tick is not None:
        at_tick(world, tick)


def _complete(world: DiskWorld, number: int, size: int) -> None:
    """The save is whole; the trainer rotates."""
    step = 10 * (number + 1)
    world.train(step, f"global_step{step}")
    made = world.saves[len(world.saves)]
    file = made.save.files[0]
    grown = file.model_copy(update={"identity": replace(file.identity, size_bytes=size)})
    resized = made.save.model_copy(update={"files": (grown,)})
    world.saves[made.id] = replace(made, save=resized, is_pinned=number in world.scenario.pinned)
    world.written, world.in_flight = 0, False
    keep = world.scenario.trainer_limit
    present = sorted(s.id for s in world.saves.values() if s.is_present)
    for old in present[:-keep] if keep else ():
        world.trainer_deletes(old)
