"""A hook of mkdocs (`make docs`): the decisions of docs/adr/ in nav, and no links to what the site lacks."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_CODE = re.compile(r"\[([^\]]+)\]\((?:\.\./){2}(?:ckptd|tests)/[^)]+\)")


def decisions(docs: Path) -> list[str]:
    """Their pages, by number, relative to docs/."""
    return [f"adr/{path.name}" for path in sorted((docs / "adr").glob("*.md"))]


def without_code_links(page: str) -> str:
    """Name files of the code instead of linking to them: they are in the repository, not on the site."""
    return _CODE.sub(r"`\1`", page)


def _superfences() -> Any:
    # it lies in the environment of the site alone
    return importlib.import_module("pymdownx.superfences")


def on_config(config: Any) -> Any:
    """Add the decisions, and draw graphs; mkdocs calls it before it reads nav."""
    drawn = {"name": "mermaid", "class": "mermaid", "format": _superfences().fence_code_format}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [drawn]
    config.nav.append({"Decisions": decisions(Path(config.docs_dir))})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return what is rendered of a page."""
    return without_code_links(markdown)
