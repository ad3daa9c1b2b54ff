"""Small files beside a checkpoint (tokenizers, configurations): read whole, the same before and after.

They are not sealed like shards, so that their content alone decides what was shipped.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.errors import SourceChanged, from_os_error
from ckptd.remote.source import MemorySource

if TYPE_CHECKING:
    from ckptd.remote.messages import ShipFile

EXTRA_LIMIT_BYTES = 16 << 20


def read_whole(root: int, file: ShipFile) -> tuple[bytes, MemorySource]:
    """A small file beside the checkpoint, whole, the same before and after it was read.

    Raises:
        SourceChanged: it is gone or being written.
        RefusedError: it is larger than 16 MiB.
    """
    with files.reading(root, file.source) as fd:
        before = os.fstat(fd)
        try:
            cached = files.cached_runs(fd, before.st_size)
            data = files.pread_all(fd, limit_bytes=EXTRA_LIMIT_BYTES)
            files.drop_pages_but(fd, cached, 0, len(data))
        except OSError as error:
            raise from_os_error(error, f"reading {file.path}") from error
        after = os.fstat(fd)
    if files.identity_of(before) != files.identity_of(after) or len(data) != after.st_size:
        msg = f"{file.path} is being written"
        raise SourceChanged(msg, hint="the next turn looks again")
    mode = stat.S_IMODE(after.st_mode)
    return data, MemorySource(data, mode=mode, folder_mode=folder_mode(root, file.source), gid=after.st_gid)


def inline(file: ShipFile) -> tuple[bytes, MemorySource]:
    data = (file.inline or "").encode()
    return data, MemorySource(data, mode=file.mode, folder_mode=0o755, gid=None)


def folder_mode(root: int, source: str) -> int:
    """Permission bits of the folder that `source` lies in."""
    return mode_of_folder(root, source.rpartition("/")[0])


def mode_of_folder(root: int, parent: str) -> int:
    """The same by the folder's own name; "": the root."""
    status = files.stat_beneath(root, parent) if parent else os.fstat(root)
    return stat.S_IMODE(status.st_mode) if status is not None else 0o700
