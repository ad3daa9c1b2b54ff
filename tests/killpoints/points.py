"""One life that is killed or hurt at its points, gone on with to its end, and judged.

A life of four saves is killed up to once for each of them, and goes on until nothing is left to do before
the next one is written: a death costs a restart, not a life. Some lives die once, in a process that has
lived from the beginning.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.killpoints import judge as judging
from tests.killpoints.life import KILLED, SCENARIOS, Place, Scenario, fork, left_of
from tests.killpoints.seams import WRITES, Fate

SIDES = ("before", "after", "half")
ALONE = 40
"""Of so many lives one is lived once for each of its deaths."""
VERIFIED = 10
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
    """What is done to one life: kills of its processes, by the saves that they work on, or one error."""

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
        return f"{fate.save}/{fate.side}:{fate.at}"
    often = "always" if fate.is_persistent else "once"
    return f"{errno.errorcode[fate.code]}:{often}:{fate.at}"


def _fate(text: str) -> Fate:
    what, *often, at = text.split(":")
    if not often:
        save, _, side = what.partition("/")
        return Fate(int(at), side, save=int(save))
    return Fate(int(at), "fail", getattr(errno, what), often == ["always"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """`deaths`: processes that were killed; `hit`: the call that failed ("" if none was reached).

    `recovering`: those deaths whose process had been started after another death for the same save.
    """

    deaths: int
    hit: str
    wrong: tuple[str, ...]
    said: tuple[str, ...] = ()
    recovering: int = 0
    died: tuple[str, ...] = ()
    """Which processes, if they are real ones."""


Calls = dict[str, list[list[str]]]
"""Scenario → the calls of an undisturbed life, in their order: before the first save, and for each."""


def calls_of(scenario: Scenario, base: Path) -> list[list[str]]:
    """The calls of an undisturbed life, which must be without fault itself."""
    with placed(scenario, base, "count") as place:
        code = fork(place, at_rest=judging.judge_rest)
        wrong = judging.judge_end(place).wrong
        if code or wrong:
            message = f"an undisturbed life of {scenario.name} is wrong: {code} {wrong}"
            raise AssertionError(message)
        parts: list[list[str]] = json.loads(place.last_of("calls", "[]"))
        return parts


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
    died_in: list[int] = []
    left: tuple[Fate, ...] | None = point.fates
    while left is not None:
        code = fork(place, *left, at_rest=judging.judge_rest)
        if code:
            wrong += [] if code == KILLED else [f"the process ended with {code}"]
            left = left_of(place, left) if code == KILLED else None
        if not code or left is None:
            break
        died_in.append(place.written)
        if place.written and not place.is_first_start_noted:
            place.tell("found-first")
        verdict = judging.judge(place)
        wrong += [f"after death {len(died_in)}: {text}" for text in verdict.wrong]
        place.tell(f"committed {json.dumps(sorted(verdict.keys))}")
    deaths = len(died_in)
    wrong += judging.judge_end(place, deaths=deaths).wrong
    wrong += _verify(place) if point.verifies else []
    return Outcome(deaths, "", tuple(dict.fromkeys(wrong)), recovering=deaths - len(set(died_in)))


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
    """Every call of every scenario, before and after it, and half of a write; in an order of the seed's."""
    points: list[Point] = []
    for name, parts in calls.items():
        rng = random.Random(f"{seed} {name}")  # another way of living that changes changes no names here
        columns = [_fates(made, save) for save, made in enumerate(parts)]
        lives = max(map(len, columns))
        for column in columns:
            column += [Fate()] * (lives - len(column))
            rng.shuffle(column)
        for number, drawn in enumerate(zip(*columns, strict=True)):
            fates = tuple(fate for fate in drawn if fate.at)
            several = [fates] if number % ALONE else [(fate,) for fate in fates]
            points += [Point(name, some, verifies=number % VERIFIED == 0) for some in several if some]
    random.Random(seed).shuffle(points)
    return points


def _fates(made: list[str], save: int) -> list[Fate]:
    return [
        Fate(at, side, save=save)
        for at, call in enumerate(made, start=1)
        for side in SIDES
        if side != "half" or call in WRITES
    ]


def _places(calls: Calls) -> list[tuple[str, int, str]]:
    """Scenario, number of the call in its life, call."""
    return [
        (name, at, call)
        for name, parts in calls.items()
        for at, call in enumerate(itertools.chain(*parts), start=1)
    ]


def pairs(calls: Calls, seed: int, number: int) -> list[Point]:
    """For every save a kill anywhere, and another while the next process recovers from it."""
    rng = random.Random(seed)
    made = []
    for _ in range(number // 4):
        name = rng.choice(sorted(calls))
        fates: list[Fate] = []
        for save, part in enumerate(calls[name][1:], start=1):
            fates.append(Fate(rng.randint(1, len(part)), rng.choice(SIDES), save=save))
            fates.append(Fate(int(rng.expovariate(1 / 60)) + 1, rng.choice(SIDES), save=save))
        made.append(Point(name, tuple(fates)))
    return made


def errors(calls: Calls, seed: int, codes: Sequence[int] = CODES) -> list[Point]:
    """Every call of every scenario fails, once or for five minutes, with each errno that it may meet."""
    fates = [Fate(1, "fail", code, is_persistent) for code in codes for is_persistent in (False, True)]
    points = [
        Point(name, (replace(fate, at=at),))
        for name, at, call in _places(calls)
        for fate in fates
        if fate.meets(call)
    ]
    random.Random(seed).shuffle(points)
    return points
