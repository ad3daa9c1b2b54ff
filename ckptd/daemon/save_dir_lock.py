"""Open save_dir under the lock that one daemon, or one command, holds while it works there."""

from __future__ import annotations

import fcntl
import os
import shlex
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.owned_dirs import lock as lock_if_possible
from ckptd.daemon.uploads.shared_dir import own_state
from ckptd.errors import CkptdError, LockHeld, NotPermitted, StorageError, from_os_error

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig


def open_job(config: JobConfig, state_dir: Path) -> tuple[int, int] | None:
    """Descriptors of save_dir and of what is locked: it, or of a shared one this host's state directory.

    None: there is no such directory yet.

    Raises:
        LockHeld: another daemon owns it (75). ConfigError: the state of a shared one lies in there.
    """
    if not config.shared_fs:
        fd = open_locked(str(config.save_dir))
        return None if fd is None else (fd, fd)
    lock = own_state(state_dir, config.save_dir)
    fd = _open(str(config.save_dir))
    if fd is None:
        os.close(lock)
        return None
    try:
        # beside other hosts' daemons; a command that wants save_dir alone finds that one runs
        lock_if_possible(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        close_save_dir(fd, lock)
        msg = f"a daemon without shared_fs, or a command, owns {config.save_dir}"
        raise LockHeld(msg) from error
    return fd, lock


def open_locked(save_dir: str) -> int | None:
    """A descriptor of save_dir that holds its lock; None: there is no such directory yet.

    Raises:
        LockHeld: another daemon owns it (75).
    """
    fd = _open(save_dir)
    if fd is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        hint = f"one daemon per save_dir; `{shlex.join(['ckptd', 'status', save_dir])}` shows it"
        raise LockHeld(f"another daemon owns {save_dir}", hint=hint) from error
    return fd


def may_open_now(config: JobConfig, error: CkptdError) -> bool:
    """Tell whether a job that did not open may be tried again: disks and rights heal; of a locked one only
    if no other daemon owns save_dir now (of a shared one only a reload asks again).
    """
    if not isinstance(error, LockHeld):
        return isinstance(error, StorageError | NotPermitted)
    if config.shared_fs:
        return False
    try:
        fd = open_locked(str(config.save_dir))
    except CkptdError:
        return False
    if fd is not None:
        close_save_dir(fd, fd)
    return True


def close_save_dir(fd: int, lock: int) -> None:
    """Workers may hold duplicates for a moment longer; the lock must not outlive the job with them."""
    for one in {fd, lock}:
        lock_if_possible(one, fcntl.LOCK_UN)
        os.close(one)


def _open(save_dir: str) -> int | None:
    try:
        return os.open(save_dir, files.DIR_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, f"opening {save_dir}") from error


def is_still(path: Path, fd: int) -> bool:
    """True while `path` names the open directory; an error other than "not there" changes nothing."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
    except OSError:
        return True
