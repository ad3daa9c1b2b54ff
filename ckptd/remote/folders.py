"""Folders of a directory remote by descriptor: made durably, walked without symlinks, pruned when empty.

Apart from directory.py because these rules (rights never wider than the source's, P15; a new folder's name
flushed before anything lies in it) are the same for objects and documents.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.names import ROOT
from ckptd.errors import CkptdError, NotPermitted, RefusedError, SourceChanged, TargetExists, from_os_error
from ckptd.remote.checksums import crc64
from ckptd.remote.store import ObjectInfo, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.remote.store import Source

_OURS = ".ckptd-"
_TRIED = f"{files.TEMPORARY_PREFIX}tried"
_REMEMBERED = 4096
"""Folders whose names are known to be flushed: more than a universal form has, less than grows with days."""
GONE = {
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
    errno.ENETUNREACH,
    errno.ECONNREFUSED,
    errno.ENODEV,
    errno.ESHUTDOWN,
}
"""What a share says whose server is not there."""


def is_ours(name: str) -> bool:
    """True for temporaries and partial uploads, which are no objects."""
    return name.startswith(_OURS)


def copy_rights(fd: int, mode: int, gid: int | None) -> None:
    """Give an open file or folder `mode` and group `gid`; without the group its bits are dropped (P15)."""
    if gid is not None and os.fstat(fd).st_gid != gid:
        with contextlib.suppress(PermissionError, OSError):
            os.fchown(fd, -1, gid)
        if os.fstat(fd).st_gid != gid:
            mode &= ~0o070
    try:
        os.fchmod(fd, mode & 0o777)
    except OSError as error:
        # vfat, some CIFS mounts: rights are the mount's, nobody can change them
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EINVAL):
            raise


def make_parents(
    root: int, key: str, mode: int | None, gid: int | None, flushed: set[tuple[int, int]]
) -> int:
    """Open the folder of `key` below `root`, making what is missing; the caller closes the result.

    `mode` None: as the root itself. A folder's name is flushed before anything is put into it; one that is
    there already may be of a process that was killed before it came to that. `flushed`: folders that the
    caller has seen to (dev, ino), until one is removed: the next may get its inode.
    """
    parts = files.check_relative(key)[:-1]
    current = os.dup(root)
    try:
        for part in parts:
            child = _enter(current, part, key)
            is_new = child is None
            if child is None:
                child = _make(current, part, mode, gid, key)
            status = os.fstat(child)
            if is_new or (status.st_dev, status.st_ino) not in flushed:
                files.fsync_dir(current)
                if len(flushed) >= _REMEMBERED:
                    flushed.clear()
                flushed.add((status.st_dev, status.st_ino))
            os.close(current)
            current = child
    except BaseException:
        os.close(current)
        raise
    return current


def _enter(parent: int, name: str, key: str) -> int | None:
    try:
        child = os.open(name, files.DIR_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        msg = f"{key}: {name} is a symlink or a file"
        raise RefusedError(msg, hint="below the remote's root no symlink is followed") from error
    if os.fstat(child).st_dev != os.fstat(parent).st_dev:
        os.close(child)
        msg = f"{key}: {name} is a mount of its own"
        raise RefusedError(msg, hint="a remote is one file system; let url name the mount")
    return child


def _make(parent: int, name: str, mode: int | None, gid: int | None, key: str) -> int:
    wanted = stat.S_IMODE(os.fstat(parent).st_mode) & 0o777 if mode is None else mode & 0o777
    made = True
    try:
        os.mkdir(name, (wanted | 0o700) & 0o777, dir_fd=parent)
    except FileExistsError:
        made = False
    child = _enter(parent, name, key)
    if child is None:
        msg = f"{key}: {name} was removed while it was made"
        raise RefusedError(msg, hint="another process cleans the remote up; try again")
    if made and mode is not None:
        copy_rights(child, wanted | 0o700, gid)
    return child


def walk(root: int, prefix: str) -> Iterator[ObjectInfo]:
    """Regular files below `prefix` (a folder, "" or ending with `/`), depth first, unordered."""
    base = prefix.rstrip("/")
    try:
        top = files.open_dir_beneath(root, base) if base else os.dup(root)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        yield from _walk(top, f"{base}/" if base else "", os.fstat(top).st_dev)
    finally:
        os.close(top)


def _walk(fd: int, prefix: str, device: int) -> Iterator[ObjectInfo]:
    with os.scandir(fd) as entries:
        names = [entry.name for entry in entries if not is_ours(entry.name)]
    for name in names:
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield ObjectInfo(key=prefix + name, bytes=status.st_size, mtime_ns=status.st_mtime_ns)
        elif stat.S_ISDIR(status.st_mode) and status.st_dev == device:
            try:
                child = os.open(name, files.DIR_FLAGS, dir_fd=fd)
            except FileNotFoundError:
                continue
            try:
                yield from _walk(child, f"{prefix}{name}/", device)
            finally:
                os.close(child)


def temporaries(root: int, prefix: str) -> Iterator[ObjectInfo]:
    """Files whose names begin so, where documents are written: in the root itself, and below `_ckptd`."""
    yield from _named_so(root, "", prefix, is_deep=False)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), files.opened_dir(ROOT, root) as ours:
        yield from _named_so(ours, f"{ROOT}/", prefix, is_deep=True)


def _named_so(fd: int, above: str, prefix: str, *, is_deep: bool) -> Iterator[ObjectInfo]:
    for name in os.listdir(fd):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and name.startswith(prefix):
                yield ObjectInfo(key=above + name, bytes=status.st_size, mtime_ns=status.st_mtime_ns)
            elif is_deep and stat.S_ISDIR(status.st_mode) and status.st_dev == os.fstat(fd).st_dev:
                with files.opened_dir(name, fd) as child:
                    yield from _named_so(child, f"{above}{name}/", prefix, is_deep=True)


def prune_empty(root: int, key: str) -> None:
    """Remove the folders of a removed key that are empty now.

    `_ckptd` and its folders stay: another node may be about to create something there.
    """
    parts = files.check_relative(key)[:-1]
    least = 2 if parts and parts[0] == "_ckptd" else 0
    for depth in range(len(parts), least, -1):
        try:
            parent = files.open_dir_beneath(root, "/".join(parts[: depth - 1])) if depth > 1 else os.dup(root)
        except FileNotFoundError:
            continue
        try:
            os.rmdir(parts[depth - 1], dir_fd=parent)
            files.fsync_dir(parent)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                return
            raise
        finally:
            os.close(parent)


def publish(folder: int, partial: str, name: str, key: str) -> None:
    """Give the finished file its name; what is there already is never replaced."""
    try:
        files.rename_noreplace(folder, partial, folder, name)
    except FileExistsError as error:
        files.remove_file(folder, partial)
        msg = f"{key} appeared while it was sent"
        raise TargetExists(msg, hint="another node shipped it; ckptd compares") from error
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        _publish_by_link(folder, partial, name, key)


def _publish_by_link(folder: int, partial: str, name: str, key: str) -> None:
    try:
        os.link(partial, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError as error:
        files.remove_file(folder, partial)
        msg = f"{key} appeared while it was sent"
        raise TargetExists(msg, hint="another node shipped it; ckptd compares") from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        return
    files.remove_file(folder, partial)


def pump(
    fd: int,
    source: Source,
    begun: tuple[int, int],
    on_progress: Callable[[Progress], None],
    window_bytes: int,
    buffer_bytes: int,
) -> int:
    """Write what follows of a source, one window of it dirty at most; CRC64 of all. `begun`: offset, CRC."""
    view = buffer_of(buffer_bytes)
    size = source.size_bytes
    (done, crc), (flushed, flushed_crc) = begun, begun
    while done < size:
        room = min(len(view), size - done, flushed + window_bytes - done)
        count = source.read_into(done, view[:room])
        if count == 0:
            msg = f"the source ended {size - done} bytes early"
            raise SourceChanged(msg, hint="the trainer cut it; the next turn looks again")
        files.write_all(fd, view[:count])
        # the share writes while the next buffer is read; what counts as flushed is flushed below
        files.start_flush(fd, done, count)
        crc = crc64(view[:count], crc)
        done += count
        if done - flushed >= window_bytes or done == size:
            os.fdatasync(fd)
            files.drop_pages(fd, flushed, done - flushed)
            source.drop(flushed, done - flushed)
            flushed, flushed_crc = done, crc
        on_progress(Progress(done_bytes=done, flushed_bytes=flushed, crc64=flushed_crc))
    return crc


def read_back(fd: int, buffer_bytes: int, on_progress: Callable[[int], None]) -> int:
    """CRC64NVME of a whole file, its pages dropped first so that it comes from the share where it can."""
    files.drop_pages(fd)
    view = buffer_of(buffer_bytes)
    done = crc = 0
    while count := os.preadv(fd, [view], done):
        crc = crc64(view[:count], crc)
        done += count
        # all that was read, not this step alone: a page of 2 MiB goes only as a whole
        files.drop_pages(fd, 0, done)
        on_progress(done)
    return crc


def share_notes(folder: int, name: str) -> tuple[str, ...]:
    """What an NFS server's export may lack, in words, tried with a small file of ours in an open folder."""
    notes = []
    owner = os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid
    if os.geteuid() == 0 and owner != 0:
        notes.append(f"root is squashed there (root_squash): what it writes belongs to uid {owner}")
    second = f"{name}.link"
    try:
        os.link(name, second, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        files.remove_file(folder, second)
    except OSError as error:
        notes.append(
            f"no hard links there ({error.strerror}): names are given by rename or exclusive creation"
        )
    return tuple(notes)


def try_folder(root: int) -> None:
    """Make a folder in the root and remove it.

    One name for all tries: a share that refuses to remove it is left with one, not with one for each.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(_TRIED, dir_fd=root)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(_TRIED, dir_fd=root)


def explained(error: OSError, where: str) -> CkptdError:
    """An error of the share in our words: what is denied to root is denied by a server."""
    if error.errno == errno.EACCES and os.geteuid() == 0:
        msg = f"{where}: {error.strerror}, although ckptd is root: the server squashes root (root_squash)"
        return NotPermitted(msg, hint="run ckptd as the user who trains")
    return from_os_error(error, where)


def buffer_of(size_bytes: int) -> memoryview:
    """Memory that goes back to the system with its last reference, whatever the heap looks like (P12)."""
    return memoryview(mmap.mmap(-1, size_bytes))


def lock_partial(fd: int) -> bool:
    """Lock a partial file; True also where the file system knows no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
