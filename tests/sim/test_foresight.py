"""What `ckptd plan` tells of other limits is what then happens, in simulated lives."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.core.policy.foresight import foresee
from ckptd.daemon.actions.control import PLAN, PlanFile, write_control
from tests.sim.life import HEALED_SECONDS
from tests.sim.world import NAS, World, job_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.core.policy.foresight import ForeseenPlace
    from ckptd.daemon.job import Job
    from ckptd.observe.status import PlanStatus

ROOT = Path(__file__).resolve().parents[2]
LIVES = 1000 if os.environ.get("CKPTD_FULL") else 25


def test_what_is_foretold_is_what_happens() -> None:
    command = [sys.executable, "-m", "tests.sim.foresight", "--lives", str(LIVES), "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["lives"], figures["unlike"]) == (LIVES, 0)
    assert figures["deletions"] > LIVES / 2, "hardly anything was deleted"


@pytest.fixture
def world() -> Iterator[World]:
    """Three saves, committed; no limit deletes any."""
    made, rng = World(7, job_config(((NAS, True, None),), None, "all"), can_clone=False), random.Random(7)
    level = logging.getLogger("ckptd").level
    logging.getLogger("ckptd").setLevel(logging.CRITICAL)
    made.enter()
    try:
        for step in (1, 2, 3):
            made.trainer.begin(step, rng)
            made.trainer.end()
            made.live_on(HEALED_SECONDS, rng, made.has_rested)
        yield made
    finally:
        made.leave()
        logging.getLogger("ckptd").setLevel(level)


def asked(world: World) -> Job:
    """The job, asked what would become of it with one here."""
    job = world.ensure_daemon()
    keys = job_config(((NAS, True, None),), 1, "all").retention_keys
    at = time.time()
    what_if = PlanFile(asked_at_unix_seconds=at, seconds=600.0, keys=keys, saves=2)
    write_control(job.state_dir, PLAN, what_if)
    return job


def answer_of(job: Job) -> PlanStatus:
    assert job.control.plan_answer is not None
    return job.control.plan_answer


def test_a_worker_plans_what_is_asked_never_the_deciding_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn only hands it over: many seconds of planning hold no job of the daemon up."""
    calls: list[int] = []

    def counted(*given: Any) -> tuple[ForeseenPlace, ...]:
        calls.append(1)
        return foresee(*given)

    monkeypatch.setattr("ckptd.daemon.health.foresight.foresee", counted)
    job = asked(world)
    for _ in range(3):
        job.wake()
        world.turn()
    assert (calls, job.control.plan_answer) == ([], None)
    world.live_on(10.0, random.Random(1), lambda: job.control.plan_answer is not None)
    answer = answer_of(job)
    assert (calls, answer.error) == ([1], None)
    here = next(place for place in answer.places if place.remote is None)
    assert [one.checkpoints for one in here.held] == [1, 1, 1]


def test_a_plan_that_fails_is_answered_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its error: it is not tried again each second, and the job goes on."""
    calls: list[int] = []

    def broken(*_: object) -> None:
        calls.append(1)
        raise ZeroDivisionError

    monkeypatch.setattr("ckptd.daemon.health.foresight.foresee", broken)
    job = asked(world)
    world.live_on(60.0, random.Random(1))
    answer = answer_of(job)
    assert (calls, answer.places) == ([1], ())
    assert "ZeroDivisionError" in (answer.error or "")
    assert not [problem for problem in job.problems.all() if problem.code == "internal"]
