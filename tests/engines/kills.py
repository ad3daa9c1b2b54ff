"""Kill the savers of DeepSpeed's writing engines at random moments: what ckptd calls complete is whole.

`python -m tests.engines.kills [--kills N] [--seed N] [ENGINE …]`: two ranks save as fast as they can; one is
killed (SIGKILL), then the other; the processes that write for them with them, or a while later. Judged as in
tests/releases/kills.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.engines.rows import writer
from tests.releases.kills import LAYOUTS, START_SECONDS, Tally, cut, judge, returned
from tests.support import ranks
from tests.support.processes import wait_gone

RECIPE = LAYOUTS["stage3"]
ENGINES = {"decoupled": writer("python", decoupled=True), "fast": writer("fast")}
LONGEST_SECONDS = 1.5


def run(name: str, kills: int, seed: int) -> Tally:
    """Kill so many savers of an engine; cut the files of what the first left."""
    chance, tally = random.Random(seed), Tally()
    for i in range(kills):
        with tempfile.TemporaryDirectory(prefix="ckptd-kills-") as root:
            out = Path(root) / "out"
            _kill(out, name, chance)
            tally.kills += 1
            whole = judge(tally, out, name)
            if whole is not None and i == 0:
                cut(tally, whole, chance)
            if tally.kills % 10 == 0:
                print(name, tally, flush=True)
            if tally.false_complete or tally.lost:
                shutil.copytree(out, Path(tempfile.mkdtemp(prefix="ckptd-kept-")) / "out")
                break
    return tally


def _kill(out: Path, name: str, chance: random.Random) -> None:
    """Start the ranks, wait until a save is in its place, and kill them and their writers."""
    (out / "logs").mkdir(parents=True)
    arguments = [str(out), name]
    saver = ranks.start("tests.engines.saver", arguments, out / "logs", ranks=2, children=True)
    deadline = time.monotonic() + START_SECONDS
    while not returned(out):
        if time.monotonic() > deadline or any(p.exitcode is not None for p in saver.processes):
            saver.kill()
            raise RuntimeError((out / "logs" / "rank0.log").read_text()[-2000:])
        time.sleep(0.005)
    writers = [child for process in saver.processes for child in _children_of(process.pid or 0)]
    time.sleep(chance.random() * LONGEST_SECONDS)
    chance.choice(saver.processes).kill()
    if chance.random() < 0.5:  # the other goes on until it waits for the dead one
        time.sleep(chance.random() * 0.1)
    saver.kill()
    time.sleep(chance.choice((0.0, chance.random() * 0.1)))  # a writer has more to write than its rank knows
    for pid in writers:
        _end(pid)


def _children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def _end(pid: int) -> None:
    """Kill a process that a rank started, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_gone([pid])


def main() -> int:
    """Print one line for each engine; 1 if any save was judged wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--kills", type=int, default=150, help="pairs of ranks, for each engine")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    is_wrong = False
    for name in given.engines:
        tally = run(name, given.kills, given.seed)
        print(name, tally, flush=True)
        is_wrong |= bool(tally.false_complete or tally.lost)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
