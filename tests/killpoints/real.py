"""`python -m tests.killpoints.real`: SIGKILL in the real daemon and in every kind of child that it has.

Three saves, and for each of them a run of `ckptd run --once` in which one process dies, at a counted call or
at any moment, and a run that goes on. The judge of the other points reads the bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.killpoints import judge as judging
from tests.killpoints import trainer
from tests.killpoints.life import Place, Scenario
from tests.killpoints.points import SIDES, Outcome
from tests.killpoints.record import BUILD, ROOT, Record, digest, ground
from tests.killpoints.victim import DIED

SAVES = 3
SEED = 11
SCENARIO = Scenario("real", saves=SAVES, backfill="all")
MODULES = {
    "daemon": "ckptd",
    "remote": "ckptd.storage.child.child",
    "planning": "ckptd.conversion.engine.planner_child",
    "executor": "ckptd.conversion.engine.executor_child",
    "inspect": "ckptd.conversion.engine.inspect_child",
}
Sizes = dict[str, int]
"""`calls <who> <run>` → counted calls; `ms <who> <run>` → how long the first process of that kind lives."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Which process dies, in which run (from 1), at which of its calls; or so many milliseconds old."""

    who: str
    run: int
    side: str
    """Of a call; or `ms`: whatever it is doing."""
    at: int

    @property
    def name(self) -> str:
        """As a failure prints it."""
        return f"{self.who}/{self.run}/{self.side}:{self.at}"


