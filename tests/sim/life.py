"""One seed, one life: what happens in which order, carried out on a `World` and judged after every step.

A step carries its own seed, so that a life that failed can be shortened step by step and the rest stays as it
was; a failure prints that list, a timeline and the command that replays it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.decisions import HOUR_SECONDS
from tests.sim.judge import Broken
from tests.sim.remotes import MOODS
from tests.sim.trainer import SAVE_DIR
from tests.sim.world import NAS, S3, STATE_DIR, World, job_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.config.schema import JobConfig

ALWAYS = ("save", "settle", "settle", "kill", "power")
SOMETIMES = (
    "save", "begin", "write", "abort", "resave", "rewind", "rotate", "moves", "wait", "mood", "mood", "heal",
    "kill", "power", "twice", "meanwhile", "journal-lost", "journal-garbage", "clock", "forget", "child",
    "deaf", "kill-late", "vanish", "drop", "drop", "pin", "pin", "unpin", "adopt", "limits", "hours",
)  # fmt: skip
RUNS = ("other", "other", "other", "anew")
"""Another run commits into the same remotes; the training begins anew in the same place."""
READS = ("rewrite", "read")
"""A checkpoint is saved again as it leaves; one is read in a remote."""
MOST_DEATHS = 12
"""In a row, in a life of many deaths."""
DEATH_SECONDS = 10.0
SETTLED_SECONDS = 20.0
HEALED_SECONDS = 900.0
"""Backoffs of a remote that was away last a minute at most, a save in flight holds things up for another."""
APART_SECONDS = 90.0
REWRITTEN_STEPS = 4
"""Of a save: its folder, and the first shard or a part of it; the rest comes later."""


class Step(NamedTuple):
    """One thing that happens; its details come from `salt` alone."""

    kind: str
    salt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a seed means."""

    seed: int
    config: JobConfig
    can_clone: bool
    steps: tuple[Step, ...]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a life went."""

    digest: str
    crashes: int
    steps: int
    calls: int
    broken: str | None
    history: list[str]
    kinds: Counter[str] = field(default_factory=Counter)


def drawn(seed: int, most_steps: int = 40, *, dies_often: bool = False) -> Life:
    """The life of a seed: a configuration, a subset of the kinds of steps, and some steps of these kinds.

    `dies_often`: after each of these steps the daemon dies some times more.
    """
    rng = random.Random(seed)
    kinds = [*ALWAYS, *(kind for kind in SOMETIMES if rng.random() < 0.6)]
    count = rng.randint(10, most_steps)
    steps = tuple(Step(rng.choice(kinds), rng.getrandbits(32)) for _ in range(count))
    if seed % 3 == 0:
        steps = with_more(seed, steps, RUNS, "runs", 6)
    elif seed % 3 == 1:
        steps = with_more(seed, steps, READS, "reads", 4)
    steps = with_deaths(seed, steps) if dies_often else steps
    return Life(seed=seed, config=job_of(rng), can_clone=rng.random() < 0.5, steps=steps)


def with_more(
    seed: int, steps: Sequence[Step], kinds: Sequence[str], name: str, most: int
) -> tuple[Step, ...]:
    """Some steps of other kinds among the others: drawn apart, so that all others stay what they were."""
    rng = random.Random(f"{seed}-{name}")
    found = list(steps)
    for _ in range(rng.randint(1, most)):
        found.insert(rng.randint(0, len(found)), Step(rng.choice(kinds), rng.getrandbits(32)))
    return tuple(found)


def with_deaths(seed: int, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Deaths after each step: drawn apart as well."""
    rng = random.Random(f"{seed}-deaths")
    return tuple(one for step in steps for one in (step, Step("deaths", rng.getrandbits(32))))


