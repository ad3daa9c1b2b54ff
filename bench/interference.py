"""What training feels of ckptd: step and save times of a real training, with and without it in turns.

    make bench-interference            (python -m bench.interference --minutes 30)

One DeepSpeed training on CPU (two ranks, ZeRO 2) runs through all segments: short steps, and a save every few
of them. In every A/B pair one segment runs beside a daemon that has more checkpoints of this training to
upload (to a null S3 server) than a segment is long and converts the newest; in every A/A pair, one of four,
none does. Segments are short, in the order ABBA. Trainer on the first half of the cores, daemon and server on
the other. The daemon lives in a memory cgroup as large as its budget. `--others`: what waits is of other
runs, each with a job of its own; printed, never written. `--more`: goes on with what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import native, saves
from bench.interference_daemon import BUDGET_BYTES, Beside, pinned
from bench.interference_report import Memory, Work, render
from bench.interference_stats import Pair, Segment
from bench.measure import make_warm, resident_share
from bench.pictures import replace_part
from tests.support.real import REPOSITORY, Recipe

ROOT = REPOSITORY / ".build" / "bench-interference"
RECORD = ROOT.with_suffix(".json")
SHORT = Recipe(stage=2, world_size=2, hidden=192, layers=6, heads=6, vocab=4096)
"""4 million parameters: a step of a tenth of a second on two cores, 57 MB a save."""
LUGGAGE_BYTES = 1280 << 20
"""So that a save takes a second and a half at least, as one of a model whose steps would take seconds."""
TINY = Recipe(stage=2, world_size=2, hidden=64, layers=2)
WAITING_LAYERS = 8
"""Of the checkpoints that wait beside the training: 1.5 GB each."""
REST_SECONDS = 9.0
"""Before each segment. The host of a virtual machine takes free pages back in seconds (page reporting), and
gives them again at 0.4 GB/s: 1.4 GB are written in 0.2 s into pages that were freed a moment before, in 3.2 s
into those freed 8 s before. So a segment without a daemon waits as long as one takes to start, too."""
DATA = ROOT / "data.bin"
DATA_BYTES = 256 << 20
"""A file that the trainer would read its samples from: it must stay in the page cache."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a segment is, and how many pairs there are at most; none is begun after `minutes`."""

    pairs: int
    steps: int
    saves: int
    minutes: float
    luggage_bytes: int
    """What the trainer puts into each save besides its small model, as client state."""
    is_of_others: bool = False
    """What waits is of other runs."""

    @property
    def what_is_measured(self) -> list[float]:
        """Figures of runs that agree in this go together."""
        return [self.steps, self.saves, self.luggage_bytes, self.is_of_others, REST_SECONDS]


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured: pairs of either kind, and the daemon's account."""

    pairs: dict[str, list[Pair]] = field(default_factory=lambda: {"AB": [], "AA": []})
    work: list[Work] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)


def segment_of(told: dict[str, Any]) -> Segment:
    """A segment as the trainer, or an earlier run's record, tells it."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in told.items()}
    return Segment(**values)


def halves() -> tuple[list[int], list[int]]:
    """Cores of the trainer, cores of ckptd; the same ones where there is one core."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[: max(1, len(cores) // 2)], cores[len(cores) // 2 :]


