"""Lives of a whole node drawn by hypothesis: the rules of `tests/sim`, shrunk by it when a promise breaks.

The same harness as `python -m tests.sim`, another way to choose: hypothesis looks for what is new, and each
run enables a random subset of the rules.
"""

from __future__ import annotations

import os
import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.sim.judge import Broken
from tests.sim.life import ALWAYS, STEPS, Step, finish, job_of, take
from tests.sim.world import World

FULL = bool(os.environ.get("CKPTD_FULL"))
SETTINGS = settings(
    max_examples=1500 if FULL else 10,
    stateful_step_count=60 if FULL else 25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SALTS = st.integers(0, 2**32 - 1)


class NodeLife(RuleBasedStateMachine):
    """Trainer, daemon, remotes and crashes; every rule is judged, and the end must be rest."""

    world: World | None = None
    enabled: frozenset[str] = frozenset()

    @initialize(
        seed=SALTS, can_clone=st.booleans(), enabled=st.sets(st.sampled_from(sorted(STEPS)), min_size=6)
    )
    def born(self, seed: int, can_clone: bool, enabled: set[str]) -> None:
        self.enabled = frozenset(enabled) | frozenset(ALWAYS)
        self.world = World(seed, job_of(random.Random(seed)), can_clone=can_clone)
        self.world.enter()

    def teardown(self) -> None:
        world, self.world = self.world, None
        if world is None:
            return
        try:
            judged(lambda: finish(world, random.Random(0)))
        finally:
            world.leave()


def judged(what: Any) -> None:
    """A broken promise as a failure that hypothesis shrinks."""
    try:
        what()
    except Broken as broken:
        raise AssertionError(str(broken)) from broken


def _rule_of(kind: str) -> Any:
    def act(self: NodeLife, salt: int) -> None:
        world = self.world
        assert world is not None
        judged(lambda: take(world, Step(kind, salt)))

    act.__name__ = kind.replace("-", "_")
    return precondition(lambda self: not self.enabled or kind in self.enabled)(rule(salt=SALTS)(act))


for _kind in STEPS:
    setattr(NodeLife, _kind.replace("-", "_"), _rule_of(_kind))


def test_any_life_of_a_node_keeps_the_promises() -> None:
    """10 lives of 25 rules; 1500 of 60 with CKPTD_FULL=1."""
    run_state_machine_as_test(NodeLife, settings=SETTINGS)
