"""A hook of mkdocs (`make docs`): every decision of docs/adr/ is a page, without a list to keep by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def decisions(docs: Path) -> list[str]:
    """Their pages, by number, relative to docs/."""
    return [f"adr/{path.name}" for path in sorted((docs / "adr").glob("*.md"))]


def on_config(config: Any) -> Any:
    """mkdocs calls it before it reads nav."""
    config.nav.append({"Decisions": decisions(Path(config.docs_dir))})
    return config
