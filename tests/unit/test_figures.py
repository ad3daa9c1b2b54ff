"""The table of long runs: every fault has a line, what was not run this time keeps its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import figures


def test_every_fault_stands_in_the_page() -> None:
    """F1 to F34, each with runs or with where it is tried, or why not."""
    page = figures.PAGE.read_text()
    rows = page.partition(figures.BEGIN)[2].partition(figures.END)[0].splitlines()
    first = {row.split(" ")[1] for row in rows if row.startswith("| F")}
    assert first == set(figures.FAULTS)
    assert list(figures.FAULTS) == [f"F{n}" for n in range(1, 35)]


def test_runs_are_added_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second machine's run stands beside the first one's; the text around the table is not touched."""
    page = tmp_path / "faults.md"
    page.write_text(f"before\n{figures.BEGIN}\n{figures.END}\nafter\n")
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    one = {
        "name": "one",
        "fault": "F4, F6",
        "runs": 1234,
        "violations": 0,
        "command": "c",
        "date": "2026-01-02",
    }
    (tmp_path / "one.json").write_text(json.dumps(one))
    assert figures.main() == 0
    (tmp_path / "one.json").unlink()
    two = {"name": "F9-local", "fault": "a bit", "runs": 7, "crashes": 3, "violations": 1, "command": "d"}
    (tmp_path / "two.json").write_text(json.dumps(two | {"date": "2026-01-03T10:00:00"}))
    assert figures.main() == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "`one` (F4, F6) | 1 234 |  | 0 | `c` | 2026-01-02 |" in text
    assert "`F9-local` | 7 | 3 | 1 | `d` | 2026-01-03 |" in text
    assert "| F6 EIO; a flush is never tried again | with `one` |" in text
    assert figures.main() == 0
    assert page.read_text() == text


def test_a_page_without_a_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    page = tmp_path / "faults.md"
    page.write_text("nothing here\n")
    monkeypatch.setattr(figures, "PAGE", page)
    assert figures.main() == 1
    assert page.read_text() == "nothing here\n"
