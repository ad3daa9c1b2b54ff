"""Histories in which what a planted defect needs is brought about, whatever the daemons do first.

Which random histories show a rare defect changes with the order in which the planner acts. Here the trainer
and the machines follow a script instead of a seed: two nodes, a network without faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tests.fleet.judge import Broken
from tests.fleet.node import SPREAD_SECONDS, Job
from tests.fleet.story import Fleet, Shape, Told, lived

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fleet.node import Daemon, Machine

NODES = 2
ALL = tuple(range(NODES))
QUIET_SECONDS = 60.0
"""Long enough for all that a save gives to do."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """What happens, and how the job is configured."""

    script: Callable[[Directed], None]
    local_limit: int | None = None
    remote_limit: int | None = None
    best_step: int | None = None
    """What the trainer calls the best, throughout."""
    odd_limits: tuple[int, int] | None = None
    """Of the second node, where it is configured otherwise: here, there."""
    late_prunes: float = 0.0
    """How often all workers are busy while a prune is due."""
    is_saved_while_busy: bool = False
    """The trainer saves once before a worker is free for a node's first prune."""


class Directed(Fleet):
    """A play under way; its scripts call what is public here."""

    def __init__(self, play: Play, *, is_loud: bool = False) -> None:
        self.play = play
        self.waited: set[str] = set()
        """Nodes whose first prune was begun late."""
        super().__init__(0, Shape(nodes=NODES, checkpoints=0, faults=False), is_loud=is_loud)
        self.judge.best_seconds = QUIET_SECONDS / 2

    def _drawn_job(self) -> Job:
        return Job(
            ranks=NODES,
            stage=3,
            are_pickles_equal=True,
            has_replicas=True,
            local_limit=self.play.local_limit,
            remote_limit=self.play.remote_limit,
        )

    def _drawn_odd(self) -> int | None:
        return None if self.play.odd_limits is None else NODES - 1

    def _machine(self, slot: int, name: str = "") -> Machine:
        made = super()._machine(slot, name)
        if slot == self.odd and self.play.odd_limits is not None:
            here, there = self.play.odd_limits
            made.job = replace(self.job, local_limit=here, remote_limit=there)
        return made

    def start(self, slot: int) -> None:
        super().start(slot)
        daemon = self.daemons[slot]
        assert daemon is not None
        daemon.late_prunes = self.play.late_prunes
        if self.play.is_saved_while_busy:
            daemon.while_busy = lambda: self._save_beside(daemon)  # type: ignore[method-assign]

    def _save_beside(self, daemon: Daemon) -> None:
        if daemon.machine.name not in self.waited:
            self.waited.add(daemon.machine.name)
            self.engine.at(self.engine.now, partial(self._written, self.step + 10, ALL))
            daemon.program.wait(1.0)

    def run(self) -> Told:
        for slot in range(NODES):
            self.start(slot)
        self.wait(10.0)
        self.play.script(self)
        self.wait(300.0)
        self.end()
        return self.told

    # --- what a script says ----------------------------------------------------------------------------

    def save(self, step: int, slots: tuple[int, ...] = ALL, *, seconds: float = QUIET_SECONDS) -> None:
        """The trainer saves, on these nodes alone; then this time passes."""
        self._written(step, slots)
        self.wait(seconds)

    def _written(self, step: int, slots: tuple[int, ...]) -> None:
        self.step = step
        self.number += 1
        self.told.saves += 1
        self.say(f"save {self.number} of step {step}")
        best = self.play.best_step
        self.words[self.number] = None if best is None else f"global_step{best}"
        for slot in slots:
            self._write(slot, self.number, step)

    def delete(self, step: int, slots: tuple[int, ...] = ALL) -> None:
        """The trainer deletes a checkpoint of its own, on these nodes alone."""
        self.say(f"the trainer deletes step {step}")
        for slot in slots:
            del self.machines[slot].disk[f"global_step{step}"]
        for daemon in self.daemons:
            if daemon is not None:
                daemon.program.stir()

    def lose_state(self, slot: int) -> None:
        """The state directory of a node whose daemon is down is gone."""
        self.names += 1
        self.machines[slot].lose_journal(f"id{self.names:04d}")

    def restore(self, number: int, step: int, slot: int) -> None:
        """A person puts an earlier save back."""
        self.say(f"save {number} is restored on n{slot}")
        del self.machines[slot].disk[f"global_step{step}"]
        self._write(slot, number, step)

    def die_with_its_manifest(self, slot: int) -> None:
        """The daemon of that node dies as soon as its part is listed: the last, and nobody commits."""
        name, on_change = self.machines[slot].name, self.remote.on_change

        def change(verb: str, key: str, before: bytes | None, after: bytes | None) -> None:
            on_change(verb, key, before, after)
            if "/nodes/" in key and key.rpartition("/")[2].startswith(f"{name}~"):
                self.remote.on_change = on_change
                self.engine.at(self.engine.now, partial(self.stop, slot))

        self.remote.on_change = change

    def judged_now(self) -> None:
        """As if the history ended here.

        Raises:
            Broken: something is not as it must be at an end.
        """
        disks, tags = self._disks()
        self.judge.at_the_end(disks, tags, [daemon for daemon in self.daemons if daemon is not None])

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.engine.run(self.engine.now + seconds)


