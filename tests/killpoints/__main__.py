"""`python -m tests.killpoints [--minutes M] [--only kill,pairs,errors,journal] [POINT]`: the long run.

Forked from one warmed process per core; what was finished is remembered in .build/killpoints with the commit
that was run, so that a run that was cut goes on. A POINT, as a failure prints it, is run alone. Where clones
cannot be made, the ways of living that need them are named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tests.killpoints import life, trainer
from tests.killpoints.defects import DEFECTS
from tests.killpoints.journals import Damage, Journals
from tests.killpoints.life import SCENARIOS, Place, Scenario
from tests.killpoints.points import (
    BY_NAME,
    Calls,
    Outcome,
    Point,
    calls_of,
    errors,
    errors_in,
    every,
    pairs,
    run,
    sites_of,
)
from tests.killpoints.record import BUILD, Record, digest, ground, no_clones

SEED = 7
PAIRS = 2000
KINDS = ("kill", "pairs", "errors", "journal")
CANNOT = 2
"""Exit status where what was asked for cannot be run, as for an argument that there is not."""
Task = Callable[[], Outcome]


@dataclass(frozen=True, slots=True)
class Work:
    """Points to run in their order, and how many there are in all: see `Record.end`."""

    tasks: Iterable[tuple[str, Task]]
    points: int
    sites: int = 0
    errors: int = 0


def main() -> int:
    """Run; exit 1 when a promise was broken, 2 when what was asked for cannot be run here."""
    args = _arguments()
    trainer.saves()
    defect = DEFECTS[args.defect] if args.defect else None
    if defect is not None:
        args.only = defect.kind
    asked = args.point[0] if args.point else args.scenario
    named = [s for s in SCENARIOS if asked in (None, s.name)]
    with ground(is_full=any(s.needs_clones for s in named)) as (base, clones):
        bases = {s.name: clones if s.needs_clones else base for s in SCENARIOS}
        ready = {name: place for name, place in bases.items() if place is not None}
        left_out = [s.name for s in named if s.name not in ready]
        if left_out:
            print(f"not run: {', '.join(left_out)} ({no_clones()})", flush=True)
            if asked is not None:
                return CANNOT
        if args.point:
            text = " ".join(args.point)
            is_journal = text.startswith("journal")
            outcome = _damaged(base, Damage.parse(text)) if is_journal else _point(ready, Point.parse(text))
            print(outcome)
            return int(bool(outcome.wrong))
        calls = partial(_called, [s for s in named if s.name in ready], ready)
        known = {kind: calls(reads=kind == "errors") for kind in args.only.split(",") if kind != "journal"}
        if defect is not None:
            life.DEFECT = defect.apply
        return _run_kinds(args, known, ready, base)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.killpoints")
    parser.add_argument("point", nargs="*", help="one point alone, as a failure prints it")
    parser.add_argument("--minutes", type=float, default=20.0, help="for each kind its share")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--scenario", choices=list(BY_NAME), help="of this name alone")
    parser.add_argument("--sample", type=int, help="so many points of each kind; nothing is remembered")
    parser.add_argument("--sites", help="errors: EIO at each site with one of these texts in it, by commas")
    parser.add_argument("--anew", nargs="*", default=(), help="ways of living to begin anew, or all")
    parser.add_argument("--defect", choices=DEFECTS, help="with this defect put in; it must be found")
    args = parser.parse_args()
    args.point = " ".join(args.point).split()
    if args.point and args.point[0] not in (*BY_NAME, "journal"):
        parser.error(f"there is no way of living called {args.point[0]!r}")
    return args


def _point(bases: dict[str, Path], point: Point) -> Outcome:
    return run(point, bases[point.scenario])


def _damaged(base: Path, damage: Damage) -> Outcome:
    wrong, was_lived = _journal_in(base).run(damage)
    return Outcome(0, tuple(wrong), (damage.kind,) if was_lived else ())


@cache
def _journal_in(base: Path) -> Journals:
    """One, made before the workers are forked."""
    place = Place(base / "journal", BY_NAME["directory"])
    place.make()
    return Journals(place)


def _called(wanted: list[Scenario], bases: dict[str, Path], *, reads: bool) -> Calls:
    """The calls that each life makes; looked at once for as long as the code is the same."""
    path = BUILD / "killpoints" / f"calls-{'reads-' if reads else ''}{digest()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known: Calls = json.loads(path.read_text()) if path.exists() else {}
    calls = {s.name: known.get(s.name) or calls_of(s, bases[s.name], reads=reads) for s in wanted}
    path.write_text(json.dumps(known | calls))
    print(f"calls: { {name: [len(part) for part in parts] for name, parts in calls.items()} }", flush=True)
    return calls


def _work(kind: str, calls: Calls, bases: dict[str, Path], base: Path, only: str | None) -> Work:
    if kind == "journal":
        journals = _journal_in(base)
        return Work(((d.name, partial(_damaged, base, d)) for d in journals.damages(SEED)), journals.number)
    if kind == "errors":
        sites = sites_of(calls, only.split(",") if only else ())
        points = errors(sites, SEED, is_short=only is not None)
        total, ways = errors_in(sites)
        return Work(_tasks(points, bases), total, len(sites), ways)
    points = every(calls, SEED) if kind == "kill" else pairs(calls, SEED, PAIRS)
    return Work(_tasks(points, bases), sum(len(p.fates) for p in points))


def _tasks(points: list[Point], bases: dict[str, Path]) -> list[tuple[str, Task]]:
    return [(p.name, partial(_point, bases, p)) for p in points]


def _calls_at(calls: Calls, text: str) -> set[str]:
    """The calls that a point is about."""
    point = Point.parse(text)
    parts = calls[point.scenario]
    return {parts[fate.save or 0][fate.at - 1].partition(" @ ")[0] for fate in point.fates}


def _run_kinds(args: argparse.Namespace, calls: dict[str, Calls], bases: dict[str, Path], base: Path) -> int:
    kinds = args.only.split(",")
    is_wrong = False
    for kind in kinds:
        work = _work(kind, calls.get(kind, {}), bases, base, args.sites)
        tasks = work.tasks
        if args.defect is not None:
            tasks = [t for t in tasks if _calls_at(calls[kind], t[0]) & set(DEFECTS[args.defect].calls)]
        is_sample = args.sample is not None or args.defect is not None or args.sites is not None
        if args.sample is not None:
            tasks = itertools.islice(tasks, args.sample)
        record = Record(kind, args.scenario or "", is_kept=not is_sample, anew=args.anew)
        deadline = time.monotonic() + 60 * args.minutes / len(kinds)
        sought = DEFECTS[args.defect].shows if args.defect else None
        _go_on(record, tasks, args.jobs, deadline, sought)
        is_wrong |= record.end(work.points, args.jobs, sites=work.sites, errors=work.errors)
    return int(is_wrong)


def _go_on(
    record: Record, tasks: Iterable[tuple[str, Task]], jobs: int, deadline: float, sought: str | None
) -> None:
    """Run what is left until the deadline, or until what is sought was found."""
    left = (task for task in tasks if task[0] not in record.done)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for name, outcome, seconds in pool.imap_unordered(_timed, left):
            record.add(name, outcome, seconds)
            is_spoilt = bool(outcome.wrong) and name.startswith("journal")  # the one life that all go on from
            if (
                time.monotonic() > deadline
                or is_spoilt
                or (sought is not None and sought in " ".join(outcome.wrong))
            ):
                pool.terminate()
                break


def _timed(task: tuple[str, Task]) -> tuple[str, Outcome, float]:
    begun = time.monotonic()
    return task[0], task[1](), time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
