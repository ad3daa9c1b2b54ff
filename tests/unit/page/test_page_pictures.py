"""Pictures in the docs are of what is shown now (`make pictures`)."""

from __future__ import annotations

import re

from tests.support import pictures


def test_the_picture_of_the_terminal_is_of_its_present_text() -> None:
    assert pictures.SVG.read_text() == pictures.status_svg()


def test_the_picture_of_the_terminal_asks_nobody() -> None:
    svg = pictures.SVG.read_text()
    assert set(re.findall(r"https?://[\w./]+", svg)) == {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }
    assert "@font-face" not in svg and "llama-7b" in svg


def test_pictures_of_the_page_are_there_and_small() -> None:
    pages = sorted(pictures.IMAGES.glob("*.png"))
    assert [path.stem for path in pages] == ["ui-dark", "ui-light"]
    assert all(20_000 < path.stat().st_size < 200_000 for path in pages)
    page = (pictures.DOCS / "ui.md").read_text()
    assert all(f"images/{path.name}" in page for path in pages)
