"""`python -m tests.sim SEED` replays one life; `--seeds A-B --minutes M` lives many, on all cores.

A run that was ended goes on where it stopped (`.build/sim/`); its last line is one line of JSON, which also
lies in `.build/figures/sim.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.sim.life import Outcome, drawn, live, shortened

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 20
SHOWN_LINES = 60


def main(arguments: list[str]) -> int:
    """Run; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="replay this life and show it")
    parser.add_argument("--seeds", help="A-B: many lives, B not included")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after this time, go on next time")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=40, help="most steps of a life")
    parser.add_argument(
        "--fresh", action="store_true", help="neither go on with an earlier run nor be gone on with"
    )
    parser.add_argument("--figures", type=Path, default=ROOT / ".build" / "figures" / "sim.json")
    parser.add_argument("--digests", action="store_true", help="one line of seed and history digest per life")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        return replay(chosen.seed, chosen.steps)
    if not chosen.seeds:
        parser.error("give a SEED or --seeds A-B")
    return many(chosen)


def replay(seed: int, most_steps: int) -> int:
    """Live one life; one that breaks a promise is shortened and shown."""
    life = drawn(seed, most_steps)
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
        f"job: local limit {life.config.local.save_total_limit}, backfill {life.config.backfill}; {remotes}"
    )
    print(f"{len(few.steps)} of {len(life.steps)} steps are enough: {' '.join(s.kind for s in few.steps)}")
    print("timeline:")
    for number, line in enumerate(again.history[-SHOWN_LINES:], max(0, len(again.history) - SHOWN_LINES)):
        print(f"{number:6} | {line}")
    print(f"replay: python -m tests.sim {seed} --steps {most_steps}")
    return 1


def chunk(work: tuple[int, int, int]) -> list[tuple[int, Outcome]]:
    """Some lives, without their histories."""
    first, last, most_steps = work
    found = []
    for seed in range(first, last):
        outcome = live(drawn(seed, most_steps))
        outcome.history = []
        found.append((seed, outcome))
    return found


def many(chosen: argparse.Namespace) -> int:
    """Live on all cores until the seeds or the time are used up."""
    first, last = (int(part) for part in chosen.seeds.split("-"))
    place = ROOT / ".build" / "sim" / f"{first}-{last}-{chosen.steps}.json"
    known: dict[str, Any] = {"done": [], "runs": 0, "crashes": 0, "steps": 0, "seconds": 0.0, "broken": {}}
    if place.is_file() and not chosen.fresh:
        known = json.loads(place.read_text())
    done = set(known["done"])
    works = [(at, min(at + CHUNK, last), chosen.steps) for at in range(first, last, CHUNK) if at not in done]
    before, started = known["seconds"], time.monotonic()
    kinds: Counter[str] = Counter()
    with multiprocessing.Pool(min(chosen.workers, max(1, len(works)))) as pool:
        for results in pool.imap_unordered(chunk, works):
            for seed, outcome in results:
                if chosen.digests:
                    print(seed, outcome.digest)
                kinds.update(outcome.kinds)
                known["runs"] += 1
                known["crashes"] += outcome.crashes
                known["steps"] += outcome.steps
                if outcome.broken is not None:
                    known["broken"][str(seed)] = outcome.broken[:300]
                    print(f"seed {seed} BROKEN {outcome.broken[:300]}")
                    print(f"replay: python -m tests.sim {seed} --steps {chosen.steps}", flush=True)
            known["done"].append(results[0][0])
            known["seconds"] = before + time.monotonic() - started
            if time.monotonic() - started > 60 * chosen.minutes:
                break
    if not chosen.fresh:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(known))
    line = json.dumps(
        figures(known, f"python -m tests.sim --seeds {chosen.seeds} --minutes {chosen.minutes:g}")
    )
    chosen.figures.parent.mkdir(parents=True, exist_ok=True)
    chosen.figures.write_text(line + "\n")
    print(line)
    return 1 if known["broken"] else 0


def figures(known: dict[str, Any], command: str) -> dict[str, Any]:
    """What is reported of a run."""
    return {
        "name": "sim",
        "command": command,
        "runs": known["runs"],
        "crashes": known["crashes"],
        "steps": known["steps"],
        "violations": len(known["broken"]),
        "seconds": round(known["seconds"], 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # sets of names have an order of their own in every process, and a life must not depend on it
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
