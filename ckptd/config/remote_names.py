"""Name a remote in messages, and the directory that its URL means."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

UNNAMED = "remote"
"""Name of a remote that only a command line gives."""


def shown_remote(name: str, url: str) -> str:
    """Return how messages call a remote: by its name, or its URL where nobody gave it one."""
    return url if name == UNNAMED else f"remote {name}"


def said_of(name: str, url: str, text: str) -> str:
    """Return a line about a remote; a URL that the text names already is not said twice."""
    shown = shown_remote(name, url)
    return text if shown == url and url in text else f"{shown}: {text}"


def url_path(url: str) -> Path | None:
    """Return the directory that a remote's URL names; None for other kinds of stores."""
    parts = urlsplit(url)
    if parts.scheme == "":
        return Path(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