def _start(place: Place, victim: Victim | None, said: IO[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptd", "run", "--job", str(place.root / "run.toml"), "--once"]
    if victim is not None and victim.side != "ms":
        given = [victim.who, str(victim.run), victim.side, str(victim.at), str(place.root)]
        command = [sys.executable, "-m", "tests.killpoints.victim", *given]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=said)


def _once(place: Place, victim: Victim | None) -> tuple[int, str, bool]:
    """One `ckptd run --once`; exit status, what it said, whether the victim died."""
    with tempfile.TemporaryFile("w+") as said:
        daemon = _start(place, victim, said)
        died = False
        try:
            if victim is not None and victim.side == "ms":
                died = _kill_in(daemon, victim)
            code = daemon.wait(120)
        finally:
            daemon.kill()
            daemon.wait()
        said.seek(0)
        if (place.root / DIED).exists():
            (place.root / DIED).unlink()
            died = True
        return code, said.read()[-1500:], died


def _kill_in(daemon: subprocess.Popen[bytes], victim: Victim) -> bool:
    """Wait until such a process is there and so old, and kill it; whether it was still alive."""
    while (pid := _pid_of(daemon, victim.who)) is None:
        if daemon.poll() is not None:
            return False
        time.sleep(0.002)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if select.select([handle], [], [], victim.at / 1000)[0]:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _pid_of(daemon: subprocess.Popen[bytes], who: str) -> int | None:
    """The daemon itself, or the child of it that runs that module."""
    if who == "daemon":
        return daemon.pid
    try:
        lists = [p.read_text() for p in Path(f"/proc/{daemon.pid}/task").glob("*/children")]
    except OSError:
        return None
    for pid in " ".join(lists).split():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if MODULES[who].encode() in words:
            return int(pid)
    return None


def live(place: Place, victims: tuple[Victim, ...]) -> Outcome:
    """All saves; who is named dies, and the run is repeated."""
    wrong: list[str] = []
    died: list[str] = []
    for number, save in enumerate(trainer.saves()[:SAVES], start=1):
        trainer.write(place.save_dir, save, is_constant=False)
        place.tell(f"written {number}")
        for victim in (*(v for v in victims if v.run == number), None):
            code, said, is_dead = _once(place, victim)
            if victim is not None:
                died += [victim.who] if is_dead else []
                verdict = judging.judge(place)
                wrong += [f"after {victim.name}: {text}" for text in verdict.wrong]
                if not place.is_first_start_noted:
                    place.tell("found-first")
            elif code:
                wrong.append(f"run {number} ended with {code}: {said}")
            if "Traceback" in said or "watchdog" in said:
                wrong.append(f"run {number}: {said}")
    wrong += judging.judge_end(place, deaths=len(died)).wrong
    return Outcome(len(died), tuple(dict.fromkeys(wrong)), died=tuple(died))


def sizes(base: Path) -> Sizes:
    """How many calls each process makes in each run and how long it lives; looked at once."""
    path = BUILD / "killpoints" / f"real-{digest('real')}.json"
    if path.exists():
        known: Sizes = json.loads(path.read_text())
        return known
    found: Sizes = {}
    for counted in ("daemon", "remote", None):
        place = Place(base / f"count-{counted}", SCENARIO)
        place.make()
        for run, save in enumerate(trainer.saves()[:SAVES], start=1):
            trainer.write(place.save_dir, save, is_constant=False)
            with tempfile.TemporaryFile("w+") as said:
                daemon = _start(place, Victim(counted, run, "before", 0) if counted else None, said)
                ages = _ages(daemon)
                if daemon.wait(120):
                    said.seek(0)
                    raise AssertionError(said.read())
            if counted:
                calls = (place.root / f"calls-{counted}-{run}").read_text()
                found[f"calls {counted} {run}"] = len(calls.splitlines())
            else:
                found |= {f"ms {who} {run}": age for who, age in ages.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found


def _ages(daemon: subprocess.Popen[bytes]) -> Sizes:
    """For how many milliseconds the first process of each kind was seen."""
    first: dict[str, tuple[int, float]] = {}
    ages: Sizes = {}
    while daemon.poll() is None:
        for who in MODULES:
            pid, now = _pid_of(daemon, who), time.monotonic()
            if pid is not None and first.setdefault(who, (pid, now))[0] == pid:
                ages[who] = int(1000 * (now - first[who][1]))
        time.sleep(0.002)
    return ages


def lives(found: Sizes, number: int) -> list[tuple[Victim, ...]]:
    """So many deaths, three for each life: half of them evenly over all calls (beside others, where there are
    fewer calls than deaths), half at any moment."""
    rng = random.Random(SEED)
    columns = []
    for run in range(1, SAVES + 1):
        calls = [
            Victim(who, run, side, at)
            for who in ("daemon", "remote")
            for at in range(1, found[f"calls {who} {run}"] + 1)
            for side in SIDES
        ]
        moments = [
            Victim(who, run, "ms", rng.randrange(max(1, found[f"ms {who} {run}"])))
            for _, who in zip(range(number), itertools.cycle(MODULES), strict=False)
        ]
        half = number // SAVES // 2 + 1
        at_calls = itertools.islice(itertools.cycle(rng.sample(calls, len(calls))), half)
        column = [*at_calls, *moments[:half]]
        rng.shuffle(column)
        columns.append(column)
    return [tuple(drawn) for drawn in zip(*columns, strict=True)]


def _name(victims: tuple[Victim, ...]) -> str:
    return "real " + " ".join(victim.name for victim in victims)


def one(base: Path, victims: tuple[Victim, ...]) -> tuple[str, Outcome, float]:
    """In a folder of its own."""
    begun = time.monotonic()
    name = _name(victims)
    place = Place(base / name.replace("/", "-").replace(" ", "_"), SCENARIO)
    place.make()
    try:
        return name, live(place, victims), time.monotonic() - begun
    finally:
        shutil.rmtree(place.root, ignore_errors=True)


def main() -> int:
    """Run; exit 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.killpoints.real")
    parser.add_argument("--number", type=int, default=360, help="of deaths")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--anew", action="store_const", const=("all",), default=(), help="begin anew")
    parser.add_argument("--sample", action="store_true", help="nothing is remembered")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    record = Record("real", "", is_kept=not args.sample, anew=args.anew)
    with ground(is_full=False) as (base, _), ThreadPoolExecutor(args.jobs) as pool:
        chosen = lives(sizes(base), args.number)
        left = [victims for victims in chosen if _name(victims) not in record.done]
        tasks = [pool.submit(one, base, victims) for victims in left]
        for task in as_completed(tasks):
            record.add(*task.result())
            if time.monotonic() > deadline:
                pool.shutdown(wait=True, cancel_futures=True)
                break
        return int(record.end(SAVES * len(chosen), args.jobs))


if __name__ == "__main__":
    sys.exit(main())