@dataclass
class Trainer:
    """A running training that takes orders."""

    process: subprocess.Popen[bytes]
    orders: Path
    answers: Path

    def open(self) -> None:
        """Wait until it listens: a FIFO cannot be opened for writing before.

        Raises:
            RuntimeError: it ended instead.
        """
        while True:
            with contextlib.suppress(OSError):
                self._orders = os.fdopen(os.open(self.orders, os.O_WRONLY | os.O_NONBLOCK), "w", buffering=1)
                break
            if self.process.poll() is not None:
                raise RuntimeError(f"no training: {(ROOT / 'trainer.log').read_text()[-3000:]}")
            time.sleep(0.2)
        self._answers = self.answers.open()

    def segment(self, plan: Plan) -> Segment:
        """Order one and wait for it."""
        order: dict[str, str | int] = {"save_dir": str(ROOT / "save"), "luggage_bytes": plan.luggage_bytes}
        self._orders.write(json.dumps(order | {"steps": plan.steps, "saves": plan.saves}) + "\n")
        before = _ticks()
        told = json.loads(self._answers.readline())
        stolen, passed = (now - then for now, then in zip(_ticks(), before, strict=True))
        return segment_of(told | {"stolen": stolen / max(1, passed), "cached": resident_share([DATA])})

    def end(self) -> None:
        """Let it leave."""
        with contextlib.suppress(OSError, AttributeError):
            self._orders.write("\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def trainer(recipe: Recipe, cores: list[int]) -> Iterator[Trainer]:
    """Start torchrun on its cores."""
    (ROOT / "recipe.json").write_text(json.dumps(asdict(recipe)))
    orders, answers = ROOT / "orders", ROOT / "answers"
    for fifo in (orders, answers):
        os.mkfifo(fifo)
    script = Path(__file__).with_name("interference_train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    command += [str(recipe.world_size), str(script), str(ROOT / "recipe.json"), str(orders), str(answers)]
    paths = os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with (ROOT / "trainer.log").open("wb") as log:
        process = subprocess.Popen(pinned(command, cores), stdout=log, stderr=log, env=environment)
    running = Trainer(process, orders, answers)
    try:
        running.open()
        yield running
    finally:
        running.end()


def _ticks() -> tuple[int, int]:
    """Of the trainer's cores since the machine started: stolen by the host, and all."""
    ours = {f"cpu{core}" for core in halves()[0]}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    counts = [[int(word) for word in row[1:9]] for row in rows if row[0] in ours]
    return sum(row[7] for row in counts), sum(map(sum, counts))


def cleared(beside: Beside, rest_seconds: float) -> None:
    """Delete and flush what earlier segments left, rest, and read the trainer's data."""
    beside.cleared()
    os.sync()
    time.sleep(rest_seconds)
    make_warm([DATA])


def run(recipe: Recipe, plan: Plan, before: Found) -> Beside:
    """Measure into `before`; return the daemon with its account.

    Three A/B pairs for each A/A pair. A daemon that fails ends it, and what was measured before stands.
    """
    shutil.rmtree(ROOT, ignore_errors=True)
    (ROOT / "save").mkdir(parents=True)
    is_tiny = recipe == TINY
    DATA.write_bytes(os.urandom(1 << 20 if is_tiny else DATA_BYTES))
    layers = 1 if is_tiny else WAITING_LAYERS
    waiting = saves.shards(f"waits-{layers}", layers, 2)
    ours, theirs = halves()
    found, rest_seconds = before.pairs, 0 if is_tiny else REST_SECONDS
    with native.null_server(ROOT, "crc64nvme") as server, trainer(recipe, ours) as training:
        os.sched_setaffinity(server.pid, theirs)
        beside = Beside(ROOT, server, theirs, waiting, plan.is_of_others, before.memory, before.work)
        cleared(beside, rest_seconds)
        training.segment(plan)
        end = time.monotonic() + 60 * plan.minutes
        for number in range(4 * plan.pairs // 3 + 1):
            if number % 4 == 0 and number and time.monotonic() > end:
                break
            kind = "AB" if number % 4 else "AA"
            is_other_first = len(found[kind]) % 2 == 1  # ABBA: a drift of the machine falls on both
            told = []
            try:
                for is_other in (is_other_first, not is_other_first):
                    cleared(beside, rest_seconds)
                    with beside.running() if is_other and kind == "AB" else beside.absent():
                        told.append(training.segment(plan))
            except RuntimeError as error:
                print(f"\nended early: {error}", file=sys.stderr)
                break
            plain, other = reversed(told) if is_other_first else told
            found[kind].append(Pair(plain=plain, other=other))
            _record(plan, found, beside)
            print(f"\r{number + 1} pairs", end="", flush=True)
        print()
    return beside


def _record(plan: Plan, found: dict[str, list[Pair]], beside: Beside) -> None:
    """All figures so far, for whoever looks closer, and for `--more`."""
    told: dict[str, object] = {kind: [asdict(pair) for pair in pairs] for kind, pairs in found.items()}
    told |= {"work": [asdict(one) for one in beside.work], "memory": asdict(beside.memory)}
    RECORD.write_text(json.dumps(told | {"plan": plan.what_is_measured}))


def recorded(plan: Plan) -> Found:
    """What an earlier run of the same plan found; nothing where there is none."""
    told = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if told.get("plan") != plan.what_is_measured:
        return Found()

    pairs = {k: [Pair(*map(segment_of, (p["plain"], p["other"]))) for p in told[k]] for k in ("AB", "AA")}
    return Found(pairs, [Work(**one) for one in told["work"]], Memory(**told["memory"]))


def main() -> None:
    """Measure, print, and write the page unless it was tiny."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200, help="A/B pairs, at most")
    parser.add_argument("--steps", type=int, default=64, help="of a segment")
    parser.add_argument("--saves", type=int, default=2, help="of a segment, spread over its steps")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no further pair after them")
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, nothing is written")
    parser.add_argument("--dry", action="store_true", help="print what is found and leave the page alone")
    parser.add_argument("--others", action="store_true", help="what waits is of other runs; implies --dry")
    parser.add_argument("--more", action="store_true", help="put this with what the last run measured")
    given = parser.parse_args()
    luggage_bytes = 0 if given.tiny else LUGGAGE_BYTES
    plan = Plan(given.pairs, given.steps, given.saves, given.minutes, luggage_bytes, given.others)
    found = recorded(plan) if given.more else Found()
    beside = run(TINY if given.tiny else SHORT, plan, found)
    both, none = found.pairs["AB"], found.pairs["AA"]
    text = render(
        both, none, beside.memory, beside.work, beside.waiting_bytes, BUDGET_BYTES, len(halves()[0])
    )
    print(text)
    if not given.tiny and not given.dry and not given.others:
        replace_part(text, "interference")
    shutil.rmtree(ROOT, ignore_errors=True)


if __name__ == "__main__":
    main()
