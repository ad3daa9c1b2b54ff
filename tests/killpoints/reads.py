"""Calls that read, of the files and folders of one job, and where in the product a call is made.

It exists beside the seams that wrap them because what Python reads for itself must not be counted, and
because an error is chosen by the line that meets it: thousands of calls come from some hundreds of lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptd

READS = ("pread", "preadv", "listdir", "fstat", "stat", "lstat", "fstatvfs")
READING = {*READS, "scandir", "readdir", "open-read", "select"}
LISTS = {"open-read", "scandir", "listdir"}
"""Those that rights are asked for."""
HELPERS = ("base/", "storage/journal/schema.py", "formats/")
"""Who calls these says what for: a site goes on to the first line outside of them."""
_PRODUCT = f"{Path(ckptd.__file__).parent}/"
_readlink = os.readlink


def site() -> str:
    """Where the product makes the call that is under way: from its innermost line out of its helpers."""
    frame, lines = sys._getframe(1), []
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PRODUCT):
            inside = path.removeprefix(_PRODUCT)
            lines.append(f"{inside}:{frame.f_code.co_name}:{frame.f_lineno}")
            if not inside.startswith(HELPERS):
                break
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


def lies_below(root: str, target: Any, dir_fd: int | None) -> bool:
    """Whether a call is about something below `root`, given by path or by descriptor."""
    if not isinstance(target, int):
        path = os.fsdecode(target)
        if path.startswith("/") or dir_fd is None:
            return path.startswith(root)
        target = dir_fd
    try:
        return _readlink(f"/proc/self/fd/{target}").startswith(root)
    except OSError:
        return False


class Listing:
    """What os.scandir gives; its first entry is a call of its own, for only there the folder is read."""

    def __init__(self, entries: Any, read: Callable[[], Any]) -> None:
        self._entries = entries
        self._read: Callable[[], Any] | None = read

    def __iter__(self) -> Listing:
        return self

    def __next__(self) -> Any:
        read, self._read = self._read, None
        if read is not None:
            read()
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As the real one."""
        self._entries.close()
