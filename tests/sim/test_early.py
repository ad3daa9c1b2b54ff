"""A whole node whose shards are uploaded while others are still written: no COMMIT mixes two writes.

Trainers that write once or twice, one remote or two, kills and power cuts, a tag that is written again or
removed and used once more; and a kill at each call that changes anything, from a save's first byte to its
COMMIT.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.model.records import ZERO
from ckptd.storage.child import service
from ckptd.storage.journal.journal import EARLY_ID
from ckptd.storage.remote import early
from ckptd.storage.remote.transfer import Transfer
from tests.sim.judge import Broken
from tests.sim.life import APART_SECONDS
from tests.sim.test_last_byte import HuggingFaceTrainer, beside
from tests.sim.trainer import SAVE_DIR, Trainer
from tests.sim.world import NAS, S3, World, job_config

FULL = bool(os.environ.get("CKPTD_FULL"))
LIVES = 1000 if FULL else 40
FOUND = (64,)
"""Lives that found a defect: the deletion of what came early was cancelled for an upload, and begun again."""
EVERY = 1 if FULL else 7
"""Of the calls of one life each so-many-th is its last."""
KEYS: set[str] = set()
"""Of what was sent early in this test."""
PLACES = ((NAS,), (S3,), (NAS, S3))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what was sent early, and what became of it."""
    count: Counter[str] = Counter()
    KEYS.clear()
    upload, verified, remove = early.upload_early, Transfer._verified_in_place, early.delete_early

    def counted(attached: Any, order: Any, control: Any) -> None:
        def on_done(done: Any) -> None:
            count["sent"] += 1
            KEYS.add(order.file.key)
            control.on_done(done)

        upload(attached, order, replace(control, on_done=on_done))

    def removed(attached: Any, order: Any, check: Any) -> None:
        remove(attached, order, check)
        count["removed"] += len(order.objects)

    def compared(self: Transfer, *arguments: Any) -> bool:
        is_same = verified(self, *arguments)
        count["same" if is_same else "another"] += 1
        return is_same

    monkeypatch.setattr(service, "upload_early", counted)
    monkeypatch.setattr(service, "delete_early", removed)
    monkeypatch.setattr(Transfer, "_verified_in_place", compared)
    return count


def _world(seed: int, rng: random.Random, names: tuple[str, ...]) -> World:
    return World(
        seed,
        job_config(tuple((name, True, None) for name in names), None, "newest"),
        can_clone=rng.random() < 0.5,
        trainer=rng.choice((Trainer, HuggingFaceTrainer)),
    )


def _remove(world: World) -> None:
    """The trainer dies and somebody removes the torn save, whose tag is used again."""
    save, kernel = world.trainer.writing, world.kernel
    world.trainer.abort()
    if save is None or not kernel.exists(f"{SAVE_DIR}/{save.tag}"):
        return
    kernel.actor = "trainer"
    try:
        for path in kernel.listdir(f"{SAVE_DIR}/{save.tag}"):
            name = f"{SAVE_DIR}/{save.tag}/{path}"
            for below in kernel.listdir(name) if path.startswith("global_step") else ():
                kernel.unlink(f"{name}/{below}")
            (kernel.rmdir if path.startswith("global_step") else kernel.unlink)(name)
        kernel.rmdir(f"{SAVE_DIR}/{save.tag}")
    finally:
        kernel.actor = "ckptd"
    for one in world.trainer.saves:
        if one.tag == save.tag:
            one.is_gone = one.is_rotated = True


