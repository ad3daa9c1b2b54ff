"""Whole lives of a node with crashes at every call: no promise is broken, and the same seed is the same life.

Each runs in a process of its own (`python -m tests.sim`), in which sets have one order; a failure prints the
seed, the few steps that are enough and the command that replays it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.sim.life import drawn, live
from tests.sim.seeded import PATCHES, seeded
from tests.sim.world import NAS, World, job_config

ROOT = Path(__file__).resolve().parents[2]
FULL = bool(os.environ.get("CKPTD_FULL"))
LIVES = "0-2000" if FULL else "0-30"


def simulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sim", "--fresh", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_lives_with_crashes_at_every_call(tmp_path: Path) -> None:
    done = simulated(
        "--seeds", LIVES, "--steps", "24", "--workers", "1", "--figures", str(tmp_path / "sim.json")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "sim.json").read_text())
    assert figures["runs"] == int(LIVES.partition("-")[2])
    assert figures["crashes"] > 4 * figures["runs"], "hardly anything crashed"
    assert figures["violations"] == 0


def test_a_daemon_that_dies_often_keeps_its_promises(tmp_path: Path) -> None:
    done = simulated("--often", "--seeds", "0-3", "--steps", "16", "--figures", str(tmp_path / "sim.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "sim.json").read_text())
    assert figures["crashes"] > 50 * figures["runs"]


def test_the_same_seed_is_the_same_life(tmp_path: Path) -> None:
    """Call for call, in two processes."""
    asked = ("--seeds", "7-9", "--digests", "--workers", "1", "--figures", str(tmp_path / "sim.json"))
    first, second = simulated(*asked), simulated(*asked)
    assert first.returncode == 0, first.stdout
    digests = [line for line in first.stdout.splitlines() if not line.startswith("{")]
    assert digests == [line for line in second.stdout.splitlines() if not line.startswith("{")]
    assert len(set(digests)) == 2


def test_a_line_that_a_power_cut_tore_is_no_line() -> None:
    """Of a line that lay on two blocks the cut may leave the second alone."""
    world = World(1, job_config(((NAS, True, 1),), 1, "newest"))
    whole = b'{"action": "prune"}'
    with mock.patch.object(world.judge, "_audit", lambda: whole + b"\n" + bytes(40) + b'prune"}\n'):
        assert world.judge._lines() == [json.loads(whole)]


def test_another_run_in_the_same_remotes_is_left_alone() -> None:
    """What it committed stays as it is, counts for nothing here, and nothing here counts for it."""
    committed: dict[str, int] = {"own": 0, "others": 0}

    def counted(world: World) -> None:
        for name, kept in world.other.kept.items():
            committed["own"] += len(world.judge.ever[name])
            committed["others"] += sum(key.startswith("_ckptd/commits/") for key in kept)
        leave(world)

    leave = World.leave
    with mock.patch.object(World, "leave", counted):
        for seed in range(0, 2000 if FULL else 90, 3):
            outcome = live(drawn(seed, 24))
            assert outcome.broken is None, f"{outcome.broken}: python -m tests.sim {seed} --steps 24"
    assert all(count > 10 for count in committed.values()), committed


def test_a_training_begun_anew_is_a_run_of_its_own() -> None:
    """In the same place, at its first step again: no limit of it concerns what was committed before."""
    world = World(1, job_config(((NAS, True, 1),), 1, "newest"))
    rng = random.Random(1)
    world.enter()
    try:
        for steps in ((10, 20), (1, 2)):
            if world.trainer.saves:
                world.trainer.begin_anew()
            for step in steps:
                world.kernel.now_seconds += 90
                world.trainer.begin(step, rng)
                world.trainer.end()
                world.live_on(400.0, rng, world.has_rested)
                world.look()
        left = {(live.run_id, live.order[1]) for live in world.judge.live(NAS)}
    finally:
        world.leave()
    assert sorted(step for _, step in left) == [2, 20]
    assert len({run_id for run_id, _ in left}) == 2


QUICK = (
    "no folder is flushed",
    "sealed without a flush",
)
RARE = {"deletions are not limited", "a rewind is no new branch"}
"""No life draws what the first takes, and to the judge a higher step may be the newer one: scripts find both,
in every run (tests/sim/test_decisions.py)."""
MOST_LIVES = 2000 if FULL else 150


@pytest.mark.parametrize("defect", sorted(PATCHES.keys() - RARE) if FULL else QUICK)
def test_a_guard_taken_out_is_noticed(defect: str) -> None:
    """Two of them in every run, all with CKPTD_FULL=1; the first life that notices is enough."""
    with seeded(defect):
        for seed in range(MOST_LIVES):
            outcome = live(drawn(seed))
            if outcome.broken is not None:
                return
    pytest.fail(f"{MOST_LIVES} lives and nothing noticed: {defect}")


def test_a_failure_says_how_to_replay_it() -> None:
    """What a person sees: the promise, few steps, a timeline, the command."""
    code = (
        "from tests.sim.__main__ import replay; from tests.sim.seeded import seeded\n"
        "with seeded('sealed without a flush'): raise SystemExit(replay(0, 24))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for words in ("seed 0 BROKEN P7", "steps are enough", "timeline:", "replay: python -m tests.sim 0"):
        assert words in done.stdout, done.stdout


def test_lives_of_one_code_add_up(tmp_path: Path) -> None:
    """Run the command twice: the second run lives only what the first has not."""
    figures = tmp_path / "sim.json"
    for seeds in ("90000000-90000002", "90000000-90000003"):
        command = [sys.executable, "-m", "tests.sim", "--seeds", seeds, "--steps", "12", "--figures", figures]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONHASHSEED": "0"})
    assert json.loads(figures.read_text())["runs"] == 3
