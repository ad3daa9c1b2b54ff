"""Write audit.jsonl: one line for everything that ckptd deleted or repaired: why, on which COMMITs it rested.

Append-only and flushed before the deletion is reported done, so that a person (or a judge that is not ckptd)
can compare every deletion with what was committed at that moment (P1).
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from ckptd.base.extents import write_all
from ckptd.base.files import ends_whole
from ckptd.base.owned_dirs import opened_ours

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

What = Literal["prune", "prune-unuploaded", "retire", "drop-derived", "release-hold", "trash", "repair", "gc"]


class Audit:
    """The audit file of one job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_entry_flushed = False
        """Whether this process flushed the file's name: the one that made the file may have died before."""

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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with opened_ours(self._path.parent) as folder:
            fd = os.open(self._path.name, flags, 0o644, dir_fd=folder)
            try:
                # a line that a full disk cut short ends here, and spoils no other
                start = b"" if ends_whole(folder, self._path.name) else b"\n"
                write_all(fd, start + json.dumps(line, separators=(",", ":")).encode() + b"\n")
                os.fsync(fd)
            finally:
                os.close(fd)
            if not self._is_entry_flushed:
                # a file that nobody finds after a power cut says nothing
                os.fsync(folder)
                self._is_entry_flushed = True


# --- reading ---------------------------------------------------------------------------------------------

_READ_BYTES = 1 << 20
"""Bytes at the end of the file that are read: some thousand lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """A form of a checkpoint that was deleted in a remote."""

    tag: str
    generation: int
    form: str
    at: str
    """RFC 3339, UTC."""


def read_retired(folder: Path) -> list[Deleted]:
    """Return what was deleted in remotes, oldest first, from the audit file of a state directory.

    Whoever may not read it, or finds something else there, gets nothing: it only adds times to a display.
    """
    try:
        fd = os.open(folder / "audit.jsonl", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        size = os.fstat(fd).st_size
        data = os.pread(fd, _READ_BYTES, max(0, size - _READ_BYTES))
    except OSError:
        return []
    finally:
        os.close(fd)
    found = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            if row["action"] == "retire":
                found.append(
                    Deleted(
                        tag=str(row["tag"]),
                        generation=int(row["generation"]),
                        form=str(row["form"]),
                        at=str(row["at"]),
                    )
                )
    return found
