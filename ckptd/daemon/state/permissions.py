"""Prove repeatedly that files in this save_dir may be deleted: rights and mounts change (P19).

A failed proof stops deletions alone: what is complete is uploaded all the same.
"""

from __future__ import annotations

import errno
import math
import os
import time
from typing import TYPE_CHECKING

from ckptd.errors import READ_ONLY, CkptdError, NotPermitted
from ckptd.storage.local import probe

if TYPE_CHECKING:
    from ckptd.daemon.state.problems import Problems
    from ckptd.daemon.state.state import JobState

AGAIN_SECONDS = 60.0
SOON_SECONDS = 5.0
"""Interval of proofs while something that should be deleted could not be."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DeletionRights:
    """Prove the right to delete for one job in one save_dir; called in the deciding thread.

    `is_missing`: the last proof failed, and the next turn tries again.
    """

    def __init__(self, mark: str = "") -> None:
        self.mark = mark or probe.new_mark()
        self.are_held = self.is_missing = False
        self._proved_at_seconds = -math.inf
        self._clones_are_known = False

    def prove(self, problems: Problems, about: str, state: JobState, save_dir_fd: int) -> None:
        """Prove the right to delete once a minute, while saves are on the file system of their writing; a
        proof that failed is tried at each turn."""
        if not state.saves.rows or state.journal.meta("device") != str(os.fstat(save_dir_fd).st_dev):
            self.are_held = False
            return
        now = time.monotonic()
        has_failed = any(not stays.is_brief for stays in state.deletions.blocked.values())
        due_seconds = SOON_SECONDS if has_failed else AGAIN_SECONDS
        if self.are_held and now - self._proved_at_seconds < due_seconds:
            return
        try:
            prove(save_dir_fd, about, self.mark)
            if not self.are_held or not self._clones_are_known:
                can = can_clone(save_dir_fd, self.mark)
                self._clones_are_known = can is not None
                state.holds.set_can_clone(can_clone=bool(can))
        except (NotPermitted, OSError) as error:
            text = error.message if isinstance(error, CkptdError) else f"{about}: {error.strerror}"
            is_mount = isinstance(error, OSError) and error.errno == errno.EROFS
            hint = READ_ONLY if is_mount else "run ckptd as the training user"
            hint = error.hint if isinstance(error, CkptdError) else f"{hint}; nothing is deleted"
            problems.put("no-rights", about, text, hint)
            self.are_held, self.is_missing = False, True
            return
        if self.is_missing:
            state.deletions.forget_blocked()  # what failed for want of rights goes at once
        self.are_held, self.is_missing, self._proved_at_seconds = True, False, now
        problems.clear("no-rights", about)


def prove(save_dir_fd: int, about: str, mark: str) -> None:
    """Raises NotPermitted, or OSError as the kernel says."""
    try:
        probe.prove_rights(save_dir_fd, about, mark)
    except OSError as error:
        # no room to create anything is no want of rights: what goes makes room
        if error.errno not in _NO_ROOM:
            raise
        probe.ask_kernel(save_dir_fd, about)


def can_clone(save_dir_fd: int, mark: str) -> bool | None:
    """Tell whether extents can be shared here; None: not known, without room for two small files."""
    try:
        return probe.can_clone(save_dir_fd, mark)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return None
