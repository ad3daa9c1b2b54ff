"""Shards that lie on a worker's own disk: read there instead of from the remote, once they are proven.

A file counts only while it is the one whose size and CRC64 the manifest says, whoever wrote it (P2); with any
doubt the remote is read, so that no answer depends on what a disk holds (docs/internals/conversion.md).
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.files import opened_real
from ckptd.config import commands, loader
from ckptd.errors import CkptdError, ConfigError
from ckptd.storage.stores.checksums import crc64, to_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ckptd.base.identity import FileIdentity
    from ckptd.convert.cluster.extents import Place
    from ckptd.convert.cluster.messages import TaskSource

_HASH_BYTES = 1 << 20


def save_dirs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this machine's save_dirs: `CKPTD_SAVE_DIR`, the job of `CKPTD_JOB`, else all configured jobs.

    Raises:
        ConfigError, NotFoundError: `CKPTD_JOB` names none.
    """
    if named := environ.get("CKPTD_SAVE_DIR"):
        return (os.path.realpath(named),)
    if job := environ.get("CKPTD_JOB"):
        return (os.path.realpath(loader.resolve_job(job, environ).save_dir),)
    try:
        jobs = loader.load_all(commands.default_config_dir(environ), environ).jobs
    except (ConfigError, OSError):
        return ()  # what is wrong there is for `ckptd check` to say
    return tuple(dict.fromkeys(os.path.realpath(job.save_dir) for job in jobs))


class LocalShards:
    """The save_dirs of one process, and which files in them are proven. Safe for several threads."""

    def __init__(self, roots: Iterable[str]) -> None:
        self._roots = tuple(roots)
        self._lock = threading.Lock()
        self._proving: dict[tuple[str, str], threading.Lock] = {}
        self._proven: dict[tuple[str, str], dict[FileIdentity, bool]] = {}

    def claims(self, sources: Iterable[TaskSource]) -> tuple[int, ...]:
        """Sources of which a file of the right name and size is here; nothing of it is read."""
        found = []
        for source in sources:
            for root in self._roots:
                fd = self._opened(root, source)
                if fd is not None:
                    os.close(fd)
                    found.append(source.number)
                    break
        return tuple(found)

    def take(self, source: TaskSource, check_stop: Callable[[], None]) -> tuple[int, FileIdentity] | None:
        """An open file that holds the source's bytes, and what it is recognised by; the caller closes it."""
        for root in self._roots:
            fd = self._opened(root, source)
            if fd is None:
                continue
            try:
                identity = files.identity_of(os.fstat(fd))
                if self._is_proven(root, source, fd, identity, check_stop):
                    return fd, identity
            except OSError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        return None

    def _is_proven(
        self, root: str, source: TaskSource, fd: int, identity: FileIdentity, check_stop: Callable[[], None]
    ) -> bool:
        """Hashed once by whoever comes first, as long as it stays the same file."""
        key = f"{root}/{source.local}", source.crc64
        with self._lock:
            lock = self._proving.setdefault(key, threading.Lock())
        with lock:
            known = self._proven.setdefault(key, {})
            if identity not in known:
                crc = at = 0
                while block := os.pread(fd, _HASH_BYTES, at):
                    check_stop()
                    crc, at = crc64(block, crc), at + len(block)
                is_same = files.identity_of(os.fstat(fd)) == identity
                known.clear()
                known[identity] = is_same and at == source.bytes and to_hex(crc) == source.crc64
            return known[identity]

    def _opened(self, root: str, source: TaskSource) -> int | None:
        if not source.local or not source.crc64:
            return None
        with suppress(OSError, CkptdError), opened_real(root) as root_fd:
            fd = files.open_beneath(root_fd, source.local)
            if os.fstat(fd).st_size == source.bytes:
                return fd
            os.close(fd)
        return None


class LocalPlace:
    """Sources on this worker's disk where they are proven, else of `other`; for one task."""

    def __init__(self, shelf: LocalShards, other: Place, check_stop: Callable[[], None]) -> None:
        self._shelf = shelf
        self._other = other
        self._check_stop = check_stop
        self._lock = threading.Lock()
        self._files: dict[int, tuple[int, FileIdentity] | None] = {}
        self.local_bytes = 0

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """Return those bytes from the local disk, else from the other place; raises as `Place.fetch`."""
        data = self._own(source, offset, nbytes)
        if data is None:
            return self._other.fetch(source, offset, nbytes)
        with self._lock:
            self.local_bytes += nbytes
        return data

    def _own(self, source: TaskSource, offset: int, nbytes: int) -> bytes | None:
        with self._lock:
            if source.number not in self._files:
                self._files[source.number] = self._shelf.take(source, self._check_stop)
            found = self._files[source.number]
        if found is None:
            return None
        fd, identity = found
        try:
            data = os.pread(fd, nbytes, offset)
            # looked at after the bytes: what was written meanwhile is not what was proven
            is_same = files.identity_of(os.fstat(fd)) == identity
        except OSError:
            return None
        return data if is_same and len(data) == nbytes else None

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            found = self._files.popitem()[1]
            if found is not None:
                os.close(found[0])
