"""audit.jsonl: one line for everything that ckptd removed or repaired: why, on which COMMITs it rested.

Append-only and flushed before the removal is reported done, so that a person (or a judge that is not ckptd)
can compare every deletion with what was committed at that moment (P1).
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

What = Literal["prune", "retire", "drop-derived", "release-hold", "trash", "repair", "gc"]


class Audit:
    """The audit file of one job."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(
        self,
        action: What,
        *,
        tag: str,
        generation: int,
        form: str,
        reason: str,
        commits: Sequence[tuple[str, str]] = (),
        files: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Append one line; `commits` are (key, sha256), `files` (path, bytes)."""
        line = {
            "at": datetime.now(UTC).isoformat(timespec="microseconds"),
            "action": action,
            "tag": tag,
            "generation": generation,
            "form": form,
            "reason": reason,
            "commits": [list(row) for row in commits],
            "files": [list(row) for row in files],
        }
        is_new = not self._path.exists()
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            _flush_names(self._path.parent)


def _flush_names(folder: Path) -> None:
    """A file that nobody finds after a power cut says nothing."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
