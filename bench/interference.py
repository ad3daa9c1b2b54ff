"""What training feels of ckptd: step and save times of a real training, with and without it in turns.

    make bench-interference            (python -m bench.interference --pairs 20 --steps 12 --minutes 10)

One DeepSpeed training on CPU (two ranks, ZeRO 2) runs through all segments, each with two saves; the second
falls into the shipping and converting of the first. In every A/B pair one segment runs beside a daemon that
uploads to a null S3 server and converts at full speed, in every A/A pair none does. Trainer on the first half
of the cores, daemon and server on the other. The daemon lives in a memory cgroup as large as its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from bench import native
from bench.interference_report import Memory, render, write
from bench.interference_stats import Pair, Segment
from bench.measure import make_warm, resident_share
from bench.transfer_runs import BUCKET, ENVIRONMENT
from tests import cgroup
from tests.real import REPOSITORY, Recipe

ROOT = REPOSITORY / ".build" / "bench-interference"
LARGE = Recipe(stage=2, world_size=2, hidden=512, layers=8, heads=8, vocab=8192)
TINY = Recipe(stage=2, world_size=2, hidden=64, layers=2)
BUDGET_BYTES = 256 << 20
IDLE_SECONDS = 120.0
DATA_BYTES = 256 << 20
"""A file that the trainer would read its samples from: it must stay in the page cache."""


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
    number: int = 0
    save_dir: Path = field(default_factory=lambda: ROOT / "save")

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

    def segment(self, steps: int) -> Segment:
        """Order one and wait for it."""
        self._orders.write(json.dumps({"save_dir": str(self.save_dir), "steps": steps}) + "\n")
        told = json.loads(self._answers.readline())
        return Segment(tuple(told["steps"]), tuple(told["saves"]))

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
        process = subprocess.Popen(_pinned(command, cores), stdout=log, stderr=log, env=environment)
    running = Trainer(process, orders, answers)
    try:
        running.open()
        yield running
    finally:
        running.end()


def _pinned(command: list[str], cores: list[int]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


@dataclass
class Beside:
    """A daemon for one segment after another, in a cgroup of its budget where the machine has them."""

    server: native.NullServer
    cores: list[int]
    memory: Memory = field(default_factory=Memory)
    busy_seconds: list[float] = field(default_factory=list)
    """Of each segment: until everything was committed and converted."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The daemon, from before the segment until it has committed both saves."""
        self.server.reset()
        config = ROOT / "etc"
        (config / "jobs.d").mkdir(parents=True, exist_ok=True)
        (config / "ckptd.toml").write_text(
            f'state_dir = "{ROOT}/state"\nmemory_budget = "{BUDGET_BYTES >> 20}MiB"\n'
        )
        (config / "jobs.d" / "job.toml").write_text(
            f'save_dir = "{ROOT}/save"\nsettle = "1s"\n[local]\nforms = ["universal"]\n[[remote]]\n'
            f'name = "remote"\nurl = "s3://{BUCKET}/interference"\nendpoint_url = "{self.server.endpoint}"\n'
            'forms = ["zero", "universal"]\n'
        )
        with contextlib.ExitStack() as stack:
            inside = _pinned([sys.executable, "-m", "ckptd", "run", "--config-dir", str(config)], self.cores)
            group = None if cgroup.why_not() else stack.enter_context(cgroup.group(BUDGET_BYTES))
            watcher = None
            if group:
                inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *inside]
                watcher = cgroup.Watcher(group)
                stack.callback(watcher.stop)
            with (ROOT / "daemon.log").open("ab") as log:
                daemon = subprocess.Popen(inside, stdout=log, stderr=log, env=ENVIRONMENT)
            stack.callback(_end, daemon)
            self._until_up(daemon)
            began = time.monotonic()
            yield
            self._until_idle(daemon)
            self.busy_seconds.append(time.monotonic() - began)
            if group and watcher:
                self.memory = self.memory.joined(watcher.peak_bytes, watcher.peak_dirty_bytes, _killed(group))

    def _until_up(self, daemon: subprocess.Popen[bytes]) -> None:
        _until(daemon, lambda: any(ROOT.glob("state/**/status.json")))

    def _until_idle(self, daemon: subprocess.Popen[bytes]) -> None:
        """Both saves' ZeRO forms and the newest one's universal form are there."""
        _until(daemon, lambda: self.server.counted().commits >= 3)


def _until(daemon: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + IDLE_SECONDS
    while not is_so():
        if daemon.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the daemon did not get there: {(ROOT / 'daemon.log').read_text()[-3000:]}")
        time.sleep(0.1)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(daemon.pid).children(recursive=True) if daemon.poll() is None else []
    daemon.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(20)
    daemon.kill()
    daemon.wait()
    psutil.wait_procs(below, timeout=20)


def _killed(group: Path) -> int:
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(dict(line.split() for line in lines).get("oom_kill", 0))


def cleared() -> None:
    """What earlier segments left is gone and flushed before the next one begins."""
    for name in ("save", "state", "etc"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    (ROOT / "save").mkdir()
    os.sync()
    time.sleep(0.5)


def run(
    recipe: Recipe, pairs: int, steps: int, minutes: float
) -> tuple[list[Pair], list[Pair], Beside, float]:
    """A/B pairs, A/A pairs, the daemon's account, and how much of the trainer's data is still cached.

    No pair is begun after `minutes`, but as many A/B as A/A pairs are finished.
    """
    shutil.rmtree(ROOT, ignore_errors=True)
    (ROOT / "save").mkdir(parents=True)
    data = ROOT / "data.bin"
    data.write_bytes(os.urandom(DATA_BYTES if recipe == LARGE else 1 << 20))
    ours, theirs = halves()
    found: dict[str, list[Pair]] = {"AB": [], "AA": []}
    with native.null_server(ROOT) as server, trainer(recipe, ours) as training:
        os.sched_setaffinity(server.pid, theirs)
        beside = Beside(server, theirs)
        training.segment(steps)
        make_warm([data])
        end = time.monotonic() + 60 * minutes
        for number in range(2 * pairs):
            if number % 2 == 0 and number and time.monotonic() > end:
                break
            kind = "AB" if number % 2 else "AA"
            # ABBA: a drift of the machine falls on both
            order = (False, kind == "AB") if number % 4 < 2 else (kind == "AB", False)
            told = []
            for is_beside in order:
                cleared()
                with beside.running() if is_beside else contextlib.nullcontext():
                    told.append(training.segment(steps))
            first, second = told if not order[0] else told[::-1]
            found[kind].append(Pair(plain=first, other=second))
            print(f"\r{number + 1} of {2 * pairs} pairs", end="", flush=True)
        print()
        kept = resident_share([data])
    return found["AB"], found["AA"], beside, kept


def main() -> None:
    """Measure, print, and write the page unless it was tiny."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further pair after them")
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, nothing is written")
    given = parser.parse_args()
    recipe = TINY if given.tiny else LARGE
    both, none, beside, kept = run(recipe, given.pairs, given.steps, given.minutes)
    text = render(both, none, beside.memory, beside.busy_seconds, kept, BUDGET_BYTES, len(halves()[0]))
    print(text)
    if not given.tiny:
        write(text, both, none)
    shutil.rmtree(ROOT, ignore_errors=True)


if __name__ == "__main__":
    main()
