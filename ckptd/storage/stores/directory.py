"""Store objects in a directory (usually a NAS mount): read, hash, write, drop pages, rename, read back.

Every call opens the root anew and compares it with the one first seen, so that an unmounted share is "not
there" instead of an empty folder on the local disk; below the root nothing is reached but by descriptor, no
symlink is followed and no mount crossed. A transfer holds one buffer and at most one window of dirty pages,
and can go on at the last flushed window (docs/internals/stores.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import shlex
import stat
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.base import extents, files, names
from ckptd.base.humanize import user_in_words
from ckptd.base.names import ROOT
from ckptd.base.owned_dirs import list_dir
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NoSpaceError,
    NotPermitted,
    RefusedError,
    RemoteUnreachable,
    StorageError,
    VerifyError,
    from_os_error,
)
from ckptd.storage.stores.base import (
    DOCUMENT_LIMIT_BYTES,
    NOT_READ_BACK,
    WINDOW_BYTES,
    Abilities,
    ObjectInfo,
    Progress,
    Store,
    cut_short,
    differs,
    partial_name,
    taken,
)
from ckptd.storage.stores.checksums import crc64, crc64_combined
from ckptd.storage.stores.retrying import FullStoreMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptd.storage.stores.base import HeldRange, ResumePoint, Source


# --- folders of a directory remote, by descriptor --------------------------------------------------------
# They are made durably, walked without symlinks, removed when empty. These rules (rights never wider than the
# source's; a new folder's name flushed before anything lies in it) are the same for objects and documents.

_OURS = ".ckptd-"
_TRIED = f"{names.TEMPORARY_PREFIX}tried"
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
"""Error numbers of a share whose server is away."""


def is_ours(name: str) -> bool:
    """Whether a name is a temporary's or a partial upload's, which are no objects."""
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
            above, current = current, child
            try:
                status = os.fstat(current)
                if is_new or (status.st_dev, status.st_ino) not in flushed:
                    files.fsync_dir(above)
                    if len(flushed) >= _REMEMBERED:
                        flushed.clear()
                    flushed.add((status.st_dev, status.st_ino))
            finally:
                os.close(above)
    except BaseException:
        os.close(current)
        raise
    return current


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    """Close a descriptor if what is done with it fails: one that stays open keeps a broken disk mounted."""
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


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
    with _closed_on_error(child):
        if os.fstat(child).st_dev != os.fstat(parent).st_dev:
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
        with _closed_on_error(child):
            copy_rights(child, wanted | 0o700, gid)
    return child


def walk(root: int, prefix: str) -> Iterator[ObjectInfo]:
    """Yield regular files below `prefix` (a folder, "" or ending with `/`), depth first, unordered."""
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
    for name in list_dir(fd):
        if is_ours(name):
            continue
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
    """Yield the files whose names begin so, where documents are written: in the root itself, and below
    `_ckptd`.
    """
    yield from _named_so(root, "", prefix, is_deep=False)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), files.opened_dir(ROOT, root) as ours:
        yield from _named_so(ours, f"{ROOT}/", prefix, is_deep=True)


def _named_so(fd: int, above: str, prefix: str, *, is_deep: bool) -> Iterator[ObjectInfo]:
    for name in list_dir(fd):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and name.startswith(prefix):
                yield ObjectInfo(key=above + name, bytes=status.st_size, mtime_ns=status.st_mtime_ns)
            elif is_deep and stat.S_ISDIR(status.st_mode) and status.st_dev == os.fstat(fd).st_dev:
                with files.opened_dir(name, fd) as child:
                    yield from _named_so(child, f"{above}{name}/", prefix, is_deep=True)


def delete_empty_folders(root: int, key: str) -> None:
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
        raise taken(key) from error
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        _publish_by_link(folder, partial, name, key)


def _publish_by_link(folder: int, partial: str, name: str, key: str) -> None:
    try:
        os.link(partial, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError as error:
        files.remove_file(folder, partial)
        raise taken(key) from error
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
    end: int | None = None,
) -> int:
    """Write what follows of a source, one window of it dirty at most; CRC64 of all up to there.

    `begun`: offset, CRC64 of what lies before; `end`: offset to stop at, None: the source's own.
    """
    view = buffer_of(buffer_bytes)
    size = source.size_bytes if end is None else end
    (done, crc), (flushed, flushed_crc) = begun, begun
    while done < size:
        room = min(len(view), size - done, flushed + window_bytes - done)
        count = source.read_into(done, view[:room])
        if count == 0:
            raise cut_short(size - done)
        extents.write_all(fd, view[:count])
        # the share writes while the next buffer is read; what counts as flushed is flushed below
        extents.start_flush(fd, done, count)
        crc = crc64(view[:count], crc)
        done += count
        if done - flushed >= window_bytes or done == size:
            os.fdatasync(fd)
            extents.drop_pages(fd, flushed, done - flushed)
            source.drop(flushed, done - flushed)
            flushed, flushed_crc = done, crc
        on_progress(Progress(done_bytes=done, flushed_bytes=flushed, crc64=flushed_crc))
    return crc


def cloned(
    root: int, fd: int, source: Source, one: HeldRange, begun: tuple[int, int]
) -> tuple[int, int] | None:
    """Share a range, or the whole blocks of it, with the object that holds it; None: nothing is shared here.

    `begun`: offset of the range, and CRC64 of what lies before. Returns the offset to go on at and the CRC64
    of the source up to there, which reading the object back must give; `begun` itself where the object was
    deleted meanwhile, or its disk fails.
    """
    from ckptd.storage.stores.sources import crc64_of

    whole_bytes = one.length // _BLOCK_BYTES * _BLOCK_BYTES
    try:
        twin = files.open_beneath(root, one.key)
    except (OSError, CkptdError):
        return begun
    try:
        if not extents.clone_range(twin, one.key_offset, fd, one.offset, whole_bytes):
            return None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return begun
    finally:
        os.close(twin)
    end = one.offset + whole_bytes
    os.lseek(fd, end, os.SEEK_SET)
    os.fdatasync(fd)
    crc = crc64_of(source, one.offset, whole_bytes, drops=True)
    return end, crc64_combined(begun[1], crc, whole_bytes)


def in_blocks(held: Iterable[HeldRange]) -> Iterator[HeldRange]:
    """Yield the ranges, cut at their beginning to whole blocks, whose blocks a file system could share."""
    for one in sorted(held, key=lambda one: one.offset):
        ahead = -one.offset % _BLOCK_BYTES
        if (one.offset - one.key_offset) % _BLOCK_BYTES == 0 and one.length - ahead >= _LEAST_CLONE_BYTES:
            begin, key_begin = one.offset + ahead, one.key_offset + ahead
            yield replace(one, offset=begin, key_offset=key_begin, length=one.length - ahead)


def read_back(fd: int, buffer_bytes: int, on_progress: Callable[[int], None]) -> int:
    """Return the CRC64NVME of a whole file, its pages dropped first so that it comes from the share where it
    can.
    """
    extents.drop_pages(fd)
    view = buffer_of(buffer_bytes)
    done = crc = 0
    while count := os.preadv(fd, [view], done):
        crc = crc64(view[:count], crc)
        done += count
        # all that was read, not this step alone: a page of 2 MiB goes only as a whole
        extents.drop_pages(fd, 0, done)
        on_progress(done)
    return crc


def share_notes(folder: int, name: str) -> tuple[str, ...]:
    """Say in words what an NFS export lacks, tried with a small file of ours in an open folder."""
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


def explained(error: OSError, where: str, root: str) -> CkptdError:
    """Translate an error of a share, with who may write at `root`: what is denied to root is denied by a
    server.
    """
    plain = from_os_error(error, where)
    if error.errno not in (errno.EACCES, errno.EPERM):
        return plain
    msg, hint, us = plain.message, plain.hint, os.geteuid()
    is_squashed = error.errno == errno.EACCES and us == 0
    if is_squashed:
        msg += ", although ckptd is root: the server squashes root (root_squash)"
        hint = "run ckptd as the user who trains"
    place, quoted = root if os.path.isdir(root) else os.path.dirname(root), shlex.quote(root)
    with contextlib.suppress(OSError):
        status = os.stat(place)
        if os.access(place, os.W_OK | os.X_OK, effective_ids=True):
            return NotPermitted(msg, hint=hint)  # further below
        owner, mode = user_in_words(status.st_uid), stat.S_IMODE(status.st_mode)
        msg += f"; {place} is owned by {owner}, mode {mode:o}, ckptd runs as {user_in_words(us)}"
        if is_squashed:
            hint += f", and let that user write there: on the server, `install -d -o USER {quoted}`"
        elif status.st_uid == us:
            hint = f"`chmod u+wx {shlex.quote(place)}`"
        else:
            hint = f"as root, of a share on its server: `install -d -o {us} {quoted}`"
    return NotPermitted(msg, hint=hint)


def buffer_of(size_bytes: int) -> memoryview:
    """Allocate memory that goes back to the system with its last reference, whatever the heap looks like."""
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


# --- the store -------------------------------------------------------------------------------------------

BUFFER_BYTES = 4 << 20
LANES = 4
_BLOCK_BYTES = 4096
"""Block size of XFS and btrfs; a file system with larger blocks refuses to share such ranges."""
_LEAST_CLONE_BYTES = 1 << 20
_DOCUMENT_MODE = 0o644
_NOT_MOUNTED = "is it mounted? see `ckptd check`"


class DirectoryStore(Store):
    """Store on a directory; `owner` keeps the partial files of two nodes apart.

    Raises (everywhere): RemoteUnreachable (root gone or another one), NotPermitted (EACCES, EROFS),
    NoSpaceError (ENOSPC, EDQUOT), StorageError (EIO, ESTALE and the rest), RefusedError (unsafe names).
    """

    def __init__(
        self,
        root: str,
        *,
        owner: str = "",
        read_back: bool = True,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._path = root
        self._owner = owner
        # of nobody's that names itself alone: such a temporary stays
        self._mark = f"{hashlib.sha256(owner.encode()).hexdigest()[:16]}-" if owner else ""
        self._read_back = read_back
        self._window_bytes = window_bytes
        self._buffer_bytes = min(BUFFER_BYTES, window_bytes)
        self._pinned: tuple[int, int] | None = None
        self._flushed: set[tuple[int, int]] = set()
        self._shares_blocks = read_back
        """False: not between files of this file system, as it showed, or copies are not proved."""
        self._no_room = FullStoreMemory()
        # no lane removes as empty what another is about to put its first file into
        self._folders = threading.Lock()

    @property
    def url(self) -> str:
        """Return the path."""
        return self._path

    @property
    def lanes(self) -> int:
        """Return how many transfers run at a time: a few, as each flush waits for the share."""
        return LANES

    @property
    def copies(self) -> bool:
        """Whether blocks of other objects are shared, and the result is read back."""
        return self._shares_blocks

    def probe(self) -> Abilities:
        """Create, create again, replace, read and remove a small object, and a folder in the root (P19)."""
        with self._at_root("making a folder there") as root:
            try_folder(root)
        key = f"_ckptd/probe~{secrets.token_hex(8)}"
        try:
            created = self.put_if_absent(key, b"1")
            again = self.put_if_absent(key, b"2")
            create_only = created and not again and self.get(key) == b"1"
            with self._folder_of(key, f"trying {key}") as (folder, name):
                notes = share_notes(folder, name)
            self.put(key, b"3")
            if self.get(key) != b"3":
                msg = f"{self._path} does not give back what was written to it"
                raise StorageError(msg, hint="the share lies; do not trust it with checkpoints")
        finally:
            self.delete(key)
        notes += () if self._read_back else (NOT_READ_BACK,)
        return Abilities(create_only=create_only, checksum=None, resumable=True, rename=True, notes=notes)

    def get(self, key: str) -> bytes | None:
        """Return a small object, whole; None when absent.

        Raises:
            DamagedError: a link or a huge file lies there.
        """
        files.check_relative(key)
        with self._at_root(f"reading {key}") as root:
            try:
                return files.read_beneath(root, key, limit_bytes=DOCUMENT_LIMIT_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (RefusedError, IsADirectoryError) as error:
                msg = f"{key} is no document: {error}"
                raise DamagedError(msg, hint="it was changed in the remote") from error

    def put(self, key: str, data: bytes) -> None:
        """Create or replace a small object by rename."""
        with self._folder_of(key, f"writing {key}") as (folder, name):
            files.write_atomic(folder, name, data, mode=_DOCUMENT_MODE, mark=self._mark)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create a small object by link of a finished temporary; False when it exists (P3)."""
        with self._folder_of(key, f"creating {key}") as (folder, name):
            return files.create_exclusive(folder, name, data, mode=_DOCUMENT_MODE, mark=self._mark)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield objects below the folder `prefix` ("" = all), without temporaries and partial uploads."""
        with self._at_root(f"listing {prefix or 'the root'}") as root:
            yield from walk(root, prefix)

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the size and mtime of an object; None when absent or no regular file."""
        with self._at_root(f"looking at {key}") as root:
            status = files.stat_beneath(root, key)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return ObjectInfo(key=key, bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        """Return a range; FileNotFoundError when absent."""
        return b"".join(self.stream(key, offset, length))

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        """Yield a range, its cached pages dropped first so that it comes from the share where it can."""
        end = offset + length
        with self._at_root(f"reading {key}", absent_is_error=True) as root:
            fd = files.open_beneath(root, key)
        try:
            while (count := min(self._buffer_bytes, end - offset)) > 0:
                extents.drop_pages(fd, offset, count)
                data = os.pread(fd, count, offset)
                extents.drop_pages(fd, offset, count)
                yield data
                offset = offset + len(data) if data else end
        except OSError as error:
            raise self._mapped(error, f"reading {key} at {offset}") from error
        finally:
            os.close(fd)

    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        """Write beside the target, flush and drop each window, fsync, rename, fsync the folder.

        What another object holds shares its blocks, where the file system can do that.

        Where there is no room for it, what was written goes: it cannot end, and tombstones need that room.
        """
        if self._no_room.is_in_vain(key, source.size_bytes, self.free_bytes):
            msg = f"{self._path}: writing {key}: {source.size_bytes} bytes have no room there"
            raise NoSpaceError(msg)
        try:
            crc = self._upload(key, source, resume, on_progress, held)
        except NoSpaceError:
            free = None
            with contextlib.suppress(CkptdError):
                free = self.free_bytes()  # before the half object goes
                self.discard(key)
            self._no_room.missed(key, source.size_bytes, free)
            raise
        self._no_room.found(key)
        return crc

    def _upload(
        self,
        key: str,
        source: Source,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange],
    ) -> int:
        name, partial = files.check_relative(key)[-1], partial_name(self._owner, key)
        with self._at_root(f"writing {key}") as root, contextlib.ExitStack() as opened:
            with self._folders:
                folder = make_parents(root, key, source.folder_mode, source.gid, self._flushed)
                opened.callback(os.close, folder)
                fd, start, crc = self._open_partial(folder, partial, resume)
            try:
                sizes = (self._window_bytes, self._buffer_bytes)
                for one in in_blocks(held):
                    if one.offset < start:
                        continue
                    crc = pump(fd, source, (start, crc), on_progress, *sizes, end=one.offset)
                    start = one.offset
                    after = cloned(root, fd, source, one, (start, crc))
                    if after is None:
                        self._shares_blocks = False
                        break
                    start, crc = after
                    on_progress(Progress(done_bytes=start, flushed_bytes=start, crc64=crc))
                crc = pump(fd, source, (start, crc), on_progress, *sizes)
                copy_rights(fd, source.mode, source.gid)
                os.fsync(fd)
                extents.drop_pages(fd)
            finally:
                os.close(fd)
            publish(folder, partial, name, key)
            files.fsync_dir(folder)
        return crc

    def verify(self, key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        """Drop the pages, read the copy, compare; nothing is changed."""
        with self._folder_of(key, f"verifying {key}") as (folder, name):
            try:
                fd = files.open_beneath(folder, name)
            except FileNotFoundError as error:
                msg = f"{key} vanished from {self._path} after it was written"
                raise VerifyError(msg) from error
            try:
                size = os.fstat(fd).st_size
                buffer_bytes = max(self._buffer_bytes // 4, 1)
                found = read_back(fd, buffer_bytes, on_progress) if self._read_back else crc64
            finally:
                os.close(fd)
            if (size, found) == (size_bytes, crc64):
                return "read-back" if self._read_back else "none"
        raise differs(key, self._path, (size, found), (size_bytes, crc64))

    def discard(self, key: str, token: str = "") -> None:  # noqa: ARG002
        """Remove our partial file of that key."""
        about, is_absent = f"discarding the partial upload of {key}", contextlib.suppress(FileNotFoundError)
        with self._at_root(about) as root, self._folders, is_absent:
            self._remove(root, key, partial_name(self._owner, key))

    def delete(self, key: str) -> None:
        """Unlink, then remove the folders that became empty (never those of `_ckptd` itself)."""
        is_absent = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with self._at_root(f"removing {key}") as root, self._folders, is_absent:
            self._remove(root, key, key.rpartition("/")[2], is_flushed=True)
        if not key.startswith(f"{ROOT}/"):
            self._no_room.freed()

    def left_temporaries(self) -> tuple[ObjectInfo, ...]:
        """Return the temporaries of documents of this owner.

        Known by the owner's id in their names: another node's may be in use, however old it looks.
        """
        if not self._mark:
            return ()
        with self._at_root("looking for temporaries") as root:
            return tuple(temporaries(root, f"{names.TEMPORARY_PREFIX}{self._mark}"))

    def partial_bytes(self, key: str) -> int:
        """Return the bytes of our partial file of that key; 0: there is none."""
        parent, _, _ = key.rpartition("/")
        with self._at_root(f"looking at the partial upload of {key}") as root:
            status = files.stat_beneath(
                root,
                f"{parent}/{partial_name(self._owner, key)}" if parent else partial_name(self._owner, key),
            )
        return 0 if status is None else status.st_size

    def flush_name(self, key: str) -> None:
        """Fsync the folder of an object: its writer may have been killed between rename and fsync."""
        with self._folder_of(key, f"flushing {key}") as (folder, _):
            files.fsync_dir(folder)

    def free_bytes(self) -> int | None:
        """Return the bytes that we may still write there."""
        with self._at_root("asking for free space") as root:
            return extents.free_bytes(root)

    # --- inside -----------------------------------------------------------------------------------------

    def _remove(self, root: int, key: str, name: str, *, is_flushed: bool = False) -> None:
        """Remove a file from the folder of `key`, and the folders that are empty then."""
        parent = key.rpartition("/")[0]
        folder = files.open_dir_beneath(root, parent) if parent else os.dup(root)
        try:
            files.remove_file(folder, name)
            if is_flushed:
                files.fsync_dir(folder)
        finally:
            os.close(folder)
        delete_empty_folders(root, key)
        self._flushed.clear()

    @contextlib.contextmanager
    def _at_root(self, doing: str, *, absent_is_error: bool = False) -> Iterator[int]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise self._mapped(error, doing) from error
            msg = f"{self._path} is not there"
            raise RemoteUnreachable(msg, hint=_NOT_MOUNTED) from error
        try:
            status = os.fstat(fd)
            seen = (status.st_dev, status.st_ino)
            if self._pinned not in (None, seen):
                msg = f"{self._path} is another directory than before"
                raise RemoteUnreachable(msg, hint=_NOT_MOUNTED)
            self._pinned = seen
            yield fd
        except FileNotFoundError as error:
            if absent_is_error:
                raise
            raise self._mapped(error, doing) from error
        except OSError as error:
            raise self._mapped(error, doing) from error
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _folder_of(
        self, key: str, doing: str, *, mode: int | None = None, gid: int | None = None
    ) -> Iterator[tuple[int, str]]:
        """Yield the folder of a key, made where missing, and the last component."""
        name = files.check_relative(key)[-1]
        with self._at_root(doing) as root:
            folder = make_parents(root, key, mode, gid, self._flushed)
            try:
                yield folder, name
            finally:
                os.close(folder)

    def _mapped(self, error: OSError, doing: str) -> CkptdError:
        where = f"{self._path}: {doing}"
        if error.errno in GONE:
            return RemoteUnreachable(f"{where}: {error.strerror}")
        return explained(error, where, self._path)

    def _open_partial(self, folder: int, name: str, resume: ResumePoint | None) -> tuple[int, int, int]:
        """Open a partial file; returns (descriptor, offset to go on at, CRC64 so far).

        A file that cannot be continued gets a new inode: a hung predecessor may still hold the old one.
        """
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        if resume is not None and resume.flushed_bytes > 0:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(name, flags, dir_fd=folder)
                with _closed_on_error(fd):
                    if lock_partial(fd) and os.fstat(fd).st_size >= resume.flushed_bytes:
                        os.ftruncate(fd, resume.flushed_bytes)
                        os.lseek(fd, resume.flushed_bytes, os.SEEK_SET)
                        return fd, resume.flushed_bytes, resume.crc64
                os.close(fd)
        files.remove_file(folder, name)
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        lock_partial(fd)
        return fd, 0, 0
