"""One point: a life that is killed or hurt there, gone on with to its end, and judged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.killpoints import judge as judging
from tests.killpoints.life import KILLED, SCENARIOS, Place, Scenario, fork
from tests.killpoints.seams import Fate

SIDES = ("before", "after", "half")
CODES = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.ESTALE,
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@dataclass(frozen=True, slots=True)
class Point:
    """What is done to one life: kills of its processes in turn, or one error; see `Fate`."""

    scenario: str
    fates: tuple[Fate, ...]
    verifies: bool = False
    """`ckptd verify` is asked as well at the end (directories)."""

    @property
    def name(self) -> str:
        """What a command line and the list of finished points call it."""
        return self.scenario + "".join(f" {_shown(fate)}" for fate in self.fates)

    @staticmethod
    def parse(text: str) -> Point:
        """The inverse of `name`."""
        scenario, *fates = text.split()
        return Point(scenario, tuple(_fate(fate) for fate in fates), verifies=True)


def _shown(fate: Fate) -> str:
    if fate.side != "fail":
        return f"{fate.side}:{fate.at}"
    often = "always" if fate.is_persistent else "once"
    return f"{errno.errorcode[fate.code]}:{often}:{fate.at}"


def _fate(text: str) -> Fate:
    what, *often, at = text.split(":")
    if not often:
        return Fate(int(at), what)
    return Fate(int(at), "fail", getattr(errno, what), often == ["always"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """`deaths`: processes that were killed; `hit`: the call that failed ("" if none was reached)."""

    deaths: int
    hit: str
    wrong: tuple[str, ...]
    said: tuple[str, ...] = ()


Calls = dict[str, list[str]]
"""Scenario → the calls of an undisturbed life, in their order."""


def calls_of(scenario: Scenario, base: Path) -> list[str]:
    """The calls of an undisturbed life, which must be without fault itself."""
    with placed(scenario, base, "count") as place:
        code = fork(place, Fate())
        wrong = judging.judge_end(place).wrong
        if code or wrong:
            message = f"an undisturbed life of {scenario.name} is wrong: {code} {wrong}"
            raise AssertionError(message)
        names: list[str] = json.loads(place.last_of("names", "[]"))
        return names


@contextlib.contextmanager
def placed(scenario: Scenario, base: Path, name: str) -> Iterator[Place]:
    """A fresh folder for one life, removed afterwards."""
    root = base / f"{name}-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    place = Place(root, scenario)
    place.make()
    try:
        yield place
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run(point: Point, base: Path) -> Outcome:
    """Live it and judge it."""
    scenario = BY_NAME[point.scenario]
    with placed(scenario, base, "point") as place:
        if point.fates and point.fates[0].side == "fail":
            return _fail(point, place)
        return _kill(point, place)


def _kill(point: Point, place: Place) -> Outcome:
    wrong: list[str] = []
    deaths = 0
    for fate in (*point.fates, Fate()):
        code = fork(place, fate)
        if code == KILLED and fate.at:
            deaths += 1
            if not place.is_first_start_noted:
                place.tell("found-first")
            verdict = judging.judge(place)
            wrong += [f"after death {deaths}: {text}" for text in verdict.wrong]
            place.tell(f"committed {json.dumps(sorted(verdict.keys))}")
            continue
        if code:
            wrong.append(f"the process ended with {code}")
        break
    wrong += judging.judge_end(place, deaths=deaths).wrong
    wrong += _verify(place) if point.verifies else []
    return Outcome(deaths, "", tuple(dict.fromkeys(wrong)))


def _fail(point: Point, place: Place) -> Outcome:
    """One error, then the rest of the life; a process that it ended is started again, as a service would."""
    wrong: list[str] = []
    code = fork(place, point.fates[0])
    hit = place.last_of("hit", "")
    if code:
        wrong.append(f"the process ended with {code}")
    wrong += judging.judge_end(place, is_hurt=point.fates[0].is_persistent).wrong
    said = tuple(line[5:] for line in place.told() if line.startswith("said "))
    return Outcome(0, hit, tuple(dict.fromkeys(wrong)), said)


def _verify(place: Place) -> list[str]:
    """What `ckptd verify` says of the remote, beside the judge."""
    if place.scenario.store != "directory":
        return []
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        from ckptd.cli.main import main

        os.dup2(write, 1)
        os.dup2(write, 2)
        code = 1
        try:
            main(["verify", str(place.remote), "--read-data"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as stream:
        text = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [f"ckptd verify ends with {status}: {text[-300:]}"] if status else []


def every(calls: Calls, seed: int) -> list[Point]:
    """Every call of every scenario, before and after it, and half of it; in an order that the seed gives."""
    points = [
        Point(name, (Fate(at, side),), verifies=at % 10 == 0) for name, at in _places(calls) for side in SIDES
    ]
    random.Random(seed).shuffle(points)
    return points


def _places(calls: Calls) -> list[tuple[str, int]]:
    return [(name, at + 1) for name, made in calls.items() for at in range(len(made))]


def pairs(calls: Calls, seed: int, number: int) -> list[Point]:
    """A kill anywhere, and another while the next process recovers from it."""
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        name = rng.choice(sorted(calls))
        first = Fate(rng.randint(1, len(calls[name])), rng.choice(SIDES))
        second = Fate(int(rng.expovariate(1 / 60)) + 1, rng.choice(SIDES))
        made.append(Point(name, (first, second)))
    return made


def errors(calls: Calls, seed: int, codes: Sequence[int] = CODES) -> list[Point]:
    """Every call of every scenario fails, once or for five minutes, with each errno that it may meet."""
    fates = [Fate(1, "fail", code, is_persistent) for code in codes for is_persistent in (False, True)]
    points = [
        Point(name, (replace(fate, at=at),))
        for name, at in _places(calls)
        for fate in fates
        if fate.meets(calls[name][at - 1])
    ]
    random.Random(seed).shuffle(points)
    return points