def job_of(rng: random.Random) -> JobConfig:
    which = rng.choice(((NAS,), (S3,), (NAS, S3), (S3, NAS)))
    remotes = tuple(
        (name, i == 0 or rng.random() < 0.5, rng.choice((None, None, 1, 2))) for i, name in enumerate(which)
    )
    return job_config(
        remotes,
        rng.choice((None, 1, 1, 2, 3)),
        rng.choice(("newest", "all", "none")),
        every=rng.choice((None, None, 2, 3)),
        rung=rng.choice((None, None, None, 2, 4)),
        unuploaded=rng.choice(("keep", "keep", "keep", "thin", "delete")),
        best=rng.random() < 0.3,
    )


def live(life: Life) -> Outcome:
    """Carry a life out; never raises for what it finds."""
    world = World(life.seed, life.config, can_clone=life.can_clone)
    kinds: Counter[str] = Counter()
    broken: str | None = None
    log = logging.getLogger("ckptd")
    level = log.level
    log.setLevel(logging.ERROR)
    world.enter()
    try:
        for step in life.steps:
            kinds[step.kind] += 1
            world.kernel.history.append(f"--- {step.kind} {step.salt}")
            take(world, step)
        finish(world, random.Random(life.seed))
    except Broken as error:
        broken = str(error)
        world.kernel.history.append(f"BROKEN {error}")
        if error.__cause__ is not None and not isinstance(error.__cause__, Broken):
            world.kernel.history += _trace(error.__cause__)
    finally:
        world.leave()
        log.setLevel(level)
    history = world.kernel.history
    return Outcome(
        digest=hashlib.sha256("\n".join(history).encode()).hexdigest(),
        crashes=world.crashes,
        steps=len(life.steps),
        calls=world.kernel.calls,
        broken=broken,
        history=history,
        kinds=kinds,
    )


def _trace(error: BaseException) -> list[str]:
    import traceback

    return [line.rstrip() for line in traceback.format_exception(error)][-12:]


def take(world: World, step: Step) -> None:
    """Carry one step out and judge."""
    rng = random.Random(step.salt)
    STEPS[step.kind](world, rng)
    world.look()


# --- the trainer ---------------------------------------------------------------------------------------


def _save(world: World, rng: random.Random) -> None:
    trainer = world.trainer
    trainer.begin(trainer.step + rng.randint(1, 3), rng)
    trainer.end()


def _begin(world: World, rng: random.Random) -> None:
    trainer = world.trainer
    trainer.begin(trainer.step + rng.randint(1, 3), rng)
    trainer.go_on(rng.randint(1, 12))


def _write(world: World, rng: random.Random) -> None:
    world.trainer.go_on(rng.randint(1, 8))


def _abort(world: World, _: random.Random) -> None:
    world.trainer.abort()


def _resave(world: World, rng: random.Random) -> None:
    trainer = world.trainer
    if trainer.saves:
        newest = trainer.saves[-1]
        _apart(world)
        trainer.begin(newest.step, rng, tag=newest.tag)
        trainer.go_on(rng.choice((2, 5, 100)))


def _apart(world: World) -> None:
    """Two saves of one tag lie further apart than `save_spread`: else nothing would tell them apart."""
    world.kernel.now_seconds += APART_SECONDS


def _rewind(world: World, rng: random.Random) -> None:
    trainer = world.trainer
    _apart(world)
    trainer.begin(max(1, trainer.step - rng.randint(1, 5)), rng)
    trainer.end()


def _rotate(world: World, rng: random.Random) -> None:
    if not world.trainer.is_writing:
        world.trainer.rotate(rng.randint(1, 3))


def _anew(world: World, rng: random.Random) -> None:
    """Nothing that could be loaded is left, and the first save is below all that was committed."""
    if rng.random() < 0.6:
        world.live_on(120.0, rng, world.has_rested)
    _apart(world)
    world.trainer.begin_anew()
    _apart(world)
    if rng.random() < 0.7:
        _save(world, rng)


# --- the daemon ----------------------------------------------------------------------------------------


def _settle(world: World, rng: random.Random) -> None:
    world.live_on(rng.uniform(1.0, 25.0), rng)


def _wait(world: World, rng: random.Random) -> None:
    world.live_on(rng.choice((70.0, 200.0)), rng)


