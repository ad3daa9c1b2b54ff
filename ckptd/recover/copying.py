"""Small files that a trainer keeps beside the shards, copied to where a universal form will be read from.

There may be one for each rank: each is opened, copied, made durable and closed before the next.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.local.fs import ensure_ours

if TYPE_CHECKING:
    from collections.abc import Iterable

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_beside(save_dir_fd: int, folder: str, target: str, paths: Iterable[str]) -> None:
    """Copy `paths` of `folder` to the same places below `target`, which is ours; names and bytes durable.

    Raises:
        RefusedError: a symlink, or another device, on the way. OSError: as the kernel says.
    """
    mode = os.fstat(save_dir_fd).st_mode & 0o777
    with contextlib.ExitStack() as closing:
        source_fd = files.open_dir_beneath(save_dir_fd, folder)
        closing.callback(os.close, source_fd)
        target_fd = ensure_ours(save_dir_fd, target)
        closing.callback(os.close, target_fd)
        for path in paths:
            _copy(source_fd, path, target_fd, mode)


def _copy(source_fd: int, path: str, target_fd: int, folder_mode: int) -> None:
    head, _, base = path.rpartition("/")
    with contextlib.ExitStack() as closing:
        if head:
            parent = files.open_dir_beneath(target_fd, head, create_mode=folder_mode, is_durable=True)
        else:
            parent = os.dup(target_fd)
        closing.callback(os.close, parent)
        with files.reading(source_fd, path) as fd:
            status = os.fstat(fd)
            out = os.open(base, _NEW_FILE, status.st_mode & 0o777, dir_fd=parent)
            closing.callback(os.close, out)
            files.copy_range(fd, 0, out, 0, status.st_size)
            os.fsync(out)
        files.fsync_dir(parent)
