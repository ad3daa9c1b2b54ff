"""Reserve a few MiB of save_dir's own disk for the moment when it is full (P13, docs/adr/0161).

While the journal cannot be written, nothing is uploaded or deleted: a full disk that holds the journal would
stay full. So where the state lies on save_dir's file system an allocated file lies beside the journal, made
only while enough space is free. When the journal or a document meets a full disk it is deleted, and the job
goes on at once; it is made again when there is space. Every method is called in the deciding thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING

from ckptd.base import files, names
from ckptd.base.owned_dirs import opened_ours
from ckptd.errors import CkptdError, JournalDamaged, JournalFailed, NoSpaceError

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.core.policy.view import Disk
    from ckptd.daemon.state.problems import Problems

log = logging.getLogger("ckptd.job")

NAME = "reserve"
BYTES = 6 << 20
"""SQLite's log, which it cuts at 4 MiB, and what is written beside it: pages, status.json, audit.jsonl."""
AGAIN_SECONDS = 10.0
FULL = (errno.ENOSPC, errno.EDQUOT)
_LITTLE_BYTES = 1 << 20
_BLOCK_BYTES = 512


class Reserve:
    """Manage the reserve file of one job; while it is used up, `disk-full` is reported."""

    def __init__(self, problems: Problems, save_dir: Path) -> None:
        self._problems = problems
        self._save_dir = str(save_dir)
        self._look_at_seconds = -math.inf
        self._is_futile = False
        """This file system grants room without keeping any (ZFS)."""

    def keep(self, state_dir: Path, save_dir_fd: int, disk: Disk) -> None:
        """Make it where it belongs, if it is missing and leaves more free than P13's line."""
        now = time.monotonic()
        if now < self._look_at_seconds:
            return
        self._look_at_seconds = now + AGAIN_SECONDS
        try:
            with opened_ours(state_dir) as fd:
                if os.fstat(fd).st_dev != os.fstat(save_dir_fd).st_dev:
                    return
                has_room = disk.free_bytes >= disk.reserve_bytes + BYTES
                if self._is_futile or _is_whole(fd):
                    is_kept = not self._is_futile
                elif is_kept := has_room and _make(fd):
                    self._is_futile = not _is_whole(fd)
                    is_kept = not self._is_futile
                if is_kept:
                    self._problems.clear("disk-full", self._save_dir)
        except (OSError, CkptdError) as error:
            log.debug("no reserve in %s: %s", state_dir, error)

    def helps(self, error: CkptdError, state_dir: Path) -> bool:
        """Tell whether a full disk was what failed, and there is room now for what is ours."""
        if isinstance(error, JournalDamaged):
            return False
        is_of_room = isinstance(error, NoSpaceError) or (
            isinstance(error, JournalFailed) and not _has_room(state_dir)
        )
        return is_of_room and self.release(state_dir)

    def release(self, state_dir: Path) -> bool:
        """Let it go; False: there was none."""
        self._look_at_seconds = time.monotonic() + AGAIN_SECONDS
        try:
            with opened_ours(state_dir) as fd:
                status = files.stat_beneath(fd, NAME)
                if status is None or not stat.S_ISREG(status.st_mode):
                    return False
                files.remove_file(fd, NAME)
                with contextlib.suppress(OSError):
                    files.fsync_dir(fd)  # some file systems give blocks back with their next commit only
        except OSError as error:
            log.warning("the reserve in %s cannot be released: %s", state_dir, error.strerror)
            return False
        text = f"the disk of {self._save_dir} is full; ckptd works from its reserve"
        hint = "free space there; what is committed makes room by itself where the policy deletes it"
        self._problems.put("disk-full", self._save_dir, text, hint)
        log.warning("%s; %s", text, hint)
        return True


def _is_whole(fd: int) -> bool:
    """Tell whether the reserve file is intact; a half-made one or a symbolic link is removed."""
    status = files.stat_beneath(fd, NAME)
    if status is None:
        return False
    is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    if is_file and status.st_size == BYTES and status.st_blocks * _BLOCK_BYTES >= BYTES:
        return True
    files.remove_file(fd, NAME)
    return False


def _make(fd: int) -> bool:
    file = files.open_beneath(fd, NAME, files.NEW_FLAGS, 0o600)
    try:
        try:
            os.posix_fallocate(file, 0, BYTES)
            os.fsync(file)
        finally:
            os.close(file)
        files.fsync_dir(fd)
    except OSError:
        files.remove_file(fd, NAME)
        raise
    return True


def _has_room(state_dir: Path) -> bool:
    """Tried: SQLite does not say what was missing, and a quota shows in no count of free blocks."""
    name = f"{names.TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with opened_ours(state_dir) as fd:
            file = files.open_beneath(fd, name, files.NEW_FLAGS, 0o600)
            try:
                os.posix_fallocate(file, 0, _LITTLE_BYTES)
            finally:
                os.close(file)
                files.remove_file(fd, name)
    except OSError as error:
        return error.errno not in FULL
    return True
