"""`python -m tests.killpoints.real`: SIGKILL in the real daemon and in the child of its remote.

Three saves, a run of `ckptd run --once` for each; in one of the runs one process dies at a counted call.
The next run goes on, and the same judge reads the bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.killpoints import judge as judging
from tests.killpoints import trainer
from tests.killpoints.life import Place, Scenario
from tests.killpoints.points import SIDES, Outcome
from tests.killpoints.record import ROOT, Record, ground

SAVES = 3
SEED = 11
SCENARIO = Scenario("real", saves=SAVES, backfill="all")


@dataclass(frozen=True, slots=True)
class Victim:
    """Which process dies, in which run (from 1), at which of its calls."""

    who: str
    run: int
    side: str
    at: int

    @property
    def name(self) -> str:
        """As a failure prints it."""
        return f"real {self.who} run{self.run} {self.side}:{self.at}"


def _once(place: Place, victim: Victim | None) -> tuple[int, str]:
    """One `ckptd run --once`; exit status and what it said."""
    command = [sys.executable, "-m", "ckptd", "run", "--job", str(place.root / "run.toml"), "--once"]
    if victim is not None:
        given = [victim.who, str(victim.run), victim.side, str(victim.at), str(place.root)]
        command = [sys.executable, "-m", "tests.killpoints.victim", *given]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stderr[-1500:]


def live(place: Place, victims: tuple[Victim, ...]) -> Outcome:
    """All saves; who is named dies, and the run is repeated."""
    wrong: list[str] = []
    deaths = 0
    for number, save in enumerate(trainer.saves()[:SAVES], start=1):
        trainer.write(place.save_dir, save, is_constant=False)
        place.tell(f"written {number}")
        for victim in (*(v for v in victims if v.run == number), None):
            code, said = _once(place, victim)
            if victim is not None and victim.at:
                deaths += code == -signal.SIGKILL or victim.who == "remote"
                wrong += [f"after {victim.name}: {text}" for text in judging.judge(place).wrong]
                if not place.is_first_start_noted:
                    place.tell("found-first")
            elif code:
                wrong.append(f"run {number} ended with {code}: {said}")
    wrong += judging.judge_end(place, deaths=deaths).wrong
    return Outcome(deaths, "", tuple(dict.fromkeys(wrong)))


def counted(base: Path) -> dict[tuple[str, int], int]:
    """How many calls each process makes in each run."""
    place = Place(base / "count", SCENARIO)
    place.make()
    for who in ("daemon", "remote"):
        shutil.rmtree(place.root, ignore_errors=True)
        place.make()
        outcome = live(place, tuple(Victim(who, run, "before", 0) for run in range(1, SAVES + 1)))
        if outcome.wrong:
            raise AssertionError(outcome.wrong)
        for path in place.root.glob(f"calls-{who}-*"):
            path.rename(base / path.name)
    found = [(p.name.split("-"), len(p.read_text().splitlines())) for p in base.glob("calls-*-*")]
    return {(name[1], int(name[2])): number for name, number in found}


def victims(calls: dict[tuple[str, int], int], number: int) -> list[Victim]:
    """So many points, evenly over all calls."""
    every = [
        Victim(who, run, side, at)
        for (who, run), count in sorted(calls.items())
        for at in range(1, count + 1)
        for side in SIDES
    ]
    return random.Random(SEED).sample(every, min(number, len(every)))


def one(base: Path, victim: Victim) -> tuple[Victim, Outcome, float]:
    """In a folder of its own."""
    begun = time.monotonic()
    place = Place(base / f"{victim.who}-{victim.run}-{victim.side}-{victim.at}", SCENARIO)
    place.make()
    try:
        return victim, live(place, (victim,)), time.monotonic() - begun
    finally:
        shutil.rmtree(place.root, ignore_errors=True)


def main() -> int:
    """Run; exit 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.killpoints.real")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample", action="store_true", help="nothing is remembered")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    record = Record("real", "", is_kept=not args.sample)
    with ground(is_full=False) as (base, _), ThreadPoolExecutor(args.jobs) as pool:
        chosen = victims(counted(base), args.number)
        left = [victim for victim in chosen if victim.name not in record.done]
        tasks = [pool.submit(one, base, victim) for victim in left]
        for task in as_completed(tasks):
            victim, outcome, seconds = task.result()
            record.add(victim.name, outcome, seconds)
            if time.monotonic() > deadline:
                pool.shutdown(wait=True, cancel_futures=True)
                break
        return int(record.end(len(chosen), args.jobs))


if __name__ == "__main__":
    sys.exit(main())
