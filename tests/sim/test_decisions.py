"""What people decide, judged: each rule fails where ckptd does not heed it, in a life that asks for it."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.storage.remote import observe
from ckptd.storage.stores.open import open_store
from tests.sim.decisions import HOUR_SECONDS, Keys
from tests.sim.judge import Broken
from tests.sim.life import HEALED_SECONDS
from tests.sim.seeded import seeded
from tests.sim.world import NAS, NAS_URL, World, job_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, kw_only=True)
class Play:
    """What happens in a job of these limits; `stay`: steps whose checkpoints lie here at the end."""

    script: Callable[[World], None]
    local: int | None = None
    remote: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    words: str
    stay: set[int]


@contextmanager
def living(play: Play) -> Iterator[World]:
    remotes = ((NAS, True, play.remote),)
    world = World(1, job_config(remotes, play.local, "all", **play.more))
    world.enter()
    try:
        world.kernel.mkdir(NAS_URL)
        fd = world.kernel.open("/sim/nas", os.O_RDONLY)
        world.kernel.fsync(fd)
        world.kernel.close(fd)
        yield world
    finally:
        world.leave()


def save(world: World, *steps: int) -> None:
    """One after the other, each committed before the next begins."""
    for step in steps:
        world.kernel.now_seconds += 90
        world.trainer.begin(step, random.Random(step))
        world.trainer.end()
        rest(world)


def rest(world: World) -> None:
    world.live_on(10.0, random.Random(3))
    world.live_on(HEALED_SECONDS, random.Random(4), world.has_rested)
    world.look()


def _pinned_here(world: World) -> None:
    save(world, 1)
    world.decide("pin", "global_step1")
    save(world, 2, 3)


def _pinned_there(world: World) -> None:
    save(world, 1)
    world.decide("pin", "global_step1")
    save(world, 2, 3)
    world.trainer.rotate(1)
    rest(world)
    assert len(world.judge.live(NAS)) == 2


def _multiples(world: World) -> None:
    save(world, 2, 3, 5)


def _the_second_is_the_best(world: World) -> None:
    save(world, 2, 3, 5)
    losses = [s.loss for s in world.trainer.saves]
    assert min(losses) == losses[1]


def _a_new_limit(world: World) -> None:
    save(world, *range(1, 9))
    world.kernel.now_seconds += 3 * HOUR_SECONDS
    world.configure(job_config(((NAS, True, None),), 1, "all"))
    rest(world)


PLAYS = {
    "pinned here": (
        "pins are not looked at",
        Play(script=_pinned_here, local=1, words="pinned", stay={1, 3}),
    ),
    "pinned there": (
        "pins are not looked at",
        Play(script=_pinned_there, remote=1, words="pinned", stay={3}),
    ),
    "multiples": (
        "keep_every_steps is not looked at",
        Play(script=_multiples, local=1, more={"every": 2}, words="keep_every_steps 2", stay={2, 5}),
    ),
    "the best": (
        "keep_best is not looked at",
        Play(script=_the_second_is_the_best, local=1, more={"best": True}, words="keep_best", stay={3, 5}),
    ),
    "a new limit": (
        "deletions are not limited",
        Play(script=_a_new_limit, words="one too many", stay={4, 5, 6, 7, 8}),
    ),
}


@pytest.mark.parametrize("name", PLAYS)
def test_what_was_decided_holds_and_the_judge_sees_it(name: str) -> None:
    defect, play = PLAYS[name]
    with living(play) as world:
        play.script(world)
        assert {s.step for s in world.trainer.saves if world.is_intact(s)} == play.stay
    with living(play) as world, seeded(defect), pytest.raises(Broken, match=f"P5.*{play.words}"):
        play.script(world)


def test_a_rewind_is_a_new_branch_and_a_script_sees_it() -> None:
    """No judge of lives does: to it a higher step always may be the newer one."""

    def rewound(world: World) -> set[int]:
        save(world, 5, 8, 3, 4)
        pointed = open_store(NAS_URL).get("latest")
        assert pointed is not None
        return {s.step for s in world.trainer.saves if world.is_intact(s)} | {int(pointed[11:]) * 100}

    play = Play(script=_multiples, local=2, words="", stay=set())
    with living(play) as world:
        assert rewound(world) >= {3, 4, 400}
    with living(play) as world, seeded("a rewind is no new branch"):
        found = rewound(world)
        assert 3 not in found
        assert 800 in found


def test_a_remote_that_lost_a_pin_has_it_again() -> None:
    """Put back from a snapshot: a node that knows that remote alone would let the checkpoint go."""
    play = Play(script=_pinned_here, local=1, words="", stay={1, 4})
    with living(play) as world:
        play.script(world)
        store = open_store(NAS_URL)
        for info in list(store.list("_ckptd/pins/")):
            store.delete(info.key)
        assert not observe.is_pinned(store, "global_step1")
        save(world, 4)
        assert observe.is_pinned(store, "global_step1")
        assert {s.step for s in world.trainer.saves if world.is_intact(s)} == play.stay


def test_a_pin_that_was_taken_back_keeps_nothing() -> None:
    play = Play(script=_pinned_here, local=1, words="", stay={4})
    with living(play) as world:
        play.script(world)
        world.decide("unpin", "global_step1")
        save(world, 4)
        assert {s.step for s in world.trainer.saves if world.is_intact(s)} == play.stay


@pytest.mark.parametrize(
    ("keys", "step", "newer", "stays"),
    [
        (Keys(limit=None), 1, 9, True),
        (Keys(limit=2), 1, 1, True),
        (Keys(limit=2), 1, 2, False),
        (Keys(limit=1, every=3), 6, 9, True),
        (Keys(limit=1, every=3), 7, 9, False),
        (Keys(limit=1, best=True), 7, 9, False),
        (Keys(limit=1, rung=4), 1, 3, True),
        (Keys(limit=1, rung=4), 1, 4, False),
    ],
)
def test_what_keys_keep_as_a_person_counts(*, keys: Keys, step: int, newer: int, stays: bool) -> None:
    assert (keys.why_kept(step, newer) is not None) == stays


@pytest.mark.parametrize(("set_back", "later"), [(0.0, {8}), (-3600.0, {8, 3})])
def test_what_may_count_as_newer(set_back: float, later: set[int]) -> None:
    """Lives 2403618 and 2600700: rewound from 8 to 3, then 6; times or lists mislead."""
    with living(Play(script=_multiples, words="", stay=set())) as world:
        save(world, 8, 3)
        world.kernel.wall_offset_seconds += set_back
        save(world, 6)
        judge, newest = world.judge, world.trainer.saves[-1]
        assert {s.step for s in judge._later(newest)} == later
        judge.lost_journal()
        assert {s.step for s in judge._later(newest)} == later, "the lists were whole"
        world.set_mood(NAS, "stale")
        judge.lost_journal()
        assert {s.step for s in judge._later(newest)} == {8, 3}


def test_with_an_open_order_as_many_stay_as_the_limit_says() -> None:
    """Which of them is not judged then."""
    with living(Play(script=_multiples, local=2, words="", stay=set())) as world:
        save(world, 1, 2)
        world.judge.was_stale = True
        world.judge.lost_journal()
        with pytest.raises(Broken, match=r"P5.*save_total_limit 2, and 1 are newer"):
            world.judge._leaves("global_step1", world.kernel.now_seconds)


@pytest.mark.parametrize("folder", ["trash", "staging", "hold"])
def test_what_is_left_lying_is_seen(folder: str) -> None:
    """Half-done work, and a hold that nobody wants, at rest."""
    with living(Play(script=_pinned_here, local=1, words="", stay={4})) as world:
        save(world, 1)
        world.judge_rest()
        place = f"/sim/nvme/run/_ckptd/{folder}"
        for path in (place, f"{place}/global_step9.9"):
            with suppress(FileExistsError):
                world.kernel.mkdir(path)
        with pytest.raises(Broken, match=f"P7.*{folder} holds .*global_step9"):
            world.judge_rest()


def test_a_journal_that_knows_something_else_is_seen() -> None:
    """What the daemon has in mind is what the next one will read."""
    with living(Play(script=_pinned_here, local=1, words="", stay={4})) as world:
        save(world, 1)
        world.judge_rest()
        assert world.job is not None and world.job.state is not None
        (records,) = world.job.state.uploads.records.values()
        (key,) = records
        records[key] = records[key].model_copy(update={"generation": 7})
        with pytest.raises(Broken, match=r"P7.*the journal knows other uploads"):
            world.judge_rest()


def test_a_trainer_that_keeps_one_calls_nobody_while_a_newer_save_is_here() -> None:
    """The newest safe one goes before the newer is sealed: an alarm at first, a note once that is known."""
    with living(Play(script=_pinned_here, words="", stay=set())) as world:
        save(world, 1)
        world.kernel.now_seconds += 90
        world.trainer.begin(2, random.Random(2))
        world.trainer.end()
        world.trainer.rotate(1)
        assert world.job is not None
        seen = set()
        for _ in range(300):  # half a second each; nothing is uploaded meanwhile
            world.kernel.now_seconds += 0.5
            world.turn()
            for task in list(world.tasks):
                world._run(task)
            seen |= {p.severity for p in world.job.problems.all() if p.code == "vanished-kept"}
        assert seen == {"note"}
