"""The benchmark of clusters tries itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.cluster import WORK
from tests.support.real import REPOSITORY

pytestmark = [pytest.mark.stores, pytest.mark.full]


def test_small() -> None:
    """One and two workers: the wire carries each byte once each way; placed ones read their disks, and
    copied parts are sent by nobody."""
    command = [sys.executable, "-m", "bench.cluster", "--small"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    one, two, placed, copied = json.loads((WORK / "small.json").read_text())
    assert (one["workers"], two["workers"]) == (1, 2)
    for run in (one, two):
        assert run["up_bytes"] >= run["bytes"]
        assert 12 * run["parameters"] <= run["source_bytes"] < run["down_bytes"] < 32 * run["parameters"]
    assert placed["placed"]
    assert placed["up_bytes"] < 1.02 * two["up_bytes"]
    assert placed["source_bytes"] < 0.2 * placed["parameters"]
    assert copied["copied"]
    assert copied["up_bytes"] < two["up_bytes"]
    assert copied["plan_sha256"] == two["plan_sha256"]
