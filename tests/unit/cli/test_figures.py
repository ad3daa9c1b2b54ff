"""The table of long runs: every fault has a line, what was not run this time keeps its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import figures


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
    assert "`one` (F4, F6) | 1 234 |  | 0 |  | `c` | 2026-01-02 |  |" in text
    assert "`F9-local` | 7 | 3 | 1 |  | `d` | 2026-01-03 |  |" in text
    assert "| F6 EIO; a flush is never tried again | with `one` |" in text
    assert figures.main() == 0
    assert page.read_text() == text


def figure(name: str, **more: Any) -> dict[str, Any]:
    """As a long run leaves it."""
    made = {"name": name, "runs": 100, "violations": 0, "command": "c", "date": "2026-01-02", "commit": "aaa"}
    return made | more


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty page and no figures."""
    path = tmp_path / "faults.md"
    marks = f"{figures.BEGIN}{figures.END}\n<!-- points --><!-- /points -->\n"
    path.write_text(f"{marks}<!-- seeded figure --><!-- /seeded figure -->\n")
    monkeypatch.setattr(figures, "PAGE", path)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    return path


def collected(page: Path, made: dict[str, Any]) -> tuple[int, str]:
    """Exit status and text after one more run."""
    (page.parent / "x.json").write_text(json.dumps(made))
    return figures.main(), page.read_text()


def test_a_smaller_run_of_the_same_code_takes_nothing_away(page: Path) -> None:
    """Of other code it counts if it is of the same order; what broke a promise always does."""
    assert "| 100 |  | 0 |" in collected(page, figure("sim"))[1]
    for smaller in ({"runs": 90}, {"runs": 40, "commit": "bbb"}, {"runs": 90, "commit": ""}):
        assert "| 100 |  | 0 |" in collected(page, figure("sim", **smaller))[1]
    newer = collected(page, figure("sim", runs=90, commit="bbb", date="2026-01-03", seconds=1234.5))[1]
    assert "| `sim` | 90 |  | 0 | 1 234 | `c` | 2026-01-03 | bbb |" in newer
    assert "| 100 |  | 0 |" in collected(page, figure("sim"))[1]
    assert "| 2 |  | 1 |" in collected(page, figure("sim", runs=2, violations=1))[1]


def test_a_run_without_a_fault_is_said(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was left out without a word."""
    status, text = collected(page, figure("nameless"))
    assert (status, "nameless" in text) == (1, False)
    assert "nameless names no fault" in capsys.readouterr().out


def test_seeded_defects_and_points_stand_where_they_are_spoken_of(page: Path) -> None:
    """Count, date and commit above the table of defects; deaths of the row in the text."""
    seeded = figure("seeded", caught="48/48", seconds=312.4)
    assert "Last run: 48 of 48 found, 312 s, 2026-01-02 (aaa)." in collected(page, seeded)[1]
    kills = figure("killpoints", fault="F1", crashes=8401, points=41_234, code={"abc: 1": 2, "def: 2": 98})
    status, text = collected(page, kills)
    assert status == 0
    assert "Of some 41,000 points 8,401 were taken so far" in text
    assert "| 100 | 8 401 | 0 |  | `c` | 2026-01-02 | def, abc |" in text
    assert "Last run: 48 of 48 found" in text
    # on a machine without that figure the row says the deaths, the page the points
    assert "Of some 41,000 points 8,401 were taken so far" in collected(page, figure("sim"))[1]


def test_what_a_run_says_of_itself_is_kept(page: Path) -> None:
    said = collected(page, figure("restart-100", fault="F28: lost", seconds=10.9, said="3 s (4 cores)"))[1]
    assert "| `restart-100`: 3 s (4 cores) | 100 |  | 0 | 10.9 |" in said
    assert collected(page, figure("sim"))[1].count("`restart-100`: 3 s (4 cores)") == 1


def test_rows_of_the_table_without_seconds_and_code_are_read(page: Path) -> None:
    text = page.read_text()
    row = "| F4 no space | `errors` (F4, F6) | 51 |  | 0 | `python -m x` | 2026-11-21 |"
    page.write_text(text.replace(figures.BEGIN, f"{figures.BEGIN}\n{row}\n"))
    kept = collected(page, figure("sim"))[1]
    assert "| `errors` (F4, F6) | 51 |  | 0 |  | `python -m x` | 2026-11-21 |  |" in kept


def test_the_text_of_the_page_says_what_its_table_says() -> None:
    """Deaths of the kill points, and the tests that each fault names."""
    page = figures.PAGE.read_text()
    kills = figures.rows_before(page)[figures.KILLS]
    assert figures.points_words(page, kills, []) in page
    for fault, (title, elsewhere) in figures.FAULTS.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| {fault} {title} ")]
        assert len(rows) == 1, fault
        assert "`" in rows[0].split("|")[2] or elsewhere in rows[0], fault
        if not figures.rows_before(f"{figures.BEGIN}\n{rows[0]}\n{figures.END}"):
            assert elsewhere in rows[0], f"{fault}: make figures"


def test_a_page_without_a_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    page = tmp_path / "faults.md"
    page.write_text("nothing here\n")
    monkeypatch.setattr(figures, "PAGE", page)
    assert figures.main() == 1
    assert page.read_text() == "nothing here\n"
