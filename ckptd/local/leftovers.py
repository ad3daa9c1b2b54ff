"""What lies in a folder that was renamed aside, and what of it is what was sealed (P1, adr/0163).

A permit compares whole identities, before and after the rename aside. What lies in the trash later may have
another owner or mode, and its disk another number since the boot: what was written shows in the rest.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.listing import OURS
from ckptd.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptd.core.save import SealedFile

_BY_HAND = "ckptd and trainer use nothing there: look at it, and move that folder away or remove it by hand"


def is_as_sealed(folder_fd: int, file: SealedFile) -> bool:
    """The inode, the size and the time of writing of what was sealed; device and ctime may be others."""
    status, sealed = files.stat_beneath(folder_fd, file.path), file.identity
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and (status.st_ino, status.st_size, status.st_mtime_ns)
        == (sealed.ino, sealed.size_bytes, sealed.mtime_ns)
    )


def everything_in(folder_fd: int) -> list[str]:
    """Names of all files below a folder, relative to it; what is mounted there is one name."""
    return [name for name, is_folder in _below(folder_fd) if not is_folder]


def folders_in(folder_fd: int) -> list[str]:
    """Names of all folders below a folder, on the same mount."""
    return [name for name, is_folder in _below(folder_fd) if is_folder]


def _below(folder_fd: int, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """(name, whether it is a folder that may be entered)."""
    for name in os.listdir(folder_fd):
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_dev != os.fstat(folder_fd).st_dev:
            yield prefix + name, False
            continue
        with files.opened_dir(name, folder_fd) as child:
            is_here = files.mount_of(child) == files.mount_of(folder_fd)
            yield prefix + name, is_here
            if is_here:
                yield from _below(child, f"{prefix}{name}/")


def stays_in_trash(name: str, left: Sequence[str], *, is_listed: bool) -> StorageError:
    """What is said of a removal that could not end; `is_listed`: of what stands where a sealed file stood."""
    more = f" (with {len(left) - 1} more)" if len(left) > 1 else ""
    why = "is not the file that was committed" if is_listed else "was no part of what was committed"
    text = f"{min(left)}{more} in {OURS}/trash/{name} {why}, so the removal that was begun there stops"
    return StorageError(text, hint=_BY_HAND)
