"""The benchmark of transfers tries itself: every case that needs no other tool runs and is checked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.saves import CACHE
from tests.support.real import REPOSITORY

pytestmark = [pytest.mark.stores, pytest.mark.full]


def test_tiny() -> None:
    """Bytes, COMMITs and copies are counted by the benchmark itself; every case of ckptd has a time."""
    command = [sys.executable, "-m", "bench.transfer", "--tiny"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    series = json.loads((CACHE / "tiny.json").read_text())["series"]
    assert len(series) == 17
    assert [one["case"] for one in series if not one["samples"]] == []


def test_clients() -> None:
    """Both clients of S3, each measure of each case."""
    command = [sys.executable, "-m", "bench.clients", "--tiny"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sum(line.startswith(("| up", "| down")) for line in done.stdout.splitlines()) == 9
