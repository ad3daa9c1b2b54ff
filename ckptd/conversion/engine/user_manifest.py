"""Read a manifest: a file that lists the other files of a checkpoint, as the job file names it."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ckptd.base.names import name_problem
from ckptd.errors import TornArchiveError

_SHA256 = re.compile("[0-9a-fA-F]{64}")


class ListedPart(NamedTuple):
    """A file that a manifest lists."""

    name: str
    size_bytes: int | None = None
    sha256: str = ""


def listed_files(data: bytes, name: str) -> list[ListedPart]:
    """Return the files that a manifest lists, which is JSON or lines as `sha256sum` writes them.

    JSON: a list of names or of objects with `name` (or `path`), `size` (or `bytes`) and `sha256`; or an
    object of these by name, or of sizes or SHA-256 by name; either may stand below the key `files`. A line
    is a name, with a SHA-256 before it or not.

    Raises:
        TornArchiveError: it is none of these, or names what lies elsewhere.
    """
    try:
        text = data.decode()
        rows = json.loads(text) if text.lstrip()[:1] in ("[", "{") else text.splitlines()
        if isinstance(rows, dict):
            rows = rows.get("files", rows)
        if isinstance(rows, dict):
            rows = [_listed_row(value) | {"name": key} for key, value in rows.items()]
        found = [_listed_part(row if isinstance(row, dict) else _line(row)) for row in rows if row]
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise TornArchiveError(f"{name} is no manifest that ckptd reads, or is cut off") from error
    for part in found:
        if (problem := name_problem(part.name)) is not None:
            raise TornArchiveError(f"{name} names {part.name!r}, which {problem}")
    return found


def _listed_row(value: Any) -> dict[str, Any]:
    """Return what a manifest says of the file that is the key of this value."""
    if isinstance(value, dict):
        return value
    return {"sha256" if isinstance(value, str) else "size": value}


def _listed_part(row: dict[str, Any]) -> ListedPart:
    name, size = row.get("name") or row.get("path"), row.get("size", row.get("bytes"))
    if not isinstance(name, str) or not isinstance(size, int | None) or isinstance(size, bool):
        raise TypeError(name)
    if not name or (size is not None and size < 0):
        raise ValueError(name)
    sha256 = str(row.get("sha256") or "").lower()
    if sha256 and not _SHA256.fullmatch(sha256):
        raise ValueError(sha256)
    return ListedPart(name.removeprefix("./"), size, sha256)


def _line(text: str) -> dict[str, Any]:
    """Read a line: a name, or a SHA-256, a space, a space or a star, and a name."""
    mark, _, name = text.partition(" ")
    if _SHA256.fullmatch(mark):
        return {"name": name[1:] if name[:1] in " *" else name, "sha256": mark}
    return {"name": text.strip()}