def _moves(world: World, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 25)):
        if not world.move(rng):
            return


def _ends(world: World, rng: random.Random, calls: int, *, power: bool) -> None:
    kernel = world.kernel
    world.is_power_cut = power
    before = world.crashes
    kernel.ends_at = kernel.calls + calls
    world.live_on(rng.uniform(2.0, 30.0), rng)
    if world.crashes == before:
        kernel.ends_at = None
        world.is_power_cut = power
        world.kill()


def _kill(world: World, rng: random.Random) -> None:
    _ends(world, rng, rng.randint(1, rng.choice((10, 60))), power=False)


def _kill_late(world: World, rng: random.Random) -> None:
    _ends(world, rng, rng.randint(50, 600), power=rng.random() < 0.5)


def _power(world: World, rng: random.Random) -> None:
    _ends(world, rng, rng.randint(1, rng.choice((10, 60, 200))), power=True)


def _twice(world: World, rng: random.Random) -> None:
    """A second crash while the first one is recovered from, and a third."""
    for _ in range(rng.randint(2, 3)):
        _ends(world, rng, rng.randint(1, 12), power=rng.random() < 0.5)


def _deaths(world: World, rng: random.Random) -> None:
    """One crash after the other, each a few calls after the start; a daemon at rest gets a new save first."""
    trainer, before = world.trainer, world.crashes

    def died_or_rests() -> bool:
        return world.crashes > before or world.is_at_rest()

    for _ in range(rng.randint(1, MOST_DEATHS)):
        if trainer.is_writing:
            trainer.go_on(rng.randint(1, 20))
        elif rng.random() < 0.3:
            trainer.rotate(2)
            trainer.remove_torn()
        world.is_power_cut = rng.random() < 0.5
        before, calls = world.crashes, rng.randint(1, rng.choice((10, 60)))
        world.kernel.ends_at = world.kernel.calls + calls
        world.live_on(DEATH_SECONDS, rng, died_or_rests)
        if world.crashes == before:
            world.kernel.ends_at = None
            world.kill()
            _save(world, rng)


def _meanwhile(world: World, rng: random.Random) -> None:
    """The trainer goes on, or begins a save, in the middle of what ckptd does."""
    trainer, kernel = world.trainer, world.kernel
    count, begins, salt = rng.randint(1, 30), rng.random() < 0.5, rng.getrandbits(32)

    def hook() -> None:
        own = random.Random(salt)
        if begins and not trainer.is_writing:
            newest = trainer.saves[-1] if trainer.saves else None
            if newest is not None and own.random() < 0.5:
                _apart(world)
                trainer.begin(newest.step, own, tag=newest.tag)
            else:
                trainer.begin(trainer.step + 1, own)
        trainer.go_on(count)

    kernel.hooks[kernel.calls + rng.randint(1, 80)] = hook
    world.live_on(rng.uniform(5.0, 30.0), rng)
    kernel.hooks.clear()


def _rewrite(world: World, rng: random.Random) -> None:
    """A checkpoint is saved again as it is about to be renamed aside: its first shards."""
    trainer, kernel, salt = world.trainer, world.kernel, rng.getrandbits(32)
    _save(world, rng)  # what makes an older one go

    def hook(path: str, target: str) -> None:
        save = trainer.current(path.removeprefix(f"{SAVE_DIR}/"))
        if not target.startswith(f"{SAVE_DIR}/_ckptd/trash/") or save is None or trainer.is_writing:
            return
        kernel.before_rename = None
        _apart(world)
        trainer.begin(save.step, random.Random(salt), tag=save.tag)
        trainer.go_on(REWRITTEN_STEPS)

    kernel.before_rename = hook
    world.live_on(rng.uniform(5.0, 30.0), rng)
    kernel.before_rename = None


