"""Fetch committed bytes: ranges in parallel, CRC64 compared, written under a temporary name, renamed.

A file gets its name in staging only when its bytes are those that were committed, so a resume that was killed
goes on with the files that are missing, and no file with holes is taken for one. Memory is a chunk per lane,
dirty pages a few MiB per lane.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptd.base import extents, files, names
from ckptd.base.names import NAME_BYTES
from ckptd.base.owned_dirs import list_dir
from ckptd.errors import DamagedError, RefusedError, from_os_error
from ckptd.storage.stores import parallel
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.parallel import FailFastPool, LaneStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.core.model.manifest import ManifestFile
    from ckptd.recover.select.copies import Copy
    from ckptd.storage.stores.base import Store

BUFFER_BYTES = 8 << 20
RANGE_BYTES = 32 << 20
PARALLEL = 4
AHEAD = 2


@dataclass(slots=True, eq=False)
class _Incoming:
    """A file that is being written under a name of ours; `found`: bytes and CRC64 of ranges, by offset."""

    file: ManifestFile
    folder: int
    out: int
    name: str
    found: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def partial(self) -> str:
        """Return the file's name until it is whole; a digest where the name leaves no room for the prefix."""
        name = f"{names.TEMPORARY_PREFIX}{self.name}"
        if len(os.fsencode(name)) <= NAME_BYTES:
            return name
        return names.TEMPORARY_PREFIX + hashlib.sha256(self.name.encode()).hexdigest()

    @property
    def offsets(self) -> range:
        """Return where its ranges begin; an empty file has one."""
        return range(0, max(self.file.bytes, 1), RANGE_BYTES)


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
        self._lanes = FailFastPool()
        self._open: set[_Incoming] = set()
        self._sizes: dict[str, int] = {}
        self._folder_mode = stat.S_IMODE(os.fstat(staging_fd).st_mode) & 0o777

    def missing_bytes(self) -> int:
        """Return the bytes that are not staged yet."""
        return sum(file.bytes for file in self._copy.files if not self._is_staged(file))

    def drop_others(self) -> None:
        """Remove what an earlier attempt staged for other ranks: the folder is put in place as it is."""
        self._drop_others(self._staging_fd, "", {file.path for file in self._copy.files})

    def _drop_others(self, fd: int, head: str, wanted: set[str]) -> None:
        for name in list_dir(fd):
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
        self._list()
        lanes = self._copy.remote.store.lanes
        try:
            self._lanes.run(max(lanes, 1), self._work(), self._range, name="fetch")
        finally:
            for incoming in tuple(self._open):
                self._drop(incoming)
        files.make_folders(self._staging_fd, self._copy.empty_folders, mode=self._folder_mode)
        self._sync_folders()

    def _list(self) -> None:
        """List sizes in one pass: a question for each of thousands of files costs minutes on S3."""
        if len(self._copy.files) > 1:
            folder = f"{self._copy.view.commit.folder}/"
            self._sizes = {info.key: info.bytes for info in self._copy.remote.store.list(folder)}

    def _work(self) -> Iterator[tuple[_Incoming, int]]:
        """Yield every range of every missing file, in order; a file is opened when its first range is due."""
        for file in self._copy.files:
            if self._is_staged(file):
                self._count(file.bytes)
                continue
            try:
                incoming = self._begin(file)
            except OSError as error:
                raise from_os_error(error, f"fetching {file.path}") from error
            yield from ((incoming, offset) for offset in incoming.offsets)

    def _begin(self, file: ManifestFile) -> _Incoming:
        head, _, base = file.path.rpartition("/")
        folder = (
            files.open_dir_beneath(self._staging_fd, head, create_mode=self._folder_mode)
            if head
            else os.dup(self._staging_fd)
        )
        incoming = _Incoming(file=file, folder=folder, out=-1, name=base)
        with self._lock:
            self._open.add(incoming)
        files.remove_file(folder, incoming.partial)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        incoming.out = os.open(incoming.partial, flags, 0o600, dir_fd=folder)
        if file.bytes:
            extents.allocate(incoming.out, file.bytes)
        return incoming

    def _range(self, piece: tuple[_Incoming, int]) -> None:
        incoming, offset = piece
        file = incoming.file
        try:
            found = self._receive(incoming, offset)
            with self._lock:
                incoming.found[offset] = found
                is_last = len(incoming.found) == len(incoming.offsets)
            if is_last:
                self._finish(incoming)
        except FileNotFoundError as error:
            msg = f"{file.key} is gone from {self._copy.remote.name}"
            raise DamagedError(msg, hint="this copy cannot be restored") from error
        except RefusedError as error:
            raise DamagedError(error.message, hint="this copy cannot be restored") from error
        except OSError as error:
            raise from_os_error(error, f"fetching {file.path}") from error

    def _receive(self, incoming: _Incoming, begin: int) -> tuple[int, int]:
        """Write one range into its place; returns its bytes and CRC64."""
        file = incoming.file

        def told(count: int) -> None:
            self._lanes.check()
            self._count(count)

        length = min(RANGE_BYTES, file.bytes - begin)
        return self._copy.remote.store.write_range(file.key, begin, length, incoming.out, told)

    def _finish(self, incoming: _Incoming) -> None:
        """Compare a file whose ranges are all there, make it durable, and give it its name."""
        file, where = incoming.file, self._copy.remote
        done, crc = parallel.joined(file.bytes, [incoming.found[n] for n in incoming.offsets], RANGE_BYTES)
        held = self._sizes.get(file.key)
        if held is None and done == file.bytes:
            info = where.store.stat(file.key)
            held = None if info is None else info.bytes
        if done != file.bytes or held != file.bytes:
            found = held if held is not None else done
            msg = f"{file.key} on {where.name} has {found} bytes, committed were {file.bytes}"
            raise DamagedError(msg, hint="this copy cannot be restored")
        if to_hex(crc) != file.checksums.crc64nvme:
            msg = (
                f"{file.key} on {where.name} is damaged: CRC64 {to_hex(crc)}, "
                f"committed was {file.checksums.crc64nvme}"
            )
            raise DamagedError(msg, hint="this copy cannot be restored; see `ckptd list`")
        os.fchmod(incoming.out, file.mode & 0o777)
        if file.mtime_ns:
            os.utime(incoming.out, ns=(file.mtime_ns, file.mtime_ns))
        os.fsync(incoming.out)
        extents.drop_pages(incoming.out)
        os.rename(incoming.partial, incoming.name, src_dir_fd=incoming.folder, dst_dir_fd=incoming.folder)
        self._close(incoming)

    def _close(self, incoming: _Incoming) -> None:
        with self._lock:
            self._open.discard(incoming)
        if incoming.out >= 0:
            os.close(incoming.out)
        os.close(incoming.folder)

    def _drop(self, incoming: _Incoming) -> None:
        """Remove a file that did not become whole: it may have holes."""
        try:
            files.remove_file(incoming.folder, incoming.partial)
        finally:
            self._close(incoming)

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
    store: Store, file: ManifestFile, told: Callable[[int], None], stop: threading.Event
) -> tuple[int, int]:
    """Read an object in ranges, `told(bytes)` of each chunk. Returns bytes read and their CRC64NVME.

    Reads no further than the manifest says; ends early at the object's end.

    Raises:
        DamagedError: what lies there is a link or no object at all.
        Stopped: `stop` was set.
    """

    def tell(count: int) -> None:
        if stop.is_set():
            msg = f"reading {file.key} was stopped"
            raise LaneStopped(msg)
        told(count)

    try:
        return parallel.crc_of(
            partial(store.stream, file.key), file.bytes, tell, at_once=AHEAD, range_bytes=RANGE_BYTES
        )
    except RefusedError as error:
        raise DamagedError(error.message, hint="this copy cannot be restored") from error


def _prefixes(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def read_whole(store: Store, file: ManifestFile) -> bytes:
    """Return a small committed file, compared with its checksum.

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
