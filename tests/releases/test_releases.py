"""`make releases` in small, with the installed DeepSpeed alone: what it measures, and how it is judged."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.releases import kills, table
from tests.releases.cases import CASES, RELEASES, TRAINER_STAGES, Case, trainer_case
from tests.releases.measure import Outcome, compare_weights, measure
from tests.support.real import Recipe, expect

CASE = Case(name="stage 2, bf16", recipe=Recipe(stage=2, world_size=2), ranks=1)
expect(CASE.recipe)
GONE_ON = {1: 5.0, 2: 4.9, 3: 4.8}
LATER = {3: 4.8}
LOADED = Outcome(state="complete", expected=GONE_ON, differences=[], own_losses=LATER, stock_losses=LATER)
CANNOT_LOAD = ["DeepSpeed 0.14.4, which saved this, cannot load a universal form in stage 3"]
MARKS: dict[str, tuple[Outcome, str]] = {
    "equal": (LOADED, "="),
    "loads neither": (
        dataclasses.replace(LOADED, own_load_error="ValueError: a", stock_load_error="ValueError: a"),
        "=!",
    ),
    "stock fails": (dataclasses.replace(LOADED, stock_error="KeyError: a", differences=None), "S"),
    "stock fails, and losses are others": (
        dataclasses.replace(LOADED, stock_error="KeyError: a", own_losses={3: 5.1}),
        table.FAULT,
    ),
    "stock fails, and losses are no numbers": (
        dataclasses.replace(LOADED, stock_error="KeyError: a", own_losses={3: math.nan}, repeated=["own"]),
        table.FAULT,
    ),
    "losses are numbers at the second load": (dataclasses.replace(LOADED, repeated=["stock"]), "="),
    "stock fails, a note says that it cannot load": (
        dataclasses.replace(LOADED, stock_error="a", own_load_error="b", notes=CANNOT_LOAD),
        "S!",
    ),
    "stock fails, no note says that it cannot load": (
        dataclasses.replace(LOADED, stock_error="a", own_load_error="b"),
        table.FAULT,
    ),
    "stock is wrong": (dataclasses.replace(LOADED, stock_losses={3: 51.0}), "D"),
    "ckptd is wrong": (dataclasses.replace(LOADED, own_losses={3: 51.0}), table.FAULT),
    "both refuse": (dataclasses.replace(LOADED, own_error="a", stock_error="b"), "r"),
    "ckptd refuses": (dataclasses.replace(LOADED, own_error="a"), table.FAULT),
    "only stock's loads": (dataclasses.replace(LOADED, own_load_error="a"), table.FAULT),
    "a good save is not complete": (
        dataclasses.replace(LOADED, state="torn re-save", zero_losses=LATER),
        table.FAULT,
    ),
    "DeepSpeed cannot go on either": (
        dataclasses.replace(LOADED, state="incomplete", zero_error="KeyError: 1"),
        "i",
    ),
    "not trained": (Outcome(train_error="ImportError: a"), "–"),
}


@pytest.mark.parametrize("name", MARKS)
def test_the_mark_of_an_outcome(name: str) -> None:
    outcome, mark = MARKS[name]
    assert table.cell_of(json.loads(json.dumps(dataclasses.asdict(outcome)))).mark == mark


def test_the_table_in_docs_has_every_release_and_case_and_no_fault() -> None:
    text = table.TABLE.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert ["", *(release.version for release in RELEASES)] in rows
    named = {row[0] for row in rows}
    assert named >= {*(case.name for case in CASES), *map(trainer_case, TRAINER_STAGES)}
    assert text.count(table.FAULT) == 1, "beside the legend"


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_release_is_measured(tmp_path: Path) -> None:
    found = measure([CASE], tmp_path)[CASE.name]
    seen: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(found)))
    assert table.cell_of(seen).mark == "=", seen
    assert compare_weights([CASE], tmp_path) == {CASE.name: "equal"}
    assert set(found.own_losses) == {3, 4, 5, 6}


@pytest.mark.real
@pytest.mark.timeout(900)
def test_no_save_of_a_killed_saver_is_judged_wrongly(tmp_path: Path) -> None:
    tally = kills.run(1, seed=3, work=tmp_path, layouts=[("stage2", "stage3")])
    assert (tally.false_complete, tally.lost, tally.wrong) == (0, 0, None)
    assert tally.saves >= 2
    assert tally.cut > 20
