"""Open, sync, rename and remove files by descriptor: the one module that does so (docs/design.md §7).

Everything is relative to a directory descriptor and a validated relative name; below it no symlink is
followed and no mount crossed, so a name swapped by someone else cannot lead outside. Durability has three
small names: `fsync_dir`, `write_atomic` (temporary, fsync, rename, fsync dir), `create_exclusive`. An fsync
that failed is never tried again on the same descriptor: the kernel may have dropped the pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from typing import TYPE_CHECKING

from ckptd.base import owned_dirs
from ckptd.base.extents import (
    mount_of,
    write_all,
)
from ckptd.base.names import TEMPORARY_PREFIX, stays_inside
from ckptd.errors import RefusedError, SourceChanged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptd.base.identity import FileIdentity, FolderIdentity

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOUNTS = "mounts inside a save_dir are not followed"
DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
ROTTEN = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)
"""Errors by which a disk says that it has lost the bytes asked for."""

_libc = ctypes.CDLL(None, use_errno=True)


def identity_of(status: os.stat_result) -> FileIdentity:
    """Return the identity in a stat result."""
    from ckptd.base.identity import FileIdentity  # here: restricted children start without pydantic

    return FileIdentity(
        dev=status.st_dev,
        ino=status.st_ino,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )


def folder_identity(fd: int) -> FolderIdentity:
    """Return the identity of an open directory."""
    from ckptd.base.identity import FolderIdentity

    status = os.fstat(fd)
    return FolderIdentity(dev=status.st_dev, ino=status.st_ino)


def check_relative(name: str) -> tuple[str, ...]:
    """Split a relative `/`-name into components; refuses empty, `.`, `..`, absolute, NUL (P15)."""
    if not stays_inside(name):
        raise RefusedError(f"unsafe path {name!r}", hint="paths stay inside their root")
    return tuple(name.split("/"))


@contextlib.contextmanager
def opened_dir(path: str | os.PathLike[str], dir_fd: int | None = None) -> Iterator[int]:
    """Open a directory (its last component must not be a symlink) and close it at the end."""
    fd = os.open(path, DIR_FLAGS, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def open_dir_beneath(
    dir_fd: int, relative: str, *, create_mode: int | None = None, is_durable: bool = False
) -> int:
    """Open the directory `relative` below `dir_fd`, component by component, on the same device.

    With `create_mode` missing components are made; `is_durable`: their names are flushed before anything is
    put into them, also of those that are there: whoever made one may have been killed before it came to that.
    `_ckptd` may lie beside `dir_fd` (ckptd/base/owned_dirs.py). The caller closes the result.

    Raises:
        RefusedError: a component is a symlink or lies on another device. OSError: as the kernel says.
    """
    parts = check_relative(relative)
    beside = owned_dirs.open_beside(dir_fd) if parts[0] == owned_dirs.OURS else None
    current = os.dup(dir_fd) if beside is None else beside
    try:
        device = os.fstat(dir_fd).st_dev
        if os.fstat(current).st_dev != device:
            msg = f"{relative} lies beside its save_dir, on another file system"
            raise RefusedError(msg, hint="mount the file system one level higher")
        mount = mount_of(current)
        for part in parts if beside is None else parts[1:]:
            if create_mode is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, create_mode, dir_fd=current)
                if is_durable:
                    fsync_dir(current)
            child = _open_no_symlink(part, DIR_FLAGS, current, relative)
            above, current = current, child
            os.close(above)
            if os.fstat(current).st_dev != device:
                raise RefusedError(f"{relative} crosses into another file system at {part}", hint=_MOUNTS)
        if mount_of(current) != mount:
            raise RefusedError(f"{relative} lies on another mount", hint=_MOUNTS)
    except BaseException:
        os.close(current)
        raise
    return current


def make_folders(dir_fd: int, paths: Iterable[str], *, mode: int) -> None:
    """Make the folders that are missing below `dir_fd`, durably.

    Raises:
        RefusedError: a component is a symlink or lies on another device. OSError: as the kernel says.
    """
    for path in paths:
        made = open_dir_beneath(dir_fd, path, create_mode=mode, is_durable=True)
        try:
            fsync_dir(made)
        finally:
            os.close(made)


def open_beneath(dir_fd: int, relative: str, flags: int = READ_FLAGS, mode: int = 0o666) -> int:
    """Open the file `relative` below `dir_fd` without following a symlink; the caller closes it."""
    parts = check_relative(relative)
    if len(parts) == 1:
        return _open_no_symlink(relative, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd, relative, mode)
    parent = open_dir_beneath(dir_fd, "/".join(parts[:-1]))
    try:
        return _open_no_symlink(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, parent, relative, mode)
    finally:
        os.close(parent)


def _open_no_symlink(name: str, flags: int, dir_fd: int, shown: str, mode: int = 0o666) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        is_symlink = error.errno == errno.ELOOP
        if error.errno == errno.ENOTDIR:
            with contextlib.suppress(OSError):
                is_symlink = stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
        if is_symlink:
            msg = f"{shown} contains a symlink ({name})"
            raise RefusedError(msg, hint="symlinks below a save_dir are not followed") from error
        raise


@contextlib.contextmanager
def reading(dir_fd: int, relative: str, expected: FileIdentity | None = None) -> Iterator[int]:
    """Open a regular file for reading; with `expected`, only if it is still that very file.

    Raises:
        SourceChanged: it is gone, no regular file, or its identity differs (P4).
    """
    try:
        fd = open_beneath(dir_fd, relative)
    except FileNotFoundError as error:
        msg = f"{relative} vanished"
        raise SourceChanged(msg, hint="the trainer removed it; the next turn looks again") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            msg = f"{relative} is not a regular file"
            raise SourceChanged(msg, hint="links, sockets and devices are not uploaded")
        if expected is not None and identity_of(status) != expected:
            msg = f"{relative} was written since it was sealed"
            raise SourceChanged(msg, hint="the trainer saved it again; the next turn looks again")
        yield fd
    finally:
        os.close(fd)


def stat_beneath(dir_fd: int, relative: str) -> os.stat_result | None:
    """Return the status of `relative` below `dir_fd` (a symlink itself, not its target); None when absent."""
    parts = check_relative(relative)
    try:
        if len(parts) == 1:
            return os.stat(relative, dir_fd=dir_fd, follow_symlinks=False)
        parent = open_dir_beneath(dir_fd, "/".join(parts[:-1]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    finally:
        os.close(parent)


def is_file(dir_fd: int, name: str) -> bool:
    """Tell whether a name below a folder is a regular file, and no link."""
    status = stat_beneath(dir_fd, name)
    return status is not None and stat.S_ISREG(status.st_mode)


def pread_all(fd: int, *, limit_bytes: int = 64 << 20) -> bytes:
    """Return the whole content of a small file; refuses more than `limit_bytes`."""
    chunks: list[bytes] = []
    offset = 0
    while chunk := os.pread(fd, 1 << 20, offset):
        chunks.append(chunk)
        offset += len(chunk)
        if offset > limit_bytes:
            msg = f"a file that should be small holds more than {limit_bytes} bytes"
            raise RefusedError(msg)
    return b"".join(chunks)


def read_beneath(dir_fd: int, relative: str, *, limit_bytes: int = 64 << 20) -> bytes:
    """Read a small file below `dir_fd`; OSError when absent."""
    fd = open_beneath(dir_fd, relative)
    try:
        return pread_all(fd, limit_bytes=limit_bytes)
    finally:
        os.close(fd)


def ends_whole(dir_fd: int, name: str) -> bool:
    """Tell whether what was written last to a log below `dir_fd` is a whole line, or nothing."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        size = os.fstat(fd).st_size
        return size == 0 or os.pread(fd, 1, size - 1) == b"\n"
    finally:
        os.close(fd)