def _read(world: World, rng: random.Random) -> None:
    """Somebody reads a committed checkpoint in a remote, while others are saved; perhaps the daemon dies."""
    name = rng.choice(world.config.remotes).name
    found = sorted({live.tag for live in world.judge.live(name)})
    if not found:
        return
    with world.reading(name, rng.choice(found)) as renew:
        for _ in range(rng.randint(1, 4)):
            _save(world, rng)
            if rng.random() < 0.3:
                world.kill()
            world.live_on(rng.uniform(10.0, 120.0), rng)
            renew()
            world.look()


def _journal(world: World, *, garbage: bool) -> None:
    world.kill()
    kernel = world.kernel
    kernel.actor = "judge"
    path = f"{STATE_DIR}/journal.db"
    try:
        if garbage:
            fd = kernel.open(path, 1 | 0o1000)
            kernel.write(fd, b"this is no database")
            kernel.close(fd)
        else:
            kernel.unlink(path)
    except OSError:
        pass  # there is none yet
    finally:
        kernel.actor = "ckptd"


# --- the remotes and the rest of the world -------------------------------------------------------------


def _mood(world: World, rng: random.Random) -> None:
    world.set_mood(rng.choice((NAS, S3)), rng.choice(MOODS))


def _heal(world: World, _: random.Random) -> None:
    for name in (NAS, S3):
        world.set_mood(name, "ok")


def _clock(world: World, rng: random.Random) -> None:
    seconds = rng.choice((-86400.0, -3600.0, -5.0, 5.0, 3600.0, 1e7))
    world.kernel.wall_offset_seconds += seconds
    world.was_set_back = world.was_set_back or seconds < 0
    if world.trainer.writing is not None:
        world.clocked.add(world.trainer.writing.number)


def _forget(world: World, rng: random.Random) -> None:
    """Somebody removes a COMMIT that is not the newest."""
    name = rng.choice((NAS, S3))
    world.forget(name, rng)


