"""The pictures of docs/performance.md: drawn from its tables, readable, and named by what they show."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from bench import pictures, summary

FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")


def _texts(made: Any) -> list[Any]:
    """Every text that the picture shows; labels of ticks outside an axis are not drawn."""
    found = [made._suptitle, *(text for legend in made.legends for text in legend.get_texts())]
    for axes in made.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        if axes.get_legend() is not None:
            found += axes.get_legend().get_texts()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_text()]


@pytest.mark.parametrize("part", pictures.PICTURES)
def test_a_picture_is_drawn_and_no_text_touches_another(part: str) -> None:
    made = pictures.figure(part)
    made.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in _texts(made)]
    assert len(boxes) > 10
    assert [(one[0], two[0]) for one, two in combinations(boxes, 2) if one[1].overlaps(two[1])] == []
    outside = [text for text, box in boxes if not (made.bbox.x0 <= box.x0 and box.x1 <= made.bbox.x1)]
    assert outside == []


@pytest.mark.parametrize("part", pictures.PICTURES)
def test_each_figure_of_a_title_stands_in_the_page(part: str) -> None:
    page = pictures.PAGE.read_text()
    begin, end = (page.index(mark) for mark in pictures.marks(part))
    stated = {one.replace(",", "") for one in FIGURE.findall(page[begin:end])}
    title = pictures.figure(part).get_suptitle()
    assert {one.replace(",", "") for one in FIGURE.findall(title)} <= stated


def test_the_page_shows_each_picture() -> None:
    shown = re.findall(r"\]\((\w+)\.png\)", pictures.PAGE.read_text())
    assert sorted(shown) == sorted(pictures.PICTURES)
    assert all((pictures.DOCS / f"{part}.png").is_file() for part in shown)


def test_a_part_is_replaced_between_its_marks_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- idle: begin -->\nold\n<!-- idle: end -->\nafter\n")
    monkeypatch.setattr(pictures, "PAGE", page)
    pictures.replace_part("| a |\n|---|\n| 1 (0.5 – 1,024) |\n", "idle")
    assert page.read_text() == (
        "before\n<!-- idle: begin -->\n| a |\n|---|\n| 1 (0.5 – 1,024) |\n<!-- idle: end -->\nafter\n"
    )
    [[row]] = pictures.tables("idle")
    assert row.measured("a") == pictures.Measured(1.0, 0.5, 1024.0)
    with pytest.raises(ValueError, match="other"):
        pictures.replace_part("", "other")


def test_the_summary_says_what_the_sections_say() -> None:
    page = pictures.PAGE.read_text()
    begin, end = (page.index(mark) for mark in pictures.marks(summary.PART))
    found = summary.verdicts(summary.without_summary(page))
    assert page[begin:end].partition("\n")[2].rstrip() == summary.table(found)
    assert len(found) == len(re.findall(r"\(reached\b|\(NOT reached|: (?:NOT )?reached \|", page[:begin]))
    by_aim = {one.aim: one for one in found}
    upload, at_rest = by_aim["upload, at least 0.95 × boto3"], by_aim["CPU at most 0.5 % of one core"]
    assert (upload.section, upload.is_reached) == ("Transfer", True)
    assert upload.times_better == pytest.approx(float(upload.measured) / 0.95)
    assert at_rest.times_better == pytest.approx(0.5 / float(at_rest.measured))