def _two_halves(fleet: Directed) -> None:
    # further apart than one save takes
    fleet.save(10, (0,), seconds=2 * SPREAD_SECONDS)
    fleet.save(10, (1,))
    fleet.save(20)


def _one_tag_again(fleet: Directed) -> None:
    fleet.save(10)
    fleet.save(10)


def _one_that_is_not_here(fleet: Directed) -> None:
    fleet.save(10)
    fleet.save(20)
    fleet.delete(20)
    fleet.save(30)


def _rewound_behind_its_back(fleet: Directed) -> None:
    fleet.save(10)
    fleet.stop(1)
    fleet.save(30)
    fleet.save(20)
    fleet.start(1)  # what it finds at once it takes in the order of steps


def _restored_and_not_known(fleet: Directed) -> None:
    fleet.save(10)
    fleet.save(20)
    fleet.stop(1)
    fleet.lose_state(1)
    fleet.save(10, (1,))  # of step 10 the new journal knows this one
    fleet.start(1)
    fleet.wait(QUIET_SECONDS)
    fleet.restore(1, 10, 1)
    fleet.wait(QUIET_SECONDS)
    fleet.save(30)


def _always_in_flight(fleet: Directed) -> None:
    fleet.save(10)
    for step in range(20, 150, 10):
        fleet.save(step, seconds=4.0)


def _three(fleet: Directed) -> None:
    for step in (10, 20, 30):
        fleet.save(step)


def _dies_before_its_commit(fleet: Directed) -> None:
    fleet.stop(1)
    fleet.save(10)
    fleet.wait(1500.0)  # by now the other asks every eight minutes
    fleet.die_with_its_manifest(1)
    fleet.start(1)
    fleet.wait(150.0)
    if not fleet.committed_at:
        raise Broken("all parts are listed for minutes, and nobody commits")
    fleet.start(1)


def _three_and_one_deleted(fleet: Directed) -> None:
    _three(fleet)
    fleet.delete(10)


PLAYS = {
    "parts of others not heard of": Play(script=_dies_before_its_commit),
    "saves not compared": Play(script=_two_halves),
    "generations skipped": Play(script=_one_tag_again),
    "retired by local view": Play(script=_one_that_is_not_here, remote_limit=2),
    "orders not taken from COMMITs": Play(script=_rewound_behind_its_back, local_limit=1),
    "orders only raised by COMMITs": Play(script=_restored_and_not_known, local_limit=2),
    "the best known to one node here": Play(script=_three, local_limit=1, best_step=10),
    "the best known to one node there": Play(script=_three_and_one_deleted, remote_limit=1, best_step=10),
    "prunes beside a save": Play(script=_always_in_flight, local_limit=1),
    "late prunes not looked at again": Play(
        script=_three, local_limit=1, late_prunes=1.0, is_saved_while_busy=True
    ),
    "other configurations not noticed here": Play(script=_three, odd_limits=(1, 1)),
    "other configurations not noticed there": Play(script=_three_and_one_deleted, odd_limits=(1, 1)),
}
"""By the defect that it shows."""


def act(play: Play, *, is_loud: bool = False) -> Told:
    """Live a play; `broken` says what went wrong."""
    return lived(Directed(play, is_loud=is_loud))
