"""`python -m tests.sim.foresight --lives N`: what `ckptd plan` tells of other limits is what then happens.

Each life ends healed and at rest. Then the limits of its job file change: first it is asked what they would
delete, now and after the next saves; then they are set, the trainer saves, and what is gone is compared from
outside, on the disk and in each remote.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd.core.policy.capacity import Saved, pace_of
from ckptd.core.policy.foresight import foresee
from tests.sim.decisions import HOUR_SECONDS
from tests.sim.judge import Broken
from tests.sim.life import HEALED_SECONDS, SETTLED_SECONDS, _heal, _last_save, drawn, take
from tests.sim.world import World, job_config
from tests.support.figures import commit_now

if TYPE_CHECKING:
    from ckptd.config.schema import JobConfig
    from ckptd.core.policy.foresight import ForeseenPlace

ROOT = Path(__file__).resolve().parents[2]
SAVES = 3
MOST_HOURS = 40
Held = dict[str | None, frozenset[str]]
"""None (the node) or a remote → checkpoints that are there."""


def other_limits(config: JobConfig, size_bytes: int, rng: random.Random) -> JobConfig:
    """A job file with other limits, perhaps without its second remote, or with that one required or not."""
    limit, sizes = rng.choice((None, 1, 2, 3)), rng.choice((None, None, 1.5, 2.5, 4.5))
    first, *others = config.remotes
    kept = [first, *(r for r in others if rng.random() < 0.8)]
    return job_config(
        tuple((r.name, r is first or rng.random() < 0.5, rng.choice((None, 1, 2, 3))) for r in kept),
        limit,
        config.existing,
        every=rng.choice((None, None, 2, 3)),
        rung=rng.choice((None, None, 2, 4)),
        unuploaded=config.unuploaded,
        best=config.metric is not None,
        most_bytes=round(size_bytes * sizes) if limit and sizes else None,
    )


def held(world: World, remotes: tuple[str, ...]) -> Held:
    """What is there, as it truly is; also in a remote that is no longer the job's."""
    here = frozenset(s.tag for s in world.trainer.saves if s.is_finished and world.trainer_has(s.tag))
    there: Held = {name: frozenset(one.key for one in world.judge.live(name)) for name in remotes}
    return there | {None: here}


def rest(world: World, remotes: tuple[str, ...], rng: random.Random) -> None:
    """Until nothing changes any more, however many hours the hourly limit takes."""
    before: Held = {}
    for _ in range(MOST_HOURS):
        world.live_on(SETTLED_SECONDS, rng)
        world.live_on(HEALED_SECONDS, rng, world.has_rested)
        world.look()
        now = held(world, remotes)
        if now == before:
            return
        before = now
        world.kernel.now_seconds += 2 * HOUR_SECONDS
    world.judge.say("liveness", "retention does not come to rest")


def foretold(before: Held, places: tuple[ForeseenPlace, ...], saves: int) -> Held:
    """What is to be left of what was there, after so many further saves."""
    gone = {
        place.remote: {
            one.tag if place.remote is None else f"_ckptd/commits/{one.tag}~g{one.generation}~{form}.json"
            for one in place.deletions
            if one.after_saves <= saves
            for form in one.forms
        }
        for place in places
    }
    return {where: names - gone.get(where, set()) for where, names in before.items()}


def compared(world: World, rng: random.Random) -> int:
    """Ask, change the limits, save on, compare; the number of deletions that came as they were told."""
    remotes = tuple(remote.name for remote in world.config.remotes)
    _heal(world, rng)
    world.is_deaf = False
    world.another_ends()
    world.trainer.abort()
    _last_save(world, rng)
    rest(world, remotes, rng)
    job = world.job
    assert job is not None
    assert job.view is not None
    newest = max((s for s in job.view.saves if s.is_intact), key=lambda s: s.order)
    known = [(s.save.window.last / 1e9, s.save) for s in job.view.saves]
    pace = pace_of([Saved(at_seconds=at, bytes=s.total_bytes, step=s.step) for at, s in known], 0.0)
    config = other_limits(world.config, newest.save.total_bytes, rng)
    before = held(world, remotes)
    places = foresee(job.view, config.retention_keys, SAVES, pace)
    world.configure(config)
    world.trainer.notes_losses = False  # the value of a save to come is not known
    world.kernel.now_seconds += 2 * HOUR_SECONDS
    now = before
    for count in range(SAVES + 1):
        if count:
            world.trainer.begin(newest.save.step + count * (pace.steps if pace is not None else 1), rng)
            world.trainer.end()
            world.judge.without_loss.add(world.trainer.saves[-1].tag)
        rest(world, remotes, rng)
        wanted, now = foretold(before, places, count), held(world, remotes)
        left = {where: names & now[where] for where, names in before.items()}
        if left != wanted:
            short = {w: (sorted(left[w] - wanted[w]), sorted(wanted[w] - left[w])) for w in left}
            world.judge.say("what-if", f"after {count} saves (stays, is gone) unlike told: {short}")
        for place in places:
            more = len(now[place.remote]) - len(before[place.remote])
            if more != (told := place.held[count][0] - place.before[0]):
                world.judge.say("what-if", f"after {count} saves {place.remote} has {more} more, told {told}")
    return sum(len(names - now[where]) for where, names in before.items())


def lived(seed: int) -> tuple[int, int, str | None]:
    """One life: its seed, the deletions that were foretold, what was not as told."""
    life = drawn(seed, 14)
    world = World(life.seed, life.config, can_clone=life.can_clone)
    log = logging.getLogger("ckptd")
    log.setLevel(logging.ERROR)
    world.enter()
    try:
        for step in life.steps:
            take(world, step)
        return seed, compared(world, random.Random(seed)), None
    except Broken as error:
        return seed, 0, str(error)
    finally:
        world.leave()


def main(arguments: list[str]) -> int:
    """Run; 1 when something was not as told."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.foresight", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="this life alone")
    parser.add_argument("--lives", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=20_000_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        print(*lived(chosen.seed))
        return 0
    figures: dict[str, Any] = {"name": "foresight", "lives": 0, "deletions": 0, "unlike": 0}
    started = time.monotonic()
    with multiprocessing.Pool(chosen.workers) as pool:
        for seed, deletions, unlike in pool.imap_unordered(
            lived, range(chosen.first, chosen.first + chosen.lives), chunksize=5
        ):
            figures["lives"] += 1
            figures["deletions"] += deletions
            figures["unlike"] += unlike is not None
            if unlike is not None:
                print(f"seed {seed}: {unlike[:600]}", flush=True)
            if time.monotonic() - started > 60 * chosen.minutes:
                break
    figures |= {"commit": commit_now(), "seconds": round(time.monotonic() - started)}
    print(json.dumps(figures))
    return 1 if figures["unlike"] else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim.foresight", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
