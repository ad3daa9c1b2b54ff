"""`python -m tests.sim SEED` replays one life; `--seeds A-B --minutes M` lives many, on all cores.

Runs add up, over all ranges of seeds, for as long as the code is the same: `.build/sim/<digest>.json` has
what was lived, and a run that was ended goes on where it stopped. The last line is one line of JSON, which
also lies in `.build/figures/sim.json`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.sim.life import Outcome, drawn, live, shortened
from tests.support.figures import commit_now

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 20
SHOWN_LINES = 60


def main(arguments: list[str]) -> int:
    """Run; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="replay this life and show it")
    parser.add_argument("--seeds", help="A-B: many lives, B not included")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after this time, go on next time")
    parser.add_argument("--crashes", type=int, default=None, help="end when so many crashes add up")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=40, help="most steps of a life")
    parser.add_argument("--often", action="store_true", help="the daemon dies some times after each step")
    parser.add_argument(
        "--fresh", action="store_true", help="neither go on with earlier runs nor be gone on with"
    )
    parser.add_argument("--figures", type=Path, help="where the last line goes, else .build/figures")
    parser.add_argument("--digests", action="store_true", help="one line of seed and history digest per life")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        return replay(chosen.seed, chosen.steps, is_often=chosen.often)
    if not chosen.seeds:
        parser.error("give a SEED or --seeds A-B")
    return many(chosen)


def replay(seed: int, most_steps: int, *, is_often: bool = False) -> int:
    """Live one life; one that breaks a promise is shortened and shown."""
    life = drawn(seed, most_steps, dies_often=is_often)
    outcome = live(life)
    if outcome.broken is None:
        print(f"seed {seed}: {outcome.steps} steps, {outcome.crashes} crashes, digest {outcome.digest[:16]}")
        return 0
    few = shortened(life, outcome.broken)
    again = live(few)
    remotes = ", ".join(
        f"{r.name} required={r.required} limit={r.save_total_limit}" for r in life.config.remotes
    )
    print(f"seed {seed} BROKEN {again.broken or outcome.broken}")
    print(
        f"job: local limit {life.config.local.save_total_limit}, existing {life.config.existing}; {remotes}"
    )
    print(f"{len(few.steps)} of {len(life.steps)} steps are enough: {' '.join(s.kind for s in few.steps)}")
    print("timeline:")
    for number, line in enumerate(again.history[-SHOWN_LINES:], max(0, len(again.history) - SHOWN_LINES)):
        print(f"{number:6} | {line}")
    print(f"replay: {command_of(seed, most_steps, is_often=is_often)}")
    return 1


def command_of(seed: int, most_steps: int, *, is_often: bool) -> str:
    """Return the command that lives this life again."""
    return f"python -m tests.sim {seed} --steps {most_steps}{' --often' * is_often}"


def digest() -> str:
    """Of all code that a life runs: only lives of one code add up."""
    sha = hashlib.sha256()
    around = {"__main__.py", "seeded.py"}
    folders = (ROOT / "ckptd", ROOT / "tests" / "sim", ROOT / "tests" / "support")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in (*paths, ROOT / "tests" / "stores" / "memory.py"):
        if not (path.parent.name == "sim" and (path.name in around or path.name.startswith("test_"))):
            sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


class Known:
    """What was lived with this code; at `path`, or in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        kept: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        self.done: set[int] = set(kept.get("done", ()))
        self.crashes: int = kept.get("crashes", 0)
        self.steps: int = kept.get("steps", 0)
        self.seconds: float = kept.get("seconds", 0.0)
        self.broken: dict[str, str] = kept.get("broken", {})

    def add(self, seed: int, outcome: Outcome) -> None:
        """One life more."""
        self.done.add(seed)
        self.crashes += outcome.crashes
        self.steps += outcome.steps
        if outcome.broken is not None:
            self.broken[str(seed)] = outcome.broken[:300]

    def keep(self) -> None:
        """Write it down whole: a run may be ended at any time."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: getattr(self, name) for name in ("crashes", "steps", "seconds", "broken")}
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(rows | {"done": sorted(self.done)}))
        beside.replace(self._path)


def chunk(work: tuple[list[int], int, bool]) -> list[tuple[int, Outcome]]:
    """Some lives, without their histories."""
    seeds, most_steps, is_often = work
    found = []
    for seed in seeds:
        outcome = live(drawn(seed, most_steps, dies_often=is_often))
        outcome.history = []
        found.append((seed, outcome))
    return found


def many(chosen: argparse.Namespace) -> int:
    """Live on all cores until the seeds or the time are used up."""
    first, last = (int(part) for part in chosen.seeds.split("-"))
    name, option = ("sim-often", " --often") if chosen.often else ("sim", "")
    kept = ROOT / ".build" / name / f"{digest()}-{chosen.steps}.json"
    known = Known(None if chosen.fresh else kept)
    left = [seed for seed in range(first, last) if seed not in known.done]
    works = [(left[at : at + CHUNK], chosen.steps, chosen.often) for at in range(0, len(left), CHUNK)]
    before, started = known.seconds, time.monotonic()
    # what was imported stays, and no collection need look at it
    with multiprocessing.Pool(min(chosen.workers, max(1, len(works))), initializer=gc.freeze) as pool:
        for results in pool.imap_unordered(chunk, works):
            for seed, outcome in results:
                if chosen.digests:
                    print(seed, outcome.digest)
                known.add(seed, outcome)
                if outcome.broken is not None:
                    print(f"seed {seed} BROKEN {outcome.broken[:300]}")
                    print("replay:", command_of(seed, chosen.steps, is_often=chosen.often), flush=True)
            known.seconds = before + time.monotonic() - started
            known.keep()
            is_enough = chosen.crashes is not None and known.crashes >= chosen.crashes
            if is_enough or time.monotonic() - started > 60 * chosen.minutes:
                break
    enough = "" if chosen.crashes is None else f" --crashes {chosen.crashes}"
    command = f"python -m tests.sim{option} --seeds {chosen.seeds}{enough} --minutes {chosen.minutes:g}"
    line = json.dumps(figures(known, name, command))
    place: Path = chosen.figures or ROOT / ".build" / "figures" / f"{name}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(line + "\n")
    print(line)
    return 1 if known.broken else 0


def figures(known: Known, name: str, command: str) -> dict[str, Any]:
    """What is reported of a run."""
    return {
        "name": name,
        "command": command,
        "runs": len(known.done),
        "crashes": known.crashes,
        "steps": known.steps,
        "violations": len(known.broken),
        "commit": commit_now(),
        "seconds": round(known.seconds, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # sets of names have an order of their own in every process, and a life must not depend on it
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
