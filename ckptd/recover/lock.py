"""One recovery at a time in a save_dir: flock on `_ckptd/staging` itself, which leaves no lock file (H54)."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.listing import OURS
from ckptd.errors import NothingCommitted
from ckptd.local.fs import STAGING, ensure_ours, remove_empty
from ckptd.place import lock as lock

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def one_at_a_time(save_dir_fd: int) -> Iterator[None]:
    """Hold the lock of recoveries in a save_dir; waits for another one.

    Where there was nothing of ours and there is nothing to resume from, nothing stays: before the first
    checkpoint nobody knows whether the trainer bears a folder of ours (adr/0050).
    """
    was_there = files.stat_beneath(save_dir_fd, OURS) is not None
    staging = ensure_ours(save_dir_fd, STAGING)
    try:
        lock(staging, fcntl.LOCK_EX)
        yield
    except NothingCommitted:
        for name in () if was_there else (STAGING, OURS):
            remove_empty(save_dir_fd, name)
        raise
    finally:
        os.close(staging)
