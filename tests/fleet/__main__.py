"""`python -m tests.fleet SEED` tells one history; `--seeds A-B --minutes M` many, and goes on.

Without `--nodes` and `--checkpoints` each seed draws up to 8 × 6; with them every history has just that size.
In every fifth history that is drawn two runs of one job name save into the remote.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from tests.fleet.story import Shape, Told, staged, tell
from tests.support.figures import commit_now

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.pool import IMapIterator

ROOT = Path(__file__).resolve().parents[2]
MOST_NODES, MOST_CHECKPOINTS = 8, 6
CHUNK = 10
LONG_RUN, LONG_RUN_KEEPS = 100, 12
"""Saves."""


def shape_of(seed: int, nodes: int | None, checkpoints: int | None) -> Shape:
    """The size of a history."""
    chance = Random(seed * 7 + 1)
    drawn = chance.randint(1, MOST_NODES), chance.randint(1, MOST_CHECKPOINTS)
    many = checkpoints or drawn[1]
    # who saves hundreds of times rotates, or torn saves fill the disk
    keeps = LONG_RUN_KEEPS if many > LONG_RUN else None
    runs = 2 if seed % 5 == 4 and nodes is None and checkpoints is None else 1
    return Shape(nodes=nodes or drawn[0], checkpoints=many, trainer_keeps=keeps, runs=runs)


def tell_some(work: tuple[int, int, int | None, int | None]) -> list[Told]:
    """Histories of some seeds, in one process."""
    first, last, nodes, checkpoints = work
    found = []
    with staged():
        for seed in range(first, last):
            before = time.process_time()
            told = tell(seed, shape_of(seed, nodes, checkpoints))
            told.cpu_seconds = time.process_time() - before
            found.append(told)
    gc.collect()
    return found


def seldom_collecting() -> None:
    """Of a process that tells many: code and documents outlive a history, and are no garbage to look for."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def main(arguments: list[str]) -> int:
    """Exit status: 0 when no promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--seeds", help="A-B: from A up to B, without B")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--checkpoints", type=int)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run did")
    chosen = parser.parse_args(arguments)
    if chosen.seeds is None:
        return one(chosen.seed or 0, chosen)
    return many(chosen)


def one(seed: int, chosen: argparse.Namespace) -> int:
    """Tell one history with its timeline."""
    with staged():
        told = tell(seed, shape_of(seed, chosen.nodes, chosen.checkpoints), is_loud=True)
    print("\n".join(told.lines))
    size = f"{told.saves} saves, {told.commits} COMMITs, {told.requests:,} requests"
    print(f"seed {seed}: {'BROKEN ' + told.broken if told.broken else size}")
    return 1 if told.broken else 0


def many(chosen: argparse.Namespace) -> int:
    """Tell many on all cores until the seeds or the time are used up."""
    first, last = (int(part) for part in chosen.seeds.split("-"))
    size = f"{chosen.nodes}x{chosen.checkpoints}" if chosen.nodes or chosen.checkpoints else "drawn"
    place = ROOT / ".build" / "fleet" / f"{first}-{last}-{size}-{code_digest()}.json"
    known: dict[str, Any] = {"done": [], "seconds": 0.0, "broken": {}, "sums": {}}
    if place.is_file() and not chosen.fresh:
        known = json.loads(place.read_text())
    chunk = CHUNK if (chosen.nodes or 0) * (chosen.checkpoints or 0) < 400 else 1
    works = [
        (at, min(at + chunk, last), chosen.nodes, chosen.checkpoints)
        for at in range(first, last, chunk)
        if at not in known["done"]
    ]
    before, started = known["seconds"], time.monotonic()
    place.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool(min(chosen.workers, max(1, len(works))), seldom_collecting) as pool:
        for found in _within(pool.imap_unordered(tell_some, works), started + 60 * chosen.minutes):
            for told in found:
                _add(known, told, chosen)
            known["done"].append(found[0].seed)
            known["seconds"] = before + time.monotonic() - started
            # whoever is ended goes on from here
            place.with_suffix(".new").write_text(json.dumps(known))
            place.with_suffix(".new").rename(place)
    if not known["done"]:
        print(f"no history was told to its end in {chosen.minutes:g} minutes")
        return 0
    line = json.dumps(figures(known, chosen, size))
    target = ROOT / ".build" / "figures" / ("fleet.json" if size == "drawn" else f"fleet-{size}.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(line + "\n")
    print(line)
    return 1 if known["broken"] else 0


def _within(found: IMapIterator[list[Told]], until: float) -> Iterator[list[Told]]:
    """What is done by then; a history that is under way is given up."""
    with contextlib.suppress(StopIteration, multiprocessing.TimeoutError):
        while True:
            yield found.next(max(0.0, until - time.monotonic()))


def _add(known: dict[str, Any], told: Told, chosen: argparse.Namespace) -> None:
    sums = known["sums"]
    for name in ("saves", "commits", "deaths", "replaced", "deletions", "requests", "cpu_seconds"):
        sums[name] = sums.get(name, 0) + getattr(told, name)
    sums["runs"] = sums.get("runs", 0) + 1
    if told.broken is not None:
        known["broken"][str(told.seed)] = told.broken[:300]
        sizes = [
            f"--{name} {value}"
            for name, value in (("nodes", chosen.nodes), ("checkpoints", chosen.checkpoints))
            if value
        ]
        print(f"seed {told.seed} BROKEN {told.broken[:300]}")
        print(f"replay: python -m tests.fleet {told.seed} {' '.join(sizes)}", flush=True)


def code_digest() -> str:
    """Other code, other histories: what was done with it counts no more."""
    found = hashlib.sha256()
    for folder in ("ckptd/core", "ckptd/daemon", "ckptd/storage", "tests/fleet"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:8]


def figures(known: dict[str, Any], chosen: argparse.Namespace, size: str) -> dict[str, Any]:
    """What is reported of a run, as `make figures` collects it."""
    sums = known["sums"]
    more = "" if size == "drawn" else f" --nodes {chosen.nodes} --checkpoints {chosen.checkpoints}"
    minutes = known["seconds"] / 60
    return {
        "name": "fleet" if size == "drawn" else f"fleet {size}",
        "fault": "F19",
        "command": f"python -m tests.fleet --seeds {chosen.seeds}{more} --minutes {minutes:.0f}",
        "runs": sums.get("runs", 0),
        "crashes": sums.get("deaths", 0),
        "replaced": sums.get("replaced", 0),
        "saves": sums.get("saves", 0),
        "commits": sums.get("commits", 0),
        "deletions": sums.get("deletions", 0),
        "requests": sums.get("requests", 0),
        "cpu_seconds": round(sums.get("cpu_seconds", 0.0), 1),
        "commit": commit_now(),
        "violations": len(known["broken"]),
        "seconds": round(known["seconds"], 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # sets have an order of their own in every process, and a history must not depend on it
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.fleet", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
