"""What this process may and can do in a save_dir, proved by doing it below `_ckptd` (P19, P11)."""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import stat
import time
from contextlib import ExitStack, suppress

from ckptd import files
from ckptd.errors import NotPermitted
from ckptd.local.fs import STAGING, TRASH, closing, ensure_ours

_NOBODYS_SECONDS = 3600.0
"""Older temporary names than this are of no proof that is under way, on whatever host."""


def new_mark() -> str:
    """A name for the proofs of one process in one save_dir.

    Of what a disk refuses to let go there is one, and the next proof of that mark takes it along.
    """
    return secrets.token_hex(6)


def can_clone(save_dir_fd: int, mark: str) -> bool:
    """Try to share extents between two small files of ours on the file system of save_dir."""
    names = [f"{files.TEMPORARY_PREFIX}{mark}-{end}" for end in ("a", "b")]
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with closing(ensure_ours(save_dir_fd, STAGING)) as fd, ExitStack() as undo:
        opened: list[int] = []
        for name in names:
            files.remove_file(fd, name)  # a disk may have refused to let it go
            opened.append(os.open(name, flags, 0o600, dir_fd=fd))
            undo.callback(files.remove_file, fd, name)
            undo.callback(os.close, opened[-1])
        files.write_all(opened[0], b"\0" * 65536)
        os.fsync(opened[0])
        return files.clone_file(opened[0], opened[1])


def prove_rights(save_dir_fd: int, save_dir: str, mark: str) -> None:
    """Create, rename and remove in `_ckptd`, and ask the kernel whether we may do so in save_dir (P19, P11).

    One that fails takes back what it made, or the next one does; what a killed one left goes once it is old,
    since hosts that share the directory prove theirs at the same time.

    Raises:
        NotPermitted: with who owns the directory and who we are.
    """
    name, aside = f"{files.TEMPORARY_PREFIX}{mark}", f"ours.{mark}"
    try:
        with (
            closing(ensure_ours(save_dir_fd, STAGING)) as staging,
            closing(ensure_ours(save_dir_fd, TRASH)) as trash,
        ):
            _sweep(staging, mark)
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=staging)
            try:
                os.rename(name, aside, src_dir_fd=staging, dst_dir_fd=trash)
            except OSError:
                with suppress(OSError):
                    os.rmdir(name, dir_fd=staging)
                raise
            os.rmdir(aside, dir_fd=trash)
    except PermissionError as error:
        raise _who(save_dir_fd, save_dir) from error
    ask_kernel(save_dir_fd, save_dir)


def _sweep(staging_fd: int, mark: str) -> None:
    for left in [n for n in os.listdir(staging_fd) if n.startswith(files.TEMPORARY_PREFIX)]:
        with suppress(FileNotFoundError):
            if mark in left or _is_old(staging_fd, left):
                _remove(staging_fd, left)


def ask_kernel(save_dir_fd: int, save_dir: str) -> None:
    """Whether we may rename and remove in save_dir itself, where nothing is tried out (P11).

    Raises:
        NotPermitted: with who owns the directory and who we are.
    """
    status = os.fstat(save_dir_fd)
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and os.geteuid() not in (0, status.st_uid)
    if is_sticky or not os.access(".", os.W_OK | os.X_OK, dir_fd=save_dir_fd, effective_ids=True):
        raise _who(save_dir_fd, save_dir)


def _is_old(dir_fd: int, name: str) -> bool:
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    return time.time() - status.st_mtime > _NOBODYS_SECONDS


def _remove(dir_fd: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except NotADirectoryError:
        files.remove_file(dir_fd, name)


def user(uid: int) -> str:
    """A user's name and number, for people."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def _who(save_dir_fd: int, save_dir: str) -> NotPermitted:
    status = os.fstat(save_dir_fd)
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if owner == os.geteuid():
        msg = (
            f"{save_dir} is owned by {user(owner)}, as whom ckptd runs, mode {mode:o}: it may not write there"
        )
        may = (mode & stat.S_IWUSR) and (mode & stat.S_IXUSR)
        cure = "look at its _ckptd, and how it is mounted" if may else f"chmod u+wx {shlex.quote(save_dir)}"
        return NotPermitted(msg, hint=f"{cure}; until then nothing is deleted")
    msg = f"{save_dir} is owned by {user(owner)}, ckptd runs as {user(os.geteuid())}"
    return NotPermitted(msg, hint=f"run ckptd as {user(owner)}; until then nothing is deleted")
