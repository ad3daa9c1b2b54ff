"""What `ckptd plan` tells of other limits is what then happens, in simulated lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIVES = 1000 if os.environ.get("CKPTD_FULL") else 25


def test_what_is_foretold_is_what_happens() -> None:
    command = [sys.executable, "-m", "tests.sim.foresight", "--lives", str(LIVES), "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["lives"], figures["unlike"]) == (LIVES, 0)
    assert figures["deletions"] > LIVES / 2, "hardly anything was deleted"
