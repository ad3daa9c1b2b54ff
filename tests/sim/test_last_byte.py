"""A whole node beside the Hugging Face Trainer at stage 3: COMMITs come before any quiet time, none is mixed.

Every shard is written twice, rank 1's random state when it likes; then, in half of the lives, the same
checkpoint is written again while the first is being uploaded, or just was.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.sim.judge import Broken
from tests.sim.trainer import SAVE_DIR, Save, Trainer, _timeless, shards_of
from tests.sim.world import NAS, S3, World, job_config
from tests.support import synthetic

LIVES = 1000 if os.environ.get("CKPTD_FULL") else 25
SETTLE_SECONDS = 5.0
RANDOM_STATES = ("rng_state_0.pth", "rng_state_1.pth")
STATE = "trainer_state.json"


def marks_of(step: int, number: int) -> dict[str, bytes]:
    """What ends a save: random states, and rank 0's trainer_state.json."""
    with tempfile.TemporaryDirectory(prefix="ckptd-sim-") as root:
        with mock.patch.object(synthetic, "write_archive", _timeless):
            for name in RANDOM_STATES:
                synthetic.Shard().save(Path(root) / name, {"cpu": number})
        found = {name: (Path(root) / name).read_bytes() for name in RANDOM_STATES}
    return {**found, STATE: f'{{"global_step": {step}, "log_history": [], "epoch": {number}.0}}'.encode()}


class HuggingFaceTrainer(Trainer):
    """Writes all shards twice in place, as two `Save`s of which the first never ends, then its marks."""

    def begin(self, step: int, rng: random.Random, *, tag: str | None = None) -> None:
        """Start a save."""
        self.abort()
        self.step = step
        name = tag or f"checkpoint-{step}"
        self._todo.append(lambda: self._make_root(name, step))
        for save in (self._of(name, step), self._of(name, step)):
            self._todo.append(lambda save=save: self._follow(save))  # type: ignore[misc]
            shards = [path for path in save.files if "/" in path]
            first = [path for path in shards if "rank_1_" not in path]
            for path in self._between(first, [path for path in shards if path not in first], rng):
                self._write_file(save, path)
        for path in self._between([RANDOM_STATES[0], STATE], [RANDOM_STATES[1]], rng):
            self._write_file(self.saves[-1], path)
        self._todo.append(self._finish)

    def _of(self, tag: str, step: int) -> Save:
        # numbers are places in the list of saves: taken when they are made, in this order
        number = len(self.saves) + 1
        shards = {f"global_step{step}/{path}": data for path, data in shards_of(step, number).items()}
        save = Save(number=number, tag=tag, step=step, files={**shards, **marks_of(step, number)})
        self.saves.append(save)
        return save

    @staticmethod
    def _between(ours: list[str], others: list[str], rng: random.Random) -> list[str]:
        """Another rank's files at any place among one rank's."""
        found = list(ours)
        for path in others:
            found.insert(rng.randrange(len(found) + 1), path)
        return found

    def _make_root(self, tag: str, step: int) -> None:
        for folder in (f"{SAVE_DIR}/{tag}", f"{SAVE_DIR}/{tag}/global_step{step}"):
            if not self._kernel.exists(folder):
                self._kernel.mkdir(folder)

    def _follow(self, save: Save) -> None:
        self.writing = save


def beside(world: World, rng: random.Random) -> None:
    """The trainer goes on step by step, the daemon as far as it comes meanwhile."""
    while world.trainer.is_writing:
        world.trainer.go_on(rng.randint(1, 3))
        for _ in range(rng.choice((0, 0, 1, 3))):
            world.move(rng)
        if rng.random() < 0.1:
            world.live_on(rng.uniform(0.1, 1.0), rng)


def is_committed(world: World, name: str) -> bool:
    """The newest save is, and what is there was judged."""
    world.look()
    return world.trainer.saves[-1].number in world.judge.ever[name]


def lived(seed: int, committed_early: Callable[[], None]) -> None:
    """One life of two or three checkpoints.

    Raises:
        Broken: a promise was.
    """
    rng = random.Random(seed)
    name = rng.choice((NAS, S3))
    world = World(
        seed,
        job_config(((name, True, None),), None, "newest"),
        can_clone=rng.random() < 0.5,
        trainer=HuggingFaceTrainer,
    )
    world.enter()
    try:
        for number in range(rng.randint(2, 3)):
            step = 10 * (number + 1)
            world.trainer.begin(step, rng)
            beside(world, rng)
            ended = world.clock()
            world.live_on(rng.uniform(0.0, SETTLE_SECONDS), rng, lambda: is_committed(world, name))
            if is_committed(world, name) and world.clock() - ended < SETTLE_SECONDS:
                committed_early()
            if rng.random() < 0.5:
                world.trainer.begin(step, rng)
                beside(world, rng)
                world.look()
            if rng.random() < 0.3:
                world.kill()
            world.live_on(200.0, rng, world.has_rested)
            world.look()
    finally:
        world.leave()


def test_commits_come_before_the_quiet_time_and_none_is_mixed() -> None:
    early = 0

    def count() -> None:
        nonlocal early
        early += 1

    for seed in range(LIVES):
        try:
            lived(seed, count)
        except Broken as error:
            raise AssertionError(f"life {seed}: {error}") from error
    assert early > 2 * LIVES, early
