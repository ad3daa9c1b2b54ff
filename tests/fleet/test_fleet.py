"""Histories of many nodes: one COMMIT per whole save, none mixed, nothing deleted early, all agree (H1, H12).

`python -m tests.fleet` tells many more; a seed that breaks a promise is replayed with its timeline.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fleet.__main__ import shape_of
from tests.fleet.cost import measure
from tests.fleet.defects import DEFECTS, planted
from tests.fleet.story import staged, tell

ROOT = Path(__file__).resolve().parents[2]
FULL = bool(os.environ.get("CKPTD_FULL"))
SEEDS = range(600 if FULL else 20)
FOUND_WITHIN = range(12)
FOUND_BY = {"orders not taken from COMMITs": range(2244, 2245)}
"""The seeds among which a planted defect shows itself."""
REPLAYED = {"late prunes not looked at again": (60036, 3, 30), "prunes beside a save": (52, None, None)}
"""Defects that few histories show: seed, nodes, checkpoints of one that does."""
CHILD = """
import sys
from tests.fleet.__main__ import shape_of
from tests.fleet.defects import planted
from tests.fleet.story import staged, tell
name, seed, nodes, checkpoints = sys.argv[1], *(int(word) or None for word in sys.argv[2:])
with staged(), planted(name):
    print(tell(seed, shape_of(seed, nodes, checkpoints)).broken)
"""


def test_no_history_breaks_a_promise() -> None:
    sums: Counter[str] = Counter()
    with staged():
        for seed in SEEDS:
            told = tell(seed, shape_of(seed, None, None))
            assert told.broken is None, f"{told.broken}: python -m tests.fleet {seed}"
            sums.update(saves=told.saves, commits=told.commits, deaths=told.deaths, replaced=told.replaced)
            sums.update(deletions=told.deletions)
    # histories in which nothing happens show nothing
    assert sums["commits"] > len(SEEDS)
    assert all(sums[name] >= 5 for name in ("deaths", "replaced", "deletions"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if number else [])
        for number, name in enumerate(DEFECTS)
        if name not in REPLAYED
    ],
)
def test_a_planted_defect_is_noticed(name: str) -> None:
    words = DEFECTS[name][1]
    with staged(), planted(name):
        told = (tell(seed, shape_of(seed, None, None)) for seed in FOUND_BY.get(name, FOUND_WITHIN))
        reasons = [one.broken for one in told if one.broken is not None]
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize("name", REPLAYED)
def test_a_planted_defect_is_noticed_in_its_history(name: str) -> None:
    """A prune beside a save in flight: planned so, or planned before it and begun late."""
    words = [name, *(str(word or 0) for word in REPLAYED[name])]
    told = subprocess.run(
        [sys.executable, "-c", CHILD, *words],
        cwd=ROOT,
        # sets have an order of their own in every process, and the history must be this one
        env=os.environ | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert DEFECTS[name][1] in told.stdout


def test_a_history_follows_from_its_seed() -> None:
    """In another process too: nothing of the machine enters it."""
    with staged():
        here = tell(12, shape_of(12, None, None), is_loud=True).lines
    told = subprocess.run(
        [sys.executable, "-m", "tests.fleet", "12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert told.stdout.splitlines()[:-1] == here
    assert len(here) > 20


def test_naps_change_nothing() -> None:
    """A history is the same, request by request, whether turns that nothing can come of are lived or not."""
    with staged():
        for seed in SEEDS[: 200 if FULL else 6]:
            shape = shape_of(seed, None, None)
            naps = tell(seed, shape, is_loud=True)
            lives = tell(seed, replace(shape, naps=False), is_loud=True)
            assert (naps.lines, naps.per_node) == (lives.lines, lives.per_node), seed
            assert naps.lines


def test_what_a_node_asks_does_not_grow_with_their_number() -> None:
    """But for pages of listings, and for the documents that one node reads for the COMMIT (ADR 0105)."""
    few, many = measure(10), measure(30 if not FULL else 256)
    assert many.gets_mean < 2 * few.gets_mean + 5
    assert many.requests_mean < 2 * few.requests_mean + 10