def lived(seed: int) -> None:
    """One life of two to four saves.

    Raises:
        Broken: a promise was.
    """
    rng = random.Random(seed)
    world = _world(seed, rng, rng.choice(PLACES))
    # a Hugging Face Trainer that dies over its last files leaves what quiet time takes for whole
    may_stay_torn = True
    world.enter()
    try:
        for number in range(rng.randint(2, 4)):
            step = 10 * (number + 1)
            world.trainer.begin(step, rng)
            is_torn = rng.random() < 0.5
            if is_torn:
                for _ in range(rng.randint(1, 60)):
                    world.trainer.go_on(1)
                    world.move(rng)
                if may_stay_torn and rng.random() < 0.4:
                    world.trainer.abort()
                else:
                    _remove(world)
                world.live_on(rng.uniform(0.0, 3.0), rng)
                world.kernel.now_seconds += APART_SECONDS
                world.trainer.begin(step + rng.randint(0, 1), rng)
            if rng.random() < 0.4:
                world.is_power_cut = may_stay_torn and rng.random() < 0.3
                world.kernel.ends_at = world.kernel.calls + rng.randint(1, 60)
            beside(world, rng)
            world.live_on(rng.uniform(0.0, 6.0), rng)
            if not is_torn and rng.random() < 0.3:
                world.kernel.now_seconds += APART_SECONDS
                world.trainer.begin(step, rng)
                beside(world, rng)
            world.look()
            world.live_on(200.0, rng, world.has_rested)
            world.look()
        world.live_on(120.0, rng)
        _nothing_is_left(world)
    finally:
        world.leave()


def _nothing_is_left(world: World) -> None:
    """What was sent early lies there only if a manifest lists it, or a save was sealed that has its file.

    Raises:
        Broken: something else does.
    """
    state = world.job.state if world.job is not None else None
    assert state is not None
    sealed = {f"{row.save.tag}/{file.path}" for row in state.saves.rows.values() for file in row.save.files}
    for remote in world.config.remotes:
        held = world._on_nas() if remote.name == NAS else world._in_cloud()
        documents = [json.loads(data) for key, (_, data) in held.items() if key.startswith("_ckptd/nodes/")]
        listed = {file["key"] for one in documents for file in one["files"]}
        left = (KEYS & held.keys()) - listed - sealed
        rows = [row.key for row in state.journal.objects(EARLY_ID, remote.name, ZERO)]
        if left or rows:
            raise Broken(f"{remote.name} holds {sorted(left)}, the journal has {rows}")


def test_shards_go_early_and_no_commit_is_mixed(seen: Counter[str]) -> None:
    for seed in (*range(LIVES), *FOUND):
        try:
            lived(seed)
        except Broken as error:
            raise AssertionError(f"life {seed}: {error}") from error
    assert seen["sent"] > LIVES, seen
    assert min(seen["same"], seen["another"], seen["removed"]) > LIVES / 10, seen


def _with_end(names: tuple[str, ...], ends_after: int, *, power: bool) -> int:
    """Live through one save, dying at that call of it; return how many calls there were."""
    rng = random.Random(len(names))
    world = World(
        7, job_config(tuple((n, True, None) for n in names), None, "newest"), trainer=HuggingFaceTrainer
    )
    world.enter()
    try:
        world.trainer.begin(10, rng)
        beside(world, rng)
        world.live_on(200.0, rng, world.has_rested)
        begun = world.kernel.calls
        world.is_power_cut = power
        world.kernel.ends_at = begun + ends_after
        world.trainer.begin(20, rng)
        beside(world, rng)
        world.live_on(200.0, rng, world.has_rested)
        calls = world.kernel.calls - begun
        world.look()
        if not power:
            assert all(world.trainer.saves[-1].number in world.judge.ever[name] for name in names)
    finally:
        world.leave()
    return calls


@pytest.mark.parametrize("names", PLACES)
@pytest.mark.parametrize("power", [False, True])
def test_a_kill_at_any_call_leaves_nothing_mixed(
    seen: Counter[str], names: tuple[str, ...], *, power: bool
) -> None:
    calls = _with_end(names, 1 << 30, power=False)
    assert seen["sent"] > 0
    for at in range(1, calls, EVERY):
        try:
            _with_end(names, at, power=power)
        except Broken as error:
            raise AssertionError(f"killed at call {at}: {error}") from error
