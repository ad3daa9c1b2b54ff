"""Bringing committed bytes back: read in windows, CRC64 compared with the manifest, written beside, renamed.

A file gets its name in staging only when its bytes are those that were committed, so a resume that was
killed goes on with the files that are missing. Memory is a few buffers, dirty pages one window (P12).
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.errors import CkptdError, DamagedError, RefusedError, from_os_error
from ckptd.remote.checksums import crc64, to_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.core.manifest import ManifestFile
    from ckptd.recover.choose import Copy
    from ckptd.remote.store import Store

BUFFER_BYTES = 8 << 20
WINDOW_BYTES = 64 << 20
PARALLEL = 4
AHEAD = 2


class Fetcher:
    """Fetches the files of one committed form into an open, empty or half-filled staging folder.

    `on_progress(bytes_done, bytes_total)` is called from the workers' threads.
    """

    def __init__(
        self, copy: Copy, staging_fd: int, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._copy = copy
        self._staging_fd = staging_fd
        self._on_progress = on_progress
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._folder_mode = stat.S_IMODE(os.fstat(staging_fd).st_mode) & 0o777

    def missing_bytes(self) -> int:
        """Bytes that are not staged yet."""
        return sum(file.bytes for file in self._copy.files if not self._is_staged(file))

    def drop_others(self) -> None:
        """Remove what an earlier attempt staged for other ranks: the folder is put in place as it is."""
        self._drop_others(self._staging_fd, "", {file.path for file in self._copy.files})

    def _drop_others(self, fd: int, head: str, wanted: set[str]) -> None:
        for name in os.listdir(fd):
            path = f"{head}{name}"
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                with files.opened_dir(name, fd) as inner:
                    self._drop_others(inner, f"{path}/", wanted)
            elif path not in wanted:
                files.remove_file(fd, name)

    def run(self) -> None:
        """Fetch everything that is missing, durable when it returns.

        Raises:
            DamagedError: bytes differ from the manifest, or an object is gone; names file and remote.
            RemoteUnreachable, NoSpaceError, StorageError: as they say.
        """
        if self._copy.remote.store.get(self._copy.view.key) is None:
            msg = f"the COMMIT of {self._copy.view.commit.tag} vanished from {self._copy.remote.name}"
            raise DamagedError(msg, hint="retention removed it meanwhile; an older or newer one is taken")
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="fetch") as pool:
            futures = [pool.submit(self._one, file) for file in self._copy.files]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop.set()
                raise
        self._sync_folders()

    def _one(self, file: ManifestFile) -> None:
        if self._stop.is_set():
            return
        if self._is_staged(file):
            self._count(file.bytes)
            return
        try:
            self._fetch(file)
        except FileNotFoundError as error:
            msg = f"{file.key} is gone from {self._copy.remote.name}"
            raise DamagedError(msg, hint="this copy cannot be restored") from error
        except OSError as error:
            raise from_os_error(error, f"fetching {file.path}") from error

    def _fetch(self, file: ManifestFile) -> None:
        head, _, base = file.path.rpartition("/")
        folder = (
            files.open_dir_beneath(self._staging_fd, head, create_mode=self._folder_mode)
            if head
            else os.dup(self._staging_fd)
        )
        partial = f"{files.TEMPORARY_PREFIX}{base}"
        try:
            files.remove_file(folder, partial)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            out = os.open(partial, flags, 0o600, dir_fd=folder)
            try:
                self._copy_bytes(file, out)
                os.fchmod(out, file.mode & 0o777)
                if file.mtime_ns:
                    os.utime(out, ns=(file.mtime_ns, file.mtime_ns))
                os.fsync(out)
            finally:
                os.close(out)
            os.rename(partial, base, src_dir_fd=folder, dst_dir_fd=folder)
        except (CkptdError, OSError):
            files.remove_file(folder, partial)
            raise
        finally:
            os.close(folder)

    def _copy_bytes(self, file: ManifestFile, out: int) -> None:
        store = self._copy.remote.store
        flushed = 0

        def write(data: bytes, end: int) -> None:
            nonlocal flushed
            files.write_all(out, data)
            self._count(len(data))
            if end - flushed >= WINDOW_BYTES:
                os.fdatasync(out)
                files.drop_pages(out, flushed, end - flushed)
                flushed = end

        done, crc = read_through(store, file, write, self._stop)
        held = store.stat(file.key) if done == file.bytes else None
        if done != file.bytes or held is None or held.bytes != file.bytes:
            found = held.bytes if held is not None else done
            msg = f"{file.key} on {self._copy.remote.name} has {found} bytes, committed were {file.bytes}"
            raise DamagedError(msg, hint="this copy cannot be restored")
        if to_hex(crc) != file.checksums.crc64nvme:
            msg = (
                f"{file.key} on {self._copy.remote.name} is damaged: CRC64 {to_hex(crc)}, "
                f"committed was {file.checksums.crc64nvme}"
            )
            raise DamagedError(msg, hint="this copy cannot be restored; see `ckptd list`")

    def _is_staged(self, file: ManifestFile) -> bool:
        status = files.stat_beneath(self._staging_fd, file.path)
        return status is not None and stat.S_ISREG(status.st_mode) and status.st_size == file.bytes

    def _count(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            if self._on_progress is not None:
                self._on_progress(self._done_bytes, self._copy.bytes)

    def _sync_folders(self) -> None:
        heads = {file.path.rpartition("/")[0] for file in self._copy.files}
        folders = {prefix for head in heads if head for prefix in _prefixes(head)}
        for folder in sorted(folders, key=len, reverse=True):
            fd = files.open_dir_beneath(self._staging_fd, folder)
            try:
                files.fsync_dir(fd)
            finally:
                os.close(fd)
        files.fsync_dir(self._staging_fd)


def read_through(
    store: Store, file: ManifestFile, take: Callable[[bytes, int], None], stop: threading.Event
) -> tuple[int, int]:
    """Read an object in buffers; `take(data, end)` each. Returns bytes read and their CRC64NVME.

    Reads no further than the manifest says; ends early at the object's end or when `stop` is set.

    Raises:
        DamagedError: what lies there is a link or no object at all.
    """
    done = crc = 0
    try:
        for wanted, data in _ranges(store, file, stop):
            crc = crc64(data, crc)
            done += len(data)
            take(data, done)
            if len(data) < wanted:
                break
    except RefusedError as error:
        raise DamagedError(error.message, hint="this copy cannot be restored") from error
    return done, crc


def _ranges(store: Store, file: ManifestFile, stop: threading.Event) -> Iterator[tuple[int, bytes]]:
    """(bytes asked for, bytes) of each range in order, the next ones being read meanwhile.

    One stream of an object store is slow and a checkpoint has few, big files; at most `AHEAD` buffers a file.
    """

    def read(offset: int) -> bytes:
        return b"" if stop.is_set() else store.read_at(file.key, offset, length_at(offset))

    def length_at(offset: int) -> int:
        return min(BUFFER_BYTES, file.bytes - offset)

    offsets = range(0, file.bytes, BUFFER_BYTES)
    if len(offsets) < 2:
        yield from ((length_at(offset), read(offset)) for offset in offsets)
        return
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="range") as pool:
        coming: deque[tuple[int, Future[bytes]]] = deque()
        try:
            for offset in offsets:
                coming.append((length_at(offset), pool.submit(read, offset)))
                if len(coming) == AHEAD:
                    wanted, future = coming.popleft()
                    yield wanted, future.result()
            while coming:
                wanted, future = coming.popleft()
                yield wanted, future.result()
        finally:
            for _, future in coming:
                future.cancel()


def _prefixes(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def read_whole(store: Store, file: ManifestFile) -> bytes:
    """A small committed file, compared with its checksum.

    Raises:
        DamagedError: it differs.
    """
    try:
        data = store.read_at(file.key, 0, file.bytes) if file.bytes else b""
    except FileNotFoundError as error:
        msg = f"{file.key} is gone"
        raise DamagedError(msg) from error
    if len(data) != file.bytes or to_hex(crc64(data)) != file.checksums.crc64nvme:
        msg = f"{file.key} is not what was committed"
        raise DamagedError(msg)
    return data
