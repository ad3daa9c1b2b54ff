"""Choose where ckptd's own folder lies: `_ckptd` in save_dir, else `_ckptd.<name>` beside it.

Accelerate's automatic naming lists its folder, sorts all names by their numbers and removes the first ones:
with a `total_limit` it dies of a name without a number (measured; docs/adr/0050). So nothing of ours may lie
in there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from typing import TYPE_CHECKING

from ckptd.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OURS = "_ckptd"
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NUMBERED = re.compile(r"^checkpoint_\d+$")
_SAVED = ("pytorch_model", "random_states_0.pkl")
"""Names that Accelerate's `save_state` leaves in its folder: with DeepSpeed, and without."""


def is_numbered_tag(tag: str) -> bool:
    """Whether a name is one that Accelerate's automatic naming makes."""
    return _NUMBERED.match(tag) is not None


def open_beside(save_dir_fd: int) -> int | None:
    """Our folder beside save_dir, opened; None where it lies in save_dir, or is not there yet."""
    if _has(save_dir_fd, OURS):
        return None
    name = _name_beside(save_dir_fd)
    try:
        return os.open(f"../{name}", _DIR_FLAGS, dir_fd=save_dir_fd) if name else None
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        msg = f"{name} beside save_dir is no folder"
        raise RefusedError(msg, hint="move it away: ckptd keeps its own files there") from error


def make_beside(save_dir_fd: int, mode: int, *, is_sure: bool = False) -> None:
    """Make it where it belongs beside: in a save_dir that Accelerate names itself, and that has none yet.

    `is_sure`: known from elsewhere, as when save_dir was emptied.
    """
    name = _name_beside(save_dir_fd)
    if name is None or _has(save_dir_fd, OURS) or _has(save_dir_fd, f"../{name}"):
        return
    tags = [] if is_sure else filter(is_numbered_tag, list_dir(save_dir_fd))
    if is_sure or any(_has(save_dir_fd, f"{tag}/{mark}") for tag in tags for mark in _SAVED):
        os.mkdir(f"../{name}", mode, dir_fd=save_dir_fd)


def list_dir(dir_fd: int) -> list[str]:
    """Return the names in an open directory, unordered.

    Reads through a descriptor of its own: `os.listdir` and `os.scandir` of a descriptor use the position that
    all its duplicates share, and two threads that list at once each miss what the other has read.
    """
    own = os.open(".", _DIR_FLAGS, dir_fd=dir_fd)
    try:
        return os.listdir(own)
    finally:
        os.close(own)


def lock(fd: int, how: int) -> None:
    """Lock a directory by flock; a file system that has none for directories (NFS: EBADF) goes without.

    Raises:
        BlockingIOError: with LOCK_NB, somebody else holds it.
    """
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def lies_in_save_dir(path: Path, save_dir: Path) -> bool:
    """Whether a path lies in save_dir, or in our folder beside it."""
    return path.is_relative_to(save_dir) or path.is_relative_to(path_beside(save_dir))


def path_beside(save_dir: Path) -> Path:
    """Return where our folder lies when it may not lie in save_dir."""
    return save_dir.parent / f"{OURS}.{save_dir.name}"


def path_of(save_dir: Path, relative: str) -> Path:
    """Return a path in our folder; `relative` begins with `_ckptd`."""
    beside = path_beside(save_dir)
    if relative.split("/")[0] == OURS and not (save_dir / OURS).exists() and beside.is_dir():
        return beside / relative.partition("/")[2]
    return save_dir / relative


@contextlib.contextmanager
def opened_ours(path: Path, *, create_mode: int | None = None) -> Iterator[int]:
    """Open a directory of ours by its path; from the first `_ckptd` in it on no symlink is followed (P15).

    Whoever may write in save_dir could otherwise lead status, audit and decisions elsewhere. With
    `create_mode` what is missing from there on is made.

    Raises:
        OSError: as the kernel says; NotADirectoryError for a symlink.
    """
    parts = path.parts
    first = next((i for i, part in enumerate(parts) if _is_ours(part)), len(parts) - 1)
    fd = os.open(os.path.join("", *parts[:first]) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[first:]:
            if create_mode is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, create_mode, dir_fd=fd)
            child = os.open(part, _DIR_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = child
        yield fd
    finally:
        os.close(fd)


def lies_in_ours(path: Path) -> bool:
    """Whether a path leads through a folder of ours."""
    return any(_is_ours(part) for part in path.parts)


def is_own_file(path: Path) -> bool:
    """Whether a name in a directory of ours is free, or a regular file that has no other name.

    Raises:
        OSError: as `opened_ours`.
    """
    with opened_ours(path.parent) as fd:
        try:
            status = os.stat(path.name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _is_ours(name: str) -> bool:
    return name == OURS or name.startswith(f"{OURS}.")


def _has(fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _name_beside(save_dir_fd: int) -> str | None:
    try:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{save_dir_fd}"))
    except OSError:
        return None
    return f"{OURS}.{name}" if name and not name.endswith(" (deleted)") else None
