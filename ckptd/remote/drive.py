"""The seam between a store of remote files and what speaks a protocol: SFTP, or a driver of fsspec.

`FilesStore` (fsspec_store.py) holds the rules of the contract; a `Drive` is one connection that does what the
rules ask, by absolute path. Drives come from a pool, because none is used by two threads at a time.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptd.errors import CkptdError, RemoteUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ckptd.remote.store import Abilities

PARTIAL_PREFIX = ".ckptd-part-"
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
    """What a copy may get at most: permission bits of the file and of a new folder for it, and the group."""

    mode: int
    folder_mode: int
    gid: int | None


class Reader(Protocol):
    """An open file."""

    def read(self, offset: int, length: int) -> bytes:
        """A range; shorter at the end."""
        ...


class Sink(Protocol):
    """A file being written; invisible under its own name until `finish`."""

    def write(self, data: memoryview) -> None:
        """Append."""
        ...

    def flush(self) -> bool:
        """Make what was written durable; False where only `finish` can."""
        ...

    def finish(self) -> bool:
        """Durable and visible; False when the name is taken: that is never replaced, ours is gone."""
        ...

    def abandon(self) -> None:
        """Stop; what can be continued stays, all else goes. Raises nothing."""
        ...


class Drive(Protocol):
    """One connection. Raises what its library raises; `explain` says it in words of the tree."""

    def probe(self, path: str) -> Abilities:
        """Find out by creating, replacing and removing `path`."""
        ...

    def look(self, path: str) -> Entry | None:
        """A regular file; None when there is none."""
        ...

    def entries(self, folder: str) -> list[Entry]:
        """Names in a folder, files and folders only; none when it is not there."""
        ...

    def get(self, path: str) -> bytes | None:
        """A small file, whole; None when absent."""
        ...

    def reading(self, path: str) -> AbstractContextManager[Reader]:
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
        """Room there; None where nobody tells."""
        ...

    def explain(self, error: Exception, what: str) -> Exception:
        """What was raised, as an error of the tree; a bug as it is."""
        ...

    @property
    def is_usable(self) -> bool:
        """False after the connection broke or an answer is missing."""
        ...

    def close(self) -> None:
        """End the connection; raises nothing."""
        ...


class Pool:
    """At most `CONNECTIONS` drives, opened when needed, each used by one thread at a time."""

    def __init__(self, connect: Callable[[], Drive]) -> None:
        self._connect = connect
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._idle: list[Drive] = []

    @contextmanager
    def use(self) -> Iterator[Drive]:
        """A drive for the block; what broke is closed, and what idled beside it as well."""
        with self._room:
            with self._lock:
                drive = self._idle.pop() if self._idle else None
            drive = drive or self._connect()
            try:
                yield drive
            finally:
                gone: list[Drive] = []
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
def explained(drive: Drive, what: str) -> Iterator[None]:
    """Calls to the drive in the block fail in words of the tree."""
    try:
        yield
    except CkptdError:
        raise
    except Exception as error:
        named = drive.explain(error, what)
        if named is error:
            raise
        raise named from error


def quietly(action: Callable[[], object]) -> None:
    """Clean up after a failure that is being raised already."""
    with suppress(Exception):
        action()
