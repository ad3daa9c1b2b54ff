"""Directories by their real path: what a name was resolved to once may not become a link afterwards (P15).

Children are told paths, not descriptors. A path is resolved once, here, and opened without following a link
in any of its components from then on, so that names swapped in between lead nowhere.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_THROUGH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""A directory on the way needs to be searched, not read (mode 0711)."""
_LAST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def real_path(path: str | os.PathLike[str], beneath: str | os.PathLike[str] | None = None) -> str:
    """The absolute path without links; with `beneath`, links are resolved in that part alone.

    So a link below (or beside) `beneath` stays in the result, and `opened_real` refuses it.
    """
    if beneath is None:
        return os.path.realpath(path)
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(beneath))
    return os.path.normpath(os.path.join(os.path.realpath(beneath), relative))


@contextlib.contextmanager
def opened_real(path: str) -> Iterator[int]:
    """Open a directory by an absolute path in which nothing is a link.

    Raises:
        OSError: as the kernel says; NotADirectoryError for a link.
    """
    parts = [part for part in os.path.abspath(path).split(os.sep) if part]
    fd = os.open(os.sep, _THROUGH if parts else _LAST)
    try:
        for number, part in enumerate(parts, 1):
            try:
                child = os.open(part, _LAST if number == len(parts) else _THROUGH, dir_fd=fd)
            except OSError as error:
                error.filename = os.sep + os.sep.join(parts[:number])  # its last part alone names no place
                raise
            os.close(fd)
            fd = child
        yield fd
    finally:
        os.close(fd)
