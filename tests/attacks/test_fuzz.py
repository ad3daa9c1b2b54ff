"""Thousands of shards that are nearly right: nothing of them runs, none stalls or eats the machine (P14)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.figures import note
from tests.support.synthetic import write_stage3, write_stage12

RUNS = 600_000 if os.environ.get("CKPTD_FULL") else 6_000
ROOT = Path(__file__).resolve().parents[2]


def fuzz(folder: Path, seed: int, runs: int) -> dict[str, Any]:
    """One child's findings."""
    command = [
        sys.executable,
        "-E",
        "-s",
        "-S",
        "-m",
        "tests.attacks.fuzz_child",
        str(folder),
        str(seed),
        str(runs),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_no_mutant_runs_stalls_or_eats(tmp_path: Path, stage: int) -> None:
    """Half of them have a changed pickle, a quarter a grown one, a quarter any byte changed."""
    write = write_stage12 if stage == 2 else write_stage3
    write(tmp_path / "tag", [{"w": (16, 8), "b": (8,)}], 1)
    started = time.monotonic()
    found = fuzz(tmp_path / "tag", stage, RUNS // 2)
    uncaught = {k: n for k, n in found["ended"].items() if k.startswith("uncaught")}
    note(
        f"F24-fuzz-{stage}", "hostile pickles and archives, fuzzed", runs=RUNS // 2,
        violations=len(found["heard"]) + sum(uncaught.values()), seconds=time.monotonic() - started,
    )  # fmt: skip
    assert not found["heard"]
    assert not uncaught, uncaught
    assert found["slowest_seconds"] < 5
    assert found["peak_bytes"] < 512 << 20
    assert found["ended"]["refused"] > RUNS // 20
    assert found["ended"]["facts"] > RUNS // 100


def test_the_ear_hears(tmp_path: Path) -> None:
    """A reader that unpickles as everybody does is caught by the same hook."""
    code = (
        "import sys; sys.argv=['x']\n"
        "from tests.attacks.fuzz_child import Ear\n"
        "import pickle\n"
        "ear = Ear(); ear.is_listening = True\n"
        "pickle.loads(b'\\x80\\x02cos\\nsystem\\n(X\\x04\\x00\\x00\\x00truetR.')\n"
        "ear.is_listening = False\n"
        "print(len(ear.heard))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(done.stdout) >= 2
