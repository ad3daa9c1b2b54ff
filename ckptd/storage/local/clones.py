"""Hold complete checkpoints by clones until they are committed, and record which save each clone is of.

A trainer may remove a checkpoint before it is uploaded; a clone costs nothing and keeps it. The record beside
it (`<name>.json`, the sealed save) makes it useful without the journal (docs/adr/0102).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.base import extents, files
from ckptd.errors import RefusedError
from ckptd.storage.local import fs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.model.save import SealedFile


ABOUT_LIMIT_BYTES = 64 << 20


def about_name(name: str) -> str:
    """Name of the file that says which save a hold is of: it outlives the journal."""
    return f"{name}.json"


def hold_of(name: str) -> str:
    """Return the hold that a file beside holds is about; any other name as it is."""
    return name.removesuffix(".json")


def make(
    save_dir_fd: int,
    tag: str,
    name: str,
    sealed: Sequence[SealedFile],
    about: bytes,
    empty: Sequence[str] = (),
) -> None:
    """Clone a sealed save into `_ckptd/hold/<name>`; whole or not at all (P1). Never a hard link (H14).

    `about` is put beside it, before it bears its name; `empty` are the save's empty folders.

    Raises:
        SourceChanged: a file changed while it was cloned.
        RefusedError: the file system does not clone.
    """
    staging_fd = fs.ensure_ours(save_dir_fd, fs.HOLD)
    partial = f"{name}.partial"
    try:
        files.remove_tree(staging_fd, partial)
        target_fd = files.open_dir_beneath(staging_fd, partial, create_mode=0o700)
        try:
            with fs.closing(fs.open_tag(save_dir_fd, tag)) as source:
                for file in sealed:
                    _clone_one(source, target_fd, file)
                files.make_folders(target_fd, empty, mode=0o700)
                fs.check_identities(source, sealed, only_listed=False)
            files.fsync_dir(target_fd)
        finally:
            os.close(target_fd)
        files.remove_tree(staging_fd, name)
        files.fsync_dir(staging_fd)  # before the word: it would make another save's clones this one's
        files.write_atomic(staging_fd, about_name(name), about)
        os.rename(partial, name, src_dir_fd=staging_fd, dst_dir_fd=staging_fd)
        files.fsync_dir(staging_fd)
    except BaseException:
        files.remove_tree(staging_fd, partial)
        raise
    finally:
        os.close(staging_fd)


def _clone_one(source_fd: int, target_fd: int, file: SealedFile) -> None:
    head, _, base = file.path.rpartition("/")
    parent = files.open_dir_beneath(target_fd, head, create_mode=0o700) if head else os.dup(target_fd)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        out = os.open(base, flags, file.mode & 0o600, dir_fd=parent)
        try:
            with files.reading(source_fd, file.path, file.identity) as src:
                if file.identity.size_bytes and not extents.clone_file(src, out):
                    msg = "the file system of save_dir does not clone extents"
                    raise RefusedError(msg)
            os.fsync(out)
        finally:
            os.close(out)
    finally:
        os.close(parent)


def release(save_dir_fd: int, name: str) -> None:
    """Remove a hold, then what was noted of it."""
    fs.remove_ours(save_dir_fd, fs.HOLD, name)
    try:
        with fs.closing(files.open_dir_beneath(save_dir_fd, fs.HOLD)) as fd:
            files.remove_file(fd, about_name(name))
    except FileNotFoundError:
        pass


def remove_temporary(save_dir_fd: int, name: str) -> None:
    """Remove the temporary file of a hold's record whose writer was killed."""
    with fs.closing(files.open_dir_beneath(save_dir_fd, fs.HOLD)) as fd:
        files.remove_file(fd, name)


def give_name(save_dir_fd: int, name: str, new: str) -> bool:
    """Give a hold another name, durably; False when that name is taken.

    Killed in between, it has what was noted of it under both names: never under none.
    """
    if new in fs.names_in(save_dir_fd, fs.HOLD):
        return False
    with fs.closing(files.open_dir_beneath(save_dir_fd, fs.HOLD)) as fd:
        try:
            about = files.read_beneath(fd, about_name(name), limit_bytes=ABOUT_LIMIT_BYTES)
        except FileNotFoundError:
            about = None
        if about is not None:
            files.write_atomic(fd, about_name(new), about)
        files.rename_new(fd, name, fd, new)
        files.fsync_dir(fd)
        if about is not None:
            files.remove_file(fd, about_name(name))
    return True