def fsync_dir(fd: int) -> None:
    """Make the names in a directory durable; EINVAL is tolerated (network file systems that cannot)."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


@contextlib.contextmanager
def _temporary(dir_fd: int, data: bytes, mode: int, mark: str) -> Iterator[str]:
    name = f"{TEMPORARY_PREFIX}{mark}{os.urandom(8).hex()}"
    fd = os.open(name, NEW_FLAGS, mode, dir_fd=dir_fd)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)


def write_atomic(dir_fd: int, name: str, data: bytes, *, mode: int = 0o644, mark: str = "") -> None:
    """Replace a small file: temporary, fsync, rename, fsync of the directory. Old or new, never torn.

    `mark`: begins the temporary's name after the prefix, so that its writer knows it again.
    """
    with _temporary(dir_fd, data, mode, mark) as temporary:
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        fsync_dir(dir_fd)


def create_exclusive(dir_fd: int, name: str, data: bytes, *, mode: int = 0o644, mark: str = "") -> bool:
    """Create a small file that nobody else made; False when the name exists. Never overwrites (P3).

    Link of a finished temporary, so that a reader never sees half of it; where the file system has no
    links, `renameat2(RENAME_NOREPLACE)`, and last O_EXCL. `mark`: as in `write_atomic`.
    """
    with _temporary(dir_fd, data, mode, mark) as temporary:
        try:
            os.link(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EINVAL):
                raise
            return _create_without_link(dir_fd, temporary, name, data, mode)
        fsync_dir(dir_fd)
    return True


def _create_without_link(dir_fd: int, temporary: str, name: str, data: bytes, mode: int) -> bool:
    try:
        rename_noreplace(dir_fd, temporary, dir_fd, name)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        try:
            fd = os.open(name, NEW_FLAGS, mode, dir_fd=dir_fd)
        except FileExistsError:
            return False
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
    fsync_dir(dir_fd)
    return True


def rename_noreplace(src_dir_fd: int, src: str, dst_dir_fd: int, dst: str) -> None:
    """Rename that never replaces; FileExistsError when `dst` is there (`renameat2`, Linux ≥ 3.15)."""
    _renameat2(src_dir_fd, src, dst_dir_fd, dst, 1)


def rename_exchange(src_dir_fd: int, src: str, dst_dir_fd: int, dst: str) -> None:
    """Swap two names at once: neither is absent at any instant."""
    _renameat2(src_dir_fd, src, dst_dir_fd, dst, 2)


def _renameat2(src_dir_fd: int, src: str, dst_dir_fd: int, dst: str, flags: int) -> None:
    if _libc.renameat2(src_dir_fd, os.fsencode(src), dst_dir_fd, os.fsencode(dst), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), src, None, dst)


def rename_new(src_dir_fd: int, src: str, dst_dir_fd: int, dst: str) -> None:
    """Rename a folder to a free name, also where the file system has no such call (NFS, Lustre, FUSE).

    Raises:
        FileExistsError: `dst` is there. What appears between the look and the rename is replaced only if it
            is an empty folder.
    """
    try:
        rename_noreplace(src_dir_fd, src, dst_dir_fd, dst)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        if stat_beneath(dst_dir_fd, dst) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst) from error
        os.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def remove_file(dir_fd: int, name: str) -> None:
    """Unlink one file in an open directory; gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(check_relative(name)[-1], dir_fd=dir_fd)


