"""`python -m tests.killpoints [--minutes M] [--jobs N] [--only kill,pairs,errors] [POINT]`: the long run.

Forked from one warmed process per core; what was finished is remembered in .build/killpoints for as long as
the code is the same, so that a run that was cut goes on. A POINT, as a failure prints it, is run alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.killpoints import trainer
from tests.killpoints.life import SCENARIOS, Scenario
from tests.killpoints.points import Outcome, Point, count, errors, every, pairs, run

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / ".build"
SEED = 7
PAIRS = 2000
KINDS = {
    "kill": ("killpoints", "F1", "kill -9 before, within and after every durable call of a whole life"),
    "pairs": ("killpairs", "F2", "a second kill while the first is recovered from"),
    "errors": ("errors", "F4, F6, F7", "every call fails once, and for five minutes: EIO, ENOSPC, EDQUOT, …"),
}


def digest() -> str:
    """Of all code that a point runs."""
    sha = hashlib.sha256()
    for folder in (ROOT / "ckptd", ROOT / "tests" / "killpoints", ROOT / "tests" / "stores"):
        for path in sorted(folder.rglob("*.py")):
            sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


@contextmanager
def ground(*, is_full: bool) -> Iterator[tuple[Path, Path | None]]:
    """Where lives are lived: memory, and an XFS that clones where there may be one."""
    shm = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="ckptd-points-", dir=shm if os.access(shm, os.W_OK) else None))
    mounted: Path | None = None
    try:
        if is_full and os.geteuid() == 0 and shutil.which("mkfs.xfs"):
            image, mounted = base / "image", base / "xfs"
            with image.open("wb") as out:
                out.truncate(512 << 20)
            mounted.mkdir()
            subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
            done = subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=False)
            mounted = mounted if done.returncode == 0 else None
        yield base, mounted
    finally:
        if mounted is not None:
            subprocess.run(["umount", str(mounted)], check=False)
        shutil.rmtree(base, ignore_errors=True)


class Run:
    """One kind of points: what is finished, what is wrong."""

    def __init__(self, kind: str, points: list[Point], code: str) -> None:
        self.kind, self.points = kind, points
        self.name, self.fault, self.what = KINDS[kind]
        self.path = BUILD / "killpoints" / f"{self.name}-{code}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows = [json.loads(row) for row in rows]
        self.seconds = sum(row["seconds"] for row in self.rows)

    def go_on(self, bases: dict[str, Path], jobs: int, deadline: float) -> None:
        """Run what is left until the deadline."""
        done = {row["point"] for row in self.rows}
        left = [(p, bases[p.scenario]) for p in self.points if p.name not in done]
        with multiprocessing.get_context("fork").Pool(jobs) as pool, self.path.open("a") as out:
            for point, outcome, seconds in pool.imap_unordered(_one, left, chunksize=1):
                row = {
                    "point": point.name,
                    "deaths": outcome.deaths,
                    "hit": outcome.hit,
                    "wrong": outcome.wrong,
                    "seconds": round(seconds, 3),
                }
                self.rows.append(row)
                out.write(json.dumps(row) + "\n")
                if outcome.wrong:
                    print(f"VIOLATION {point.name}: {'; '.join(outcome.wrong)}", flush=True)
                if time.monotonic() > deadline:
                    pool.terminate()
                    break

    def figure(self, seconds: float) -> dict[str, object]:
        """What `make figures` reads."""
        return {
            "name": self.name,
            "fault": self.fault,
            "what": self.what,
            "command": f"python -m tests.killpoints --only {self.kind}",
            "runs": len(self.rows),
            "points": len(self.points),
            "crashes": sum(row["deaths"] for row in self.rows),
            "hits": sum(1 for row in self.rows if row["hit"]),
            "violations": sum(1 for row in self.rows if row["wrong"]),
            "seconds": round(seconds),
            "date": datetime.now(UTC).date().isoformat(),
        }


def _one(task: tuple[Point, Path]) -> tuple[Point, Outcome, float]:
    begun = time.monotonic()
    return task[0], run(*task), time.monotonic() - begun


def main() -> int:
    """Run; exit 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.killpoints")
    parser.add_argument("point", nargs="*", help="one point alone, as a failure prints it")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="kill,pairs,errors")
    parser.add_argument("--scenario", help="of this name alone")
    args = parser.parse_args()
    trainer.saves()
    named = [s for s in SCENARIOS if args.scenario in (None, s.name)]
    if args.point:
        named = [s for s in SCENARIOS if s.name == args.point[0].split()[0]]
    with ground(is_full=any(s.needs_clones for s in named)) as (base, clones):
        bases = {s.name: clones if s.needs_clones else base for s in SCENARIOS}
        ready = {name: place for name, place in bases.items() if place is not None}
        if args.point:
            point = Point.parse(" ".join(args.point))
            print(run(point, ready[point.scenario]))
            return 0
        counts = _counted([s for s in named if s.name in ready], ready)
        return _run_kinds(args.only.split(","), counts, ready, args)


def _counted(wanted: list[Scenario], bases: dict[str, Path]) -> dict[str, int]:
    """How many calls each life makes; counted once for as long as the code is the same."""
    path = BUILD / "killpoints" / f"counts-{digest()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    counts = {s.name: known.get(s.name) or count(s, bases[s.name]) for s in wanted}
    path.write_text(json.dumps(known | counts))
    print(f"calls: {counts}", flush=True)
    return counts


def _run_kinds(
    kinds: list[str], counts: dict[str, int], bases: dict[str, Path], args: argparse.Namespace
) -> int:
    code = digest() + (f"-{args.scenario}" if args.scenario else "")
    is_wrong = False
    for number, kind in enumerate(kinds):
        make = {"kill": lambda: every(counts, SEED), "pairs": lambda: pairs(counts, SEED, PAIRS)}
        points = make.get(kind, lambda: errors(counts, SEED))()
        begun = time.monotonic()
        one = Run(kind, points, code)
        one.go_on(bases, args.jobs, begun + 60 * args.minutes / len(kinds))
        figure = one.figure(one.seconds / args.jobs)
        print(json.dumps(figure), flush=True)
        is_wrong |= bool(figure["violations"])
        if args.scenario is None:
            (BUILD / "figures").mkdir(parents=True, exist_ok=True)
            (BUILD / "figures" / f"{one.name}.json").write_text(json.dumps(figure) + "\n")
        del number
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
