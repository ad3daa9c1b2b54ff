"""Read and write `<save_dir>/_ckptd/run.json`, which says which run a directory holds (docs/adr/0185)."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckptd.base import files
from ckptd.core.model.listing import OURS
from ckptd.core.model.runs import RUN_FILE, RUN_FILE_PATH, RunFile
from ckptd.errors import CkptdError
from ckptd.storage.local.fs import closing, ensure_ours

if TYPE_CHECKING:
    from ckptd.core.model.runs import How

_LIMIT_BYTES = 1 << 20


def place_of(save_dir: str, inode: int) -> str:
    """Return a name for a directory of this node; another one of that path, or a copy elsewhere, has another
    name.
    """
    return hashlib.sha256(f"{save_dir}\0{inode}".encode("utf-8", "surrogateescape")).hexdigest()[:16]


def read_run(save_dir_fd: int, save_dir: str) -> RunFile | None:
    """Return the run that this very directory holds; None: unknown, or said of another directory."""
    try:
        data = files.read_beneath(save_dir_fd, RUN_FILE_PATH, limit_bytes=_LIMIT_BYTES)
        found = RunFile.model_validate_json(data)
    except (OSError, CkptdError, ValidationError):
        return None
    inode = os.fstat(save_dir_fd).st_ino
    # hosts that share a directory may see it under several paths, so that its inode alone tells it
    return found if found.place in (place_of(save_dir, inode), place_of("", inode)) else None


def copied_run(save_dir_fd: int, save_dir: str) -> str | None:
    """Return the run of the directory that this one was copied or moved from; None: of none."""
    try:
        data = files.read_beneath(save_dir_fd, RUN_FILE_PATH, limit_bytes=_LIMIT_BYTES)
        found = RunFile.model_validate_json(data)
    except (OSError, CkptdError, ValidationError):
        return None
    return found.run_id if read_run(save_dir_fd, save_dir) is None else None


def write_run(save_dir_fd: int, found: RunFile) -> None:
    """Replace it, durably."""
    with closing(ensure_ours(save_dir_fd, OURS)) as fd:
        files.write_atomic(fd, RUN_FILE, found.model_dump_json().encode())


def run_file(
    save_dir_fd: int,
    save_dir: str,
    run_id: str,
    how: How,
    known: tuple[tuple[str, int], ...] = (),
    left: str | None = None,
) -> RunFile:
    """Return a new run file, of this directory."""
    place = place_of(save_dir, os.fstat(save_dir_fd).st_ino)
    return RunFile(run_id=run_id, place=place, how=how, known=known, left=left)


def host_name() -> str:
    """Return this machine's name."""
    return socket.gethostname()