def remove_tree(dir_fd: int, name: str) -> None:
    """Remove a directory of ours bottom-up by descriptor: no symlink followed, no mount crossed."""
    try:
        fd = open_dir_beneath(dir_fd, name)
    except FileNotFoundError:
        return
    try:
        device = os.fstat(fd).st_dev
        for inner in owned_dirs.list_dir(fd):
            status = os.stat(inner, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                if status.st_dev != device:
                    raise RefusedError(f"{name}/{inner} is a mount point", hint=_MOUNTS)
                remove_tree(fd, inner)
            else:
                os.unlink(inner, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=dir_fd)


# --- directories by their real path ----------------------------------------------------------------------
# What a name was resolved to once may not become a link afterwards. Children are told paths, not descriptors.
# A path is resolved once, here, and opened without following a link in any of its components from then on, so
# that names swapped in between lead nowhere.

_THROUGH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""A directory on the way needs to be searched, not read (mode 0711)."""
_LAST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def real_path(path: str | os.PathLike[str], beneath: str | os.PathLike[str] | None = None) -> str:
    """Return the absolute path without links; with `beneath`, links are resolved in that part alone.

    So a link below (or beside) `beneath` stays in the result, and `opened_real` refuses it.
    """
    if beneath is None:
        return os.path.realpath(path)
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(beneath))
    return os.path.normpath(os.path.join(os.path.realpath(beneath), relative))


@contextlib.contextmanager
def opened_real(path: str) -> Iterator[int]:
    """Open a directory by an absolute path in which nothing is a link.

    Raises:
        OSError: as the kernel says; NotADirectoryError for a link.
    """
    parts = [part for part in os.path.abspath(path).split(os.sep) if part]
    fd = os.open(os.sep, _THROUGH if parts else _LAST)
    try:
        for number, part in enumerate(parts, 1):
            try:
                child = os.open(part, _LAST if number == len(parts) else _THROUGH, dir_fd=fd)
            except OSError as error:
                error.filename = os.sep + os.sep.join(parts[:number])  # its last part alone names no place
                raise
            os.close(fd)
            fd = child
        yield fd
    finally:
        os.close(fd)