def _drop(world: World, rng: random.Random) -> None:
    """Somebody puts a file into a checkpoint, or writes one over that was put there."""
    trainer, kernel = world.trainer, world.kernel
    saves = [save for save in trainer.saves if save.is_finished and not save.is_gone]
    if not saves or trainer.is_writing:
        return
    tag, name = rng.choice(saves).tag, rng.choice(("notes.txt", "README.md"))
    kernel.actor = "trainer"
    try:
        if name in kernel.listdir(f"{SAVE_DIR}/{tag}"):
            world.written_over.add(tag)
            # perhaps another save now, of which the trainer noted nothing
            world.judge.belt.completed_at.append(world.judge.clock())
            world.judge.without_loss.add(tag)
        fd = kernel.open(f"{SAVE_DIR}/{tag}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        kernel.write(fd, f"note {rng.random()}".encode())
        kernel.fds[fd].inode.saved = (0, f"{tag}/{name}")
        kernel.close(fd)
    except OSError:
        pass  # the folder is gone
    finally:
        kernel.actor = "ckptd"


def _pin(world: World, rng: random.Random) -> None:
    """Of what lies here, or in a remote."""
    here = {s.tag for s in world.trainer.saves if s.is_finished and not s.is_gone and world.is_intact(s)}
    there = {live.tag for remote in world.config.remotes for live in world.judge.live(remote.name)}
    if tags := sorted(here | there):
        world.decide("pin", rng.choice(tags))


def _unpin(world: World, rng: random.Random) -> None:
    if tags := sorted(world.judge.maybe_pinned):
        world.decide("unpin", rng.choice(tags))


def _limits(world: World, rng: random.Random) -> None:
    """A person changes limits in the job file."""
    rules = world.judge.rules
    world.configure(
        job_config(
            tuple((r.name, r.required, rng.choice((None, 1, 2, 3))) for r in world.config.remotes),
            rng.choice((None, 1, 2, 3)),
            world.config.existing,
            every=rules.local.every,
            rung=rules.local.rung,
            unuploaded=world.config.unuploaded,
            best=world.config.metric is not None,
        )
    )


def _hours(world: World, rng: random.Random) -> None:
    """Nothing happens for hours: what was completed long ago allows no removal any more."""
    if world.is_at_rest():
        world.kernel.now_seconds += 3 * HOUR_SECONDS
    world.live_on(rng.uniform(1.0, 15.0), rng)


def _vanish(world: World, rng: random.Random) -> None:
    """Somebody removes a COMMIT right after a newer one was made: what was observed is out of date."""
    trainer, kernel = world.trainer, world.kernel
    name, calls = rng.choice([remote.name for remote in world.config.remotes]), rng.randint(1, 20)
    _save(world, rng)

    def hook() -> None:
        was_commit = any("/commits/" in line for line in kernel.history[-2:])
        found = world.judge.live(name) if was_commit else []
        newest = max(found, key=lambda live: live.order, default=None)
        if newest is not None and newest.save == trainer.saves[-1].number:
            kernel.hooks[kernel.calls + calls] = lambda: world.forget(name, rng)
        else:
            kernel.hooks[kernel.calls + 1] = hook

    kernel.hooks[kernel.calls + 1] = hook
    world.live_on(rng.uniform(20.0, 90.0), rng)
    kernel.hooks.clear()


def _child(world: World, rng: random.Random) -> None:
    if world.clients:
        client = rng.choice(world.clients)
        world.guarded(client.die)


def _deaf(world: World, _: random.Random) -> None:
    world.is_deaf = not world.is_deaf


STEPS: dict[str, Callable[[World, random.Random], None]] = {
    "save": _save,
    "begin": _begin,
    "write": _write,
    "abort": _abort,
    "resave": _resave,
    "rewind": _rewind,
    "rotate": _rotate,
    "settle": _settle,
    "wait": _wait,
    "moves": _moves,
    "kill": _kill,
    "kill-late": _kill_late,
    "power": _power,
    "twice": _twice,
    "deaths": _deaths,
    "meanwhile": _meanwhile,
    "rewrite": _rewrite,
    "read": _read,
    "journal-lost": lambda world, _: _journal(world, garbage=False),
    "journal-garbage": lambda world, _: _journal(world, garbage=True),
    "mood": _mood,
    "heal": _heal,
    "clock": _clock,
    "forget": _forget,
    "vanish": _vanish,
    "drop": _drop,
    "pin": _pin,
    "unpin": _unpin,
    "adopt": lambda world, _: world.decide("adopt", "*"),
    "limits": _limits,
    "hours": _hours,
    "child": _child,
    "deaf": _deaf,
    "other": lambda world, rng: world.another_commits(rng),
    "anew": _anew,
}


# --- the end -------------------------------------------------------------------------------------------


def finish(world: World, rng: random.Random) -> None:
    """With everything healed and one more save, the daemon must come to rest with nothing left undone."""
    _heal(world, rng)
    world.is_deaf = False
    world.another_ends()
    world.trainer.abort()
    world.kernel.history.append("--- healed")
    _last_save(world, rng)
    if world.is_in_doubt():
        _last_save(world, rng)
    world.judge_rest()


def _last_save(world: World, rng: random.Random) -> None:
    world.trainer.begin(max([world.trainer.step, *(s.step for s in world.trainer.saves)]) + 1, rng)
    world.trainer.end()
    world.live_on(SETTLED_SECONDS, rng)
    world.live_on(HEALED_SECONDS, rng, world.has_rested)
    world.look()


# --- a shorter one -------------------------------------------------------------------------------------


def shortened(life: Life, broken: str) -> Life:
    """The fewest steps, found by leaving out, that break the same promise."""
    promise = broken.partition(":")[0]

    def fails(steps: Sequence[Step]) -> bool:
        outcome = live(replace(life, steps=tuple(steps)))
        return outcome.broken is not None and outcome.broken.partition(":")[0] == promise

    steps = list(life.steps)
    size = max(1, len(steps) // 2)
    while size >= 1:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if fails(fewer):
                steps = fewer
            else:
                at += size
        size //= 2
    return replace(life, steps=tuple(steps))


assert SAVE_DIR is not None
