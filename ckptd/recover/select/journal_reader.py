"""Read the daemon's journal for commands that run beside it: read only, and nothing if that fails."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import ValidationError

from ckptd.core.model.save import SealedSave

if TYPE_CHECKING:
    from pathlib import Path

WAIT_SECONDS = 2.0
"""For a writer that is just at it."""

Row = tuple[object, ...]


def journal_rows(path: Path, query: str, *values: str) -> list[Row]:
    """Return the rows of the journal at `path` beside its writer."""
    try:
        os.stat(path)
        place = f"file:{quote(str(path))}?mode=ro"
        with closing(sqlite3.connect(place, uri=True, timeout=WAIT_SECONDS)) as db:
            return list(db.execute(query, values).fetchall())
    except (OSError, sqlite3.Error):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An object that this node sent, or began to send, and that no COMMIT of its own lists yet."""

    key: str
    tag: str
    bytes: int
    is_whole: bool
    """Verified in the remote; else half an upload."""
    has_source: bool
    """The daemon may go on with it; else what it is a copy of is gone from this node."""


def sent_to(state_dir: Path | None, remote: str) -> list[Sent]:
    """Return the objects that the journal says lie in a remote: proof that an object there is ours."""
    if state_dir is None:
        return []
    query = (
        "SELECT o.key, o.bytes, o.proof IS NOT NULL, coalesce(s.tag, ''), "
        "o.form != 'zero' OR coalesce(s.state = 'present' OR s.held, 0) "
        "FROM objects o LEFT JOIN saves s ON s.id = o.save_id WHERE o.remote = ? AND o.form NOT LIKE '%~'"
    )
    return [
        Sent(
            key=str(key),
            tag=str(tag),
            bytes=int(str(size)),
            is_whole=bool(is_whole),
            has_source=bool(has_source),
        )
        for key, size, is_whole, tag, has_source in journal_rows(state_dir / "journal.db", query, remote)
    ]


def sealed_here(state_dir: Path | None, tag: str) -> list[SealedSave]:
    """Return the saves under that tag that the daemon sealed and that lie in save_dir."""
    if state_dir is None:
        return []
    query = "SELECT sealed FROM saves WHERE state = 'present' AND tag = ?"
    found = []
    for (sealed,) in journal_rows(state_dir / "journal.db", query, tag):
        try:
            found.append(SealedSave.model_validate_json(str(sealed)))
        except ValidationError:
            continue
    return found
