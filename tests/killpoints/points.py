"""One life that is killed or hurt at its points, gone on with to its end, and judged.

A life of four saves is killed up to once for each of them, and goes on until nothing is left to do before
the next one is written: a death costs a restart, not a life. Some lives die once, in a process that has
lived from the beginning. Errors likewise: one for each save, and one before the first.
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
from tests.killpoints.life import ENDED, KILLED, SCENARIOS, Place, Scenario, fork, left_of
from tests.killpoints.seams import WRITES, Fate

SIDES = ("before", "after", "half")
ALONE = 40
"""Of so many lives one is lived once for each of its deaths."""
VERIFIED = 10
AT_RANDOM = 20_000
"""Lives with errors that are drawn besides those that go through all sites."""
OFTEN = ("once", "here", "always")
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
    return f"{fate.save}/{errno.errorcode[fate.code]}:{fate.often}:{fate.at}"


def _fate(text: str) -> Fate:
    save, _, rest = text.partition("/")
    what, *often, at = rest.split(":")
    if not often:
        return Fate(int(at), what, save=int(save))
    return Fate(int(at), "fail", getattr(errno, what), often[0], save=int(save))


@dataclass(frozen=True, slots=True)
class Outcome:
    """`deaths`: processes that were killed; `hits`: the calls that failed, each with its error and site.

    `recovering`: those deaths whose process had been started after another death for the same save.
    """

    deaths: int
    wrong: tuple[str, ...]
    hits: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    recovering: int = 0
    died: tuple[str, ...] = ()
    """Which processes, if they are real ones."""


Calls = dict[str, list[list[str]]]
"""Scenario → the calls of an undisturbed life, in their order: before the first save, and for each."""


def calls_of(scenario: Scenario, base: Path, *, reads: bool = False) -> list[list[str]]:
    """The calls of an undisturbed life, itself without fault; `reads`: these too, each with its site."""
    with placed(scenario, base, "count") as place:
        code = fork(place, at_rest=judging.judge_rest, reads=reads)
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
    return Outcome(deaths, tuple(dict.fromkeys(wrong)), recovering=deaths - len(set(died_in)))


def _fail(point: Point, place: Place) -> Outcome:
    """Errors, each while a save is worked on, and the rest of the life; the first may end a start."""
    code = ENDED
    for fates in (point.fates, point.fates[1:]):
        code = fork(
            place,
            *fates,
            reads=True,
            at_rest=lambda place: judging.judge(place).wrong,
            is_safe=judging.newest_is_safe,
        )
        if code != ENDED:
            break
    wrong = [f"the process ended with {code}"] if code else []
    wrong += judging.judge_end(place, hurts=sum(fate.is_persistent for fate in point.fates)).wrong
    said = tuple(line[5:] for line in place.told() if line.startswith("said "))
    return Outcome(0, tuple(dict.fromkeys(wrong)), tuple(place.hits), said)


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


Where = tuple[str, int, int]
"""Scenario, save, number of the call."""


def sites_of(calls: Calls, only: Sequence[str] = ()) -> dict[str, list[Where]]:
    """Call with its site → where it is made; `only` those with one of these texts in them."""
    sites: dict[str, list[Where]] = {}
    for name, parts in calls.items():
        for save, part in enumerate(parts):
            for at, call in enumerate(part, start=1):
                if not only or any(text in call for text in only):
                    sites.setdefault(call, []).append((name, save, at))
    return sites


def _met(call: str, codes: Sequence[int] = CODES) -> list[Fate]:
    fates = [Fate(1, "fail", code, often) for code in codes for often in OFTEN]
    return [fate for fate in fates if fate.meets(call)]


def errors_in(sites: dict[str, list[Where]]) -> tuple[int, int]:
    """How many errors there are, each errno once and lasting: at all calls, and at all sites."""
    ways = {call: len(_met(call)) for call in sites}
    return sum(ways[call] * len(where) for call, where in sites.items()), sum(ways.values())


def errors(sites: dict[str, list[Where]], seed: int, *, is_short: bool = False) -> list[Point]:
    """First EIO at a call of every site, then every other errno, then errors at random; each once or lasting.

    `is_short`: EIO alone.
    """
    rng = random.Random(seed)
    points: list[Point] = []
    for codes in ((errno.EIO,),) if is_short else ((errno.EIO,), CODES[1:]):
        drawn = [_drawn(rng, sites[call], fate) for call in sorted(sites) for fate in _met(call, codes)]
        points += _lives(drawn, rng)
    if is_short:
        return points
    names = sorted(sites)
    weights = list(itertools.accumulate(len(sites[name]) for name in names))
    for _ in range(AT_RANDOM // 1000):
        chosen = rng.choices(names, cum_weights=weights, k=4000)
        points += _lives([_drawn(rng, sites[call], rng.choice(_met(call))) for call in chosen], rng)
    return points


def _drawn(rng: random.Random, places: list[Where], fate: Fate) -> tuple[str, Fate]:
    name, save, at = rng.choice(places)
    return name, replace(fate, at=at, save=save)


def _lives(drawn: list[tuple[str, Fate]], rng: random.Random) -> list[Point]:
    """Of those of one way of living each life gets at most one for each save."""
    columns: dict[str, dict[int, list[Fate]]] = {}
    for name, fate in drawn:
        columns.setdefault(name, {}).setdefault(fate.save or 0, []).append(fate)
    points = []
    for name, by_save in sorted(columns.items()):
        for column in by_save.values():
            rng.shuffle(column)
        rows = itertools.zip_longest(*(by_save[save] for save in sorted(by_save)))
        points += [Point(name, tuple(fate for fate in row if fate is not None)) for row in rows]
    rng.shuffle(points)
    return points
