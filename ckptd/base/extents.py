"""Work on ranges of open files: share extents, copy inside the kernel, keep the page cache small.

Everything here takes descriptors that `ckptd.base.files` opened; nothing here opens or names a file.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

from ckptd.errors import SourceChanged

FICLONE = 0x40049409
FICLONERANGE = 0x4020940D
_SYNC_WRITE = 2
_SYNC_WRITE_AND_WAIT = 1 | 2 | 4
_CACHESTAT = 451
_MINCORE_BYTES = 256 << 20
_MOST_RUNS = 10_000
_ONLY_LOWEST_BIT = bytes(n & 1 for n in range(256))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def identity_of(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """Return what tells a source from any other file: dev, ino, size, mtime_ns, ctime_ns.

    A tuple: restricted children start without the pydantic model of `base.identity`.
    """
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def clone_file(src_fd: int, dst_fd: int) -> bool:
    """Share all extents of `src_fd` with the empty file `dst_fd`; False where the file system cannot."""
    try:
        fcntl.ioctl(dst_fd, FICLONE, src_fd)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM):
            return False
        raise
    return True


def clone_range(src_fd: int, src_offset: int, dst_fd: int, dst_offset: int, length: int) -> bool:
    """Share the extents of one block-aligned range (FICLONERANGE); False where it cannot be done."""
    argument = (
        src_fd.to_bytes(8, "little", signed=True)
        + src_offset.to_bytes(8, "little")
        + length.to_bytes(8, "little")
        + dst_offset.to_bytes(8, "little")
    )
    try:
        fcntl.ioctl(dst_fd, FICLONERANGE, argument)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM):
            return False
        raise
    return True


def copy_range(src_fd: int, src_offset: int, dst_fd: int, dst_offset: int, length: int) -> None:
    """Copy bytes inside the kernel where it can (`copy_file_range`), else through a 1 MiB buffer.

    Raises:
        SourceChanged: the source ends before `length` bytes.
    """
    done = 0
    in_kernel = True
    while done < length:
        count = 0
        if in_kernel:
            try:
                count = os.copy_file_range(
                    src_fd, dst_fd, length - done, offset_src=src_offset + done, offset_dst=dst_offset + done
                )
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                in_kernel = False
                continue
        else:
            data = os.pread(src_fd, min(1 << 20, length - done), src_offset + done)
            count = os.pwrite(dst_fd, data, dst_offset + done) if data else 0
        if count == 0 and in_kernel:
            in_kernel = False  # some file systems answer 0 where they cannot
            continue
        if count == 0:
            msg = f"a source ended {length - done} bytes early"
            raise SourceChanged(msg)
        done += count


def allocate(fd: int, nbytes: int) -> None:
    """Reserve the blocks of a file that will have `nbytes`; nothing where the file system cannot.

    Raises:
        OSError: there is no room for them.
    """
    if _libc.fallocate(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write everything: a full disk or a quota takes a part first, and only then says so.

    Raises:
        OSError: as the kernel says.
    """
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def extent_at(fd: int, offset: int, length: int) -> tuple[bool, int]:
    """Whether a hole of the file begins at `offset`, and how far hole or data reach, at most `length`.

    File systems that know no holes say that all is data. `offset + length` must lie inside the file.
    """
    try:
        data = os.lseek(fd, offset, os.SEEK_DATA)
        if data > offset:
            return True, min(length, data - offset)
        return False, min(length, os.lseek(fd, offset, os.SEEK_HOLE) - offset)
    except OSError as error:
        return error.errno == errno.ENXIO, length  # ENXIO: no data up to the end of the file


def flush_range(fd: int, offset: int, length: int) -> None:
    """Write back the dirty pages of a range and wait (no metadata: not durability, only bounded memory).

    Raises:
        OSError: they could not be written. The kernel says so once: no later fsync of `fd` would.
    """
    failed = _libc.sync_file_range(
        ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_WRITE_AND_WAIT)
    )
    if failed and (code := ctypes.get_errno()) != errno.ENOSYS:
        raise OSError(code, os.strerror(code))


