"""Store objects as files on a server (SFTP) or in a service that fsspec knows.

The rules of the contract over a `FileConnection`: uploads become visible whole and replace nothing, each is
read back and compared, small verbs are tried again on a new connection, whatever fails is named.
"""

from __future__ import annotations

import mmap
import secrets
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from ckptd.base import files
from ckptd.errors import CkptdError, RemoteUnreachable, VerifyError
from ckptd.storage.stores.base import (
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
from ckptd.storage.stores.checksums import crc64 as crc64_of
from ckptd.storage.stores.checksums import crc64_combined
from ckptd.storage.stores.directory import is_ours
from ckptd.storage.stores.retrying import briefly
from ckptd.storage.stores.sources import crc64_of as range_crc64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ckptd.storage.stores.base import HeldRange, ResumePoint, Source


# --- the file protocol below the store -------------------------------------------------------------------
# `FilesStore` holds the rules of the contract; a `FileConnection` (SFTP, or a driver of fsspec) does what the
# rules ask, by absolute path. Connections come from a pool, because none is used by two threads at a time.

TEMPORARY_PREFIX = ".ckptd-tmp-"
CONNECTIONS = 8


class ConnectionLost(RemoteUnreachable):
    """A connection that worked broke: one more try on a new one may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name in a folder, or a file that was looked at; bytes, mtime in unix nanoseconds (0 unknown)."""

    name: str
    is_folder: bool
    bytes: int
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Limit the rights of a copy: permission bits of the file and of a new folder for it, and the group."""

    mode: int
    folder_mode: int
    gid: int | None


class OpenFile(Protocol):
    """An open file."""

    def read(self, offset: int, length: int) -> bytes:
        """Read a range; shorter at the end."""
        ...


class Sink(Protocol):
    """A file being written; invisible under its own name until `finish`."""

    def write(self, data: memoryview) -> None:
        """Append."""
        ...

    def copy(self, path: str, offset: int, length: int) -> bool:
        """Have the server append a range of another of its files; False: write those bytes."""
        ...

    def flush(self) -> bool:
        """Make what was written durable; False where only `finish` can."""
        ...

    def finish(self) -> bool:
        """Make the file durable and visible; False when the name is taken: that is never replaced, ours is
        removed.
        """
        ...

    def abandon(self) -> None:
        """Stop; what can be continued stays, all else goes. Raises nothing."""
        ...


class FileConnection(Protocol):
    """One connection. Raises what its library raises; `explain` says it in words of the tree."""

    def probe(self, path: str) -> Abilities:
        """Find out by creating, replacing and removing `path`."""
        ...

    def find_entry(self, path: str) -> Entry | None:
        """Return a regular file; None when there is none."""
        ...

    def entries(self, folder: str) -> list[Entry]:
        """Return the names in a folder, files and folders only; none when it is not there."""
        ...

    def get(self, path: str) -> bytes | None:
        """Return a small file, whole; None when absent."""
        ...

    def reading(self, path: str) -> AbstractContextManager[OpenFile]:
        """Open for ranges; FileNotFoundError."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Create or replace a small file, never half visible."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file; False when it exists."""
        ...

    def sink(self, path: str, partial: str, rights: Rights, resume_bytes: int) -> tuple[Sink, int]:
        """Begin to write; with `resume_bytes` go on there where that much is kept: (sink, offset)."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; gone is fine."""
        ...

    def remove_folder(self, path: str) -> bool:
        """Remove a folder if it is empty; False when it stays."""
        ...

    def free_bytes(self, path: str) -> int | None:
        """Return the free space there; None where nobody tells."""
        ...

    def disk(self, path: str) -> str:
        """Return the id of the file system there, the same by every path to it; "" where nobody tells."""
        ...

    def explain(self, error: Exception, what: str) -> Exception:
        """Translate what was raised into an error of the tree; return a bug as it is."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether the drive may be used again: not after the connection broke or an answer is missing."""
        ...

    def close(self) -> None:
        """End the connection; raises nothing."""
        ...


class Pool:
    """Pool at most `CONNECTIONS` drives, opened when needed, each used by one thread at a time."""

    def __init__(self, connect: Callable[[], FileConnection]) -> None:
        self._connect = connect
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._idle: list[FileConnection] = []

    @contextmanager
    def use(self) -> Iterator[FileConnection]:
        """Yield a drive for the block; what broke is closed, and what idled beside it as well."""
        with self._room:
            with self._lock:
                drive = self._idle.pop() if self._idle else None
            drive = drive or self._connect()
            try:
                yield drive
            finally:
                gone: list[FileConnection] = []
                with self._lock:
                    if drive.is_usable:
                        self._idle.append(drive)
                    else:
                        gone, self._idle = [drive, *self._idle], []
                for each in gone:
                    each.close()

    def close(self) -> None:
        """End the connections that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for drive in idle:
            drive.close()


@contextmanager
def explained(drive: FileConnection, what: str) -> Iterator[None]:
    """Translate errors of calls to the drive in the block into the error tree."""
    try:
        yield
    except CkptdError:
        raise
    except Exception as error:
        named = drive.explain(error, what)
        if named is error:
            raise
        raise named from error


def _worth_copying(held: Sequence[HeldRange]) -> deque[HeldRange]:
    """Return the ranges by offset whose copy takes less than the round trips that it costs."""
    return deque(sorted((one for one in held if one.length >= _COPIED_BYTES), key=lambda one: one.offset))


def _held_at(held: deque[HeldRange], offset: int, end: int) -> tuple[HeldRange | None, int]:
    """Return the range that holds the byte at `offset`, and its end; None: the next one's begin, or `end`.

    Ranges before `offset` are taken away.
    """
    while held and held[0].offset + held[0].length <= offset:
        held.popleft()
    if not held:
        return None, end
    one = held[0]
    return (one, min(one.offset + one.length, end)) if one.offset <= offset else (None, one.offset)


def quietly(action: Callable[[], object]) -> None:
    """Clean up after a failure that is being raised already."""
    with suppress(Exception):
        action()


# --- the store -------------------------------------------------------------------------------------------

_CHUNK_BYTES = 1 << 20
_READ_BYTES = 4 << 20
_COPIED_BYTES = 4 << 20
"""Most that the server is asked to copy at a time: nothing moves meanwhile."""

T = TypeVar("T")


class FilesStore(Store):
    """Store on a folder of a server or a prefix of a service; `owner` keeps two nodes' partials apart.

    Raises (everywhere): RemoteUnreachable (no answer, connection lost), RemoteNotOurs (unknown host key),
    NotPermitted (keys, rights), NoSpaceError, StorageError (the rest), RefusedError (unsafe names).
    """

    def __init__(
        self,
        url: str,
        root: str,
        connect: Callable[[], FileConnection],
        *,
        owner: str = "",
        read_back: bool = True,
        window_bytes: int = WINDOW_BYTES,
        lanes: int = 1,
    ) -> None:
        self._url = url
        self._lanes = lanes
        self._root = root.rstrip("/")
        self._pool = Pool(connect)
        self._owner = owner
        self._read_back = read_back
        self._window_bytes = window_bytes
        self._copies = False

    @property
    def url(self) -> str:
        """Return the URL as configured; secrets are refused in URLs."""
        return self._url

    def close(self) -> None:
        """End idle connections."""
        self._pool.close()

    # --- small objects ---------------------------------------------------------------------------------

    @property
    def lanes(self) -> int:
        """Return how many transfers run at a time: one connection is left for reading back, one for short
        questions.
        """
        return self._lanes

    @property
    def copies(self) -> bool:
        """Whether the server makes ranges of an upload of other files, and the result is read back."""
        return self._copies

    def probe(self) -> Abilities:
        """Find out what the server does, by a small object of ours that is removed again."""
        path = self._path(f"_ckptd/probe~{secrets.token_hex(8)}")
        found = self._call("trying what the server can do", lambda drive: drive.probe(path))
        self._copies = found.copies and self._read_back
        return found if self._read_back else replace(found, notes=(*found.notes, NOT_READ_BACK))

    def get(self, key: str) -> bytes | None:
        """Return a small object, whole; None when absent."""
        path = self._path(key)
        return self._call(f"reading {key}", lambda drive: drive.get(path))

    def put(self, key: str, data: bytes) -> None:
        """Create or replace a small object."""
        path = self._path(key)
        self._call(f"writing {key}", lambda drive: drive.put(path, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create a small object; False when it exists (P3). An answer that was lost is looked up."""
        path = self._path(key)
        asked = 0

        def create(drive: FileConnection) -> bool:
            nonlocal asked
            asked += 1
            return drive.create(path, data) or (asked > 1 and drive.get(path) == data)

        return self._call(f"creating {key}", create)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield objects below the folder `prefix` ("" = all), without temporaries and partial uploads.

        Folder by folder: a walk that leaves out what it cannot read would hide commits.
        """
        base = prefix.rstrip("/")
        folders = [base]
        while folders:
            folder = folders.pop()
            path = self._path(folder) if folder else self._root

            def ask(drive: FileConnection, path: str = path) -> list[Entry]:
                return drive.entries(path)

            for entry in self._call(f"listing {folder or 'the root'}", ask):
                key = f"{folder}/{entry.name}" if folder else entry.name
                if is_ours(entry.name):
                    continue
                if entry.is_folder:
                    folders.append(key)
                else:
                    yield ObjectInfo(key=key, bytes=entry.bytes, mtime_ns=entry.mtime_ns)

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the size and time of an object; None when absent."""
        path = self._path(key)
        found = self._call(f"looking at {key}", lambda drive: drive.find_entry(path))
        return None if found is None else ObjectInfo(key=key, bytes=found.bytes, mtime_ns=found.mtime_ns)

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        """Return a range of an object; shorter at its end."""
        path = self._path(key)

        def read(drive: FileConnection) -> bytes | None:
            try:
                with drive.reading(path) as reader:
                    return reader.read(offset, length)
            except FileNotFoundError:
                return None

        data = self._call(f"reading {key} at {offset}", read)
        if data is None:
            msg = f"{key} is not in {self._url}"
            raise FileNotFoundError(msg)
        return data

    def delete(self, key: str) -> None:
        """Remove an object, then the folders that became empty (never those of `_ckptd` itself)."""
        self._remove(key, self._path(key), f"removing {key}")

    def free_bytes(self) -> int | None:
        """Return the room that the server reports."""
        return self._call("asking for free space", lambda drive: drive.free_bytes(self._root))

    def disk(self) -> str:
        """Return the id of the file system that the server has the remote on; "" where it does not tell."""
        return self._call("asking for its file system", lambda drive: drive.disk(self._root))

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        """Yield a range in pieces; each may come over another connection."""
        while length > 0 and (data := self.read_at(key, offset, min(_READ_BYTES, length))):
            yield data
            offset, length = offset + len(data), length - len(data)

    # --- data ------------------------------------------------------------------------------------------

    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),
    ) -> int:
        """Write beside the name (services: into an unfinished upload), then give it the name."""
        path, what = self._path(key), f"writing {key}"
        rights = Rights(mode=source.mode, folder_mode=source.folder_mode, gid=source.gid)
        wanted = resume.flushed_bytes if resume is not None else 0
        with self._pool.use() as drive:
            with explained(drive, what):
                if drive.find_entry(path) is not None:
                    drive.remove(self._partial(key))
                    raise taken(key)
                sink, start = drive.sink(path, self._partial(key), rights, wanted)
            try:
                crc = resume.crc64 if resume is not None and start else 0
                crc = self._pump(drive, sink, key, source, start, crc, on_progress, _worth_copying(held))
                with explained(drive, what):
                    is_new = sink.finish()
            except BaseException:
                sink.abandon()
                raise
        if not is_new:
            raise taken(key)
        size = source.size_bytes
        on_progress(Progress(done_bytes=size, flushed_bytes=size, crc64=crc))
        return crc

    def verify(self, key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        """Read the copy in ranges and compare; nothing is changed."""
        found = self.stat(key)
        if found is None:
            msg = f"{key} is not in {self._url} after it was sent"
            raise VerifyError(msg, hint="ckptd sends it again")
        crc = self._read_crc(key, on_progress) if self._read_back and found.bytes == size_bytes else crc64
        if (found.bytes, crc) == (size_bytes, crc64):
            return "read-back" if self._read_back else "none"
        raise differs(key, self._url, (found.bytes, crc), (size_bytes, crc64))

    def discard(self, key: str, token: str = "") -> None:  # noqa: ARG002
        """Remove our partial file of that key."""
        self._remove(key, self._partial(key), f"discarding the partial upload of {key}")

    # --- inside ----------------------------------------------------------------------------------------

    def _call(self, what: str, action: Callable[[FileConnection], T]) -> T:
        """Call a drive; a connection that broke meanwhile is replaced and the call repeated (every verb
        allows it).
        """

        def once() -> T:
            with self._pool.use() as drive, explained(drive, what):
                return action(drive)

        return briefly(once, ConnectionLost)()

    def _path(self, key: str) -> str:
        files.check_relative(key)
        return f"{self._root}/{key}"

    def _partial(self, key: str) -> str:
        """Return the path of the partial file beside the object."""
        folder, _, _ = self._path(key).rpartition("/")
        return f"{folder}/{partial_name(self._owner, key)}"

    def _remove(self, key: str, path: str, what: str) -> None:
        """Remove a file and the folders of its key that are empty then, but those of `_ckptd`."""
        parts = key.split("/")[:-1]
        least = 2 if parts and parts[0] == "_ckptd" else 0

        def remove(drive: FileConnection) -> None:
            drive.remove(path)
            for depth in range(len(parts), least, -1):
                if not drive.remove_folder("/".join([self._root, *parts[:depth]])):
                    return

        self._call(what, remove)

    def _pump(
        self,
        drive: FileConnection,
        sink: Sink,
        key: str,
        source: Source,
        start: int,
        crc: int,
        on_progress: Callable[[Progress], None],
        held: deque[HeldRange],
    ) -> int:
        """Pump the source into the sink; returns the CRC64NVME of all bytes as read.

        What is `held` on the server (ranges by offset) is read here all the same, and copied there.
        """
        view = memoryview(mmap.mmap(-1, min(_CHUNK_BYTES, self._window_bytes)))
        size, done, window = source.size_bytes, start, start
        flushed, flushed_crc = start, crc
        while done < size:
            one, end = _held_at(held, done, size)
            if one is not None:
                count = min(end - done, _COPIED_BYTES)
                own = range_crc64(source, done, count)
                with explained(drive, f"copying into {key} at {done}"):
                    is_copied = sink.copy(self._path(one.key), one.key_offset + done - one.offset, count)
                if not is_copied:
                    held.clear()
                    continue
                crc = crc64_combined(crc, own, count)
            else:
                count = source.read_into(done, view[: min(len(view), end - done)])
                if count == 0:
                    raise cut_short(size - done)
                with explained(drive, f"writing {key} at {done}"):
                    sink.write(view[:count])
                crc = crc64_of(view[:count], crc)
            done += count
            if done - window >= self._window_bytes or done == size:
                with explained(drive, f"flushing {key}"):
                    if sink.flush():
                        flushed, flushed_crc = done, crc
                source.drop(window, done - window)
                window = done
            on_progress(Progress(done_bytes=done, flushed_bytes=flushed, crc64=flushed_crc))
        return crc

    def _read_crc(self, key: str, on_progress: Callable[[int], None]) -> int:
        """Return the CRC64NVME of the copy as it comes back."""
        path, what = self._path(key), f"reading {key} back"
        crc = done = 0
        with self._pool.use() as drive, explained(drive, what), drive.reading(path) as reader:
            while data := reader.read(done, _READ_BYTES):
                crc = crc64_of(data, crc)
                done += len(data)
                on_progress(done)
        return crc