def start_flush(fd: int, offset: int = 0, length: int = 0) -> None:
    """Start writing back the dirty pages of a range (`length` 0: to the end), and do not wait.

    A later fsync, or `flush_range`, finds little to do.
    """
    _libc.sync_file_range(
        ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(_SYNC_WRITE)
    )


def cached_bytes(fd: int, offset: int = 0, length: int = 0) -> int | None:
    """Return how many bytes of a range (`length` 0: to the end) are in the page cache, by whole pages.

    None where the kernel cannot say (`cachestat`, Linux ≥ 6.5).
    """
    whole = (ctypes.c_uint64 * 2)(offset, length)
    counts = (ctypes.c_uint64 * 5)()
    if _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), whole, counts, ctypes.c_uint(0)) != 0:
        return None
    return int(counts[0]) * os.sysconf("SC_PAGE_SIZE")


def cached_runs(fd: int, size_bytes: int) -> tuple[tuple[int, int], ...]:
    """Byte ranges [begin, end) of a file that lie in the page cache, by `mincore`, in order.

    Page granular; of a file whose pages lie scattered in more than 10,000 runs the rest counts by windows of
    256 MiB. Empty where the kernel does not say: it hides the pages of files that we could not write.
    """
    if not _may_ask(fd):
        return ()
    page = os.sysconf("SC_PAGE_SIZE")
    runs: list[tuple[int, int]] = []
    for offset in range(0, size_bytes, _MINCORE_BYTES):
        length = min(_MINCORE_BYTES, size_bytes - offset)
        pages = _resident(fd, offset, length)
        if len(runs) > _MOST_RUNS:
            pages = (b"\1" if b"\1" in pages else b"\0") * len(pages)
        at = 0
        while (begin := pages.find(b"\1", at)) >= 0:
            at = pages.find(b"\0", begin)
            at = len(pages) if at < 0 else at
            run = (offset + begin * page, offset + at * page)
            if runs and runs[-1][1] == run[0]:
                runs[-1] = (runs[-1][0], run[1])
            else:
                runs.append(run)
    return tuple(runs)


def _resident(fd: int, offset: int, length: int) -> bytes:
    """Return one byte per page, 1: in the page cache; all 0 where it cannot be mapped."""
    page = os.sysconf("SC_PAGE_SIZE")
    vector = ctypes.create_string_buffer(-(-length // page))
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        return bytes(len(vector))
    try:
        if _libc.mincore(address, length, vector) != 0:
            return bytes(len(vector))
    finally:
        _libc.munmap(address, length)
    return vector.raw.translate(_ONLY_LOWEST_BIT)


def _may_ask(fd: int) -> bool:
    """Whether `mincore` tells the truth of this file: to others it says that everything is cached."""
    if os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def drop_pages_but(fd: int, kept: tuple[tuple[int, int], ...], offset: int, length: int) -> None:
    """Drop a range from the page cache but for the page-aligned ranges `kept` (in order), whole pages at both
    ends.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    at, end = offset // page * page, -(-(offset + length) // page) * page
    index = bisect.bisect_right(kept, at, key=lambda run: run[1])
    while at < end:
        begin, last = kept[index] if index < len(kept) else (end, end)
        if at < begin:
            drop_pages(fd, at, min(begin, end) - at)
        at, index = max(at, last), index + 1


def drop_pages(fd: int, offset: int = 0, length: int = 0) -> None:
    """Ask the kernel to forget clean cached pages of a range (`length` 0: to the end)."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write everything, whatever the kernel takes at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def mount_of(fd: int) -> str:
    """Return which mount a descriptor lies on; empty where the kernel does not tell.

    A bind mount of the same file system has its device number and is another place all the same.
    """
    try:
        info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        lines = os.read(info, 4096).decode().splitlines()
    finally:
        os.close(info)
    return next((line for line in lines if line.startswith("mnt_id:")), "")


def free_bytes(fd: int) -> int:
    """Return the bytes that an ordinary user may still write on the file system of `fd`."""
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
