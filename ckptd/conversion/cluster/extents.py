"""Read the sources of one task in blocks, each once: from the remote, a shared folder, or the worker's disk.

A task knows beforehand all that it will read. So blocks begin and end where its own ranges do, instead of on
a grid: what crosses the network is what is needed, and gaps too small to be worth a request.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from ckptd.base import files
from ckptd.base.files import opened_real
from ckptd.config import commands, loader
from ckptd.conversion.cluster.messages import Extent
from ckptd.conversion.reader import Ranges
from ckptd.errors import CkptdError, ConfigError, SourceChanged
from ckptd.storage.stores.checksums import crc64, crc64_combined, to_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckptd.base.identity import FileIdentity
    from ckptd.conversion.cluster.messages import TaskSource
    from ckptd.conversion.parts import Range
    from ckptd.storage.stores.base import Store


GAP_BYTES = 64 << 10
MOST_BLOCK_BYTES = 1 << 20
LEAST_BLOCK_BYTES = 16 << 10
MOST_RUN_BYTES = 16 << 20
"""Longest range of one reported CRC64; the command hashes again what two tasks read in part."""

Spans = dict[int, list[tuple[int, int]]]
"""Source → begin and end of each range that is read, in order."""


def spans_of(ranges: Iterable[Range]) -> Spans:
    """Ranges of the plan as they are."""
    found: Spans = {}
    for r in ranges:
        if r.nbytes:
            found.setdefault(r.source, []).append((r.offset, r.offset + r.nbytes))
    return {source: sorted(spans) for source, spans in found.items()}


def cut_blocks(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Blocks of at most one and a half `size` that hold these ranges, gaps too small for a request included.

    They end where a range begins or ends, if they can: a block that two lanes read would be fetched twice,
    for they come to it at different times.
    """
    runs: list[tuple[int, int, list[int]]] = []
    for begin, end in spans:
        if runs and begin <= runs[-1][1] + GAP_BYTES:
            first, last, borders = runs[-1]
            runs[-1] = first, max(last, end), borders
            borders += (begin, end)
        else:
            runs.append((begin, end, [begin, end]))
    return [block for begin, end, borders in runs for block in _cut(begin, end, sorted(set(borders)), size)]


def _cut(begin: int, end: int, borders: list[int], size: int) -> Iterator[tuple[int, int]]:
    at = begin
    while at < end:
        last = bisect_right(borders, at + size) - 1
        if borders[last] < at + size // 2:
            # none ends a block of the usual size: a little later is as good
            last = min(last + 1, len(borders) - 1)
        is_near = (
            at + size // 2 <= borders[last] <= at + size + size // 2 or borders[last] == end <= at + size
        )
        to = borders[last] if is_near else min(at + size, end)
        yield at, to
        at = to


class SourcePlace(Protocol):
    """Read sources where they are stored."""

    local_bytes: int
    """Bytes fetched from this worker's own disk, though SRC is elsewhere."""

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """Return exactly those bytes.

        Raises:
            SourceChanged: it is no longer the planned file.
        """
        ...


class StorePlace:
    """Objects of a store."""

    local_bytes = 0

    def __init__(self, store: Store) -> None:
        self._store = store

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """Return a range of an object."""
        try:
            data = self._store.read_at(source.name, offset, nbytes)
        except FileNotFoundError as error:
            raise _changed(source) from error
        if len(data) != nbytes:
            raise _changed(source)
        return data


class FolderPlace:
    """Files below an open folder, that this worker sees as the command does (another device number aside)."""

    local_bytes = 0

    def __init__(self, root_fd: int, opened: Callable[[int, str], int]) -> None:
        self._root_fd = root_fd
        self._opened = opened
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """Return a range of a file whose size and time are still the planned ones."""
        data = os.pread(self._fd(source), nbytes, offset)
        if len(data) != nbytes:
            raise _changed(source)
        return data

    def _fd(self, source: TaskSource) -> int:
        with self._lock:
            fd = self._fds.get(source.number)
            if fd is None:
                try:
                    fd = self._opened(self._root_fd, source.name)
                except FileNotFoundError as error:
                    raise _changed(source) from error
                self._fds[source.number] = fd
                status = os.fstat(fd)
                if (status.st_size, status.st_mtime_ns) != (source.bytes, source.mtime_ns):
                    raise _changed(source)
            return fd

    def close(self) -> None:
        """Let go of the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])


class Extents(Ranges):
    """The sources of one task; `cache_bytes` bounds the blocks that are kept. Safe for several threads."""

    def __init__(
        self,
        place: SourcePlace,
        sources: Mapping[int, TaskSource],
        spans: Spans,
        *,
        cache_bytes: int,
        check_stop: Callable[[], None],
    ) -> None:
        self._place = place
        self._sources = sources
        self._check_stop = check_stop
        size = MOST_BLOCK_BYTES
        while size > LEAST_BLOCK_BYTES and size * 3 * len(spans) > cache_bytes:
            size //= 2
        self._cache_bytes = cache_bytes
        self._kept_bytes = 0
        self._starts: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for source, found in spans.items():
            cuts = cut_blocks(found, size)
            self._starts[source] = [begin for begin, _ in cuts]
            self._ends[source] = [end for _, end in cuts]
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._coming: set[tuple[int, int]] = set()
        self._changed = threading.Condition()
        self._sums: dict[tuple[int, int], int] = {}
        self.read_bytes = 0
        self.most_kept_bytes = 0
        self.needed_bytes = sum(
            end - begin
            for source, starts in self._starts.items()
            for begin, end in zip(starts, self._ends[source], strict=True)
        )

    def path(self, source: int) -> str:
        """Return the name of a source."""
        return self._sources[source].name

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a source, out of blocks; all of them are in the task's extents."""
        self._check_stop()
        starts = self._starts[source]
        number = bisect_right(starts, offset) - 1
        pieces = []
        while nbytes > 0:
            block, skip = self._block(source, number), offset - starts[number]
            piece = block[skip : skip + nbytes]
            if not piece:
                raise SourceChanged("a range of the plan is not in its task", hint="convert again")
            pieces.append(piece)
            offset, nbytes, number = offset + len(piece), nbytes - len(piece), number + 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _block(self, source: int, number: int) -> bytes:
        key = source, number
        with self._changed:
            while True:
                block = self._blocks.get(key)
                if block is not None:
                    self._blocks.move_to_end(key)
                    return block
                if key not in self._coming:
                    self._coming.add(key)
                    break
                self._changed.wait(1.0)
        block = None
        try:
            begin, end = self._starts[source][number], self._ends[source][number]
            block = self._place.fetch(self._sources[source], begin, end - begin)
            if self._sources[source].crc64:
                self._sums[key] = crc64(block)
        finally:
            with self._changed:
                self._coming.discard(key)
                if block is not None:
                    self.read_bytes += len(block)
                    self._blocks[key] = block
                    self._kept_bytes += len(block)
                while self._kept_bytes > self._cache_bytes:
                    self._kept_bytes -= len(self._blocks.popitem(last=False)[1])
                self.most_kept_bytes = max(self.most_kept_bytes, self._kept_bytes)
                self._changed.notify_all()
        return block

    def close(self) -> None:
        """Let go of what was read, though somebody may still know of it."""
        with self._changed:
            self._blocks.clear()
            self._kept_bytes = 0

    def hashed(self) -> tuple[Extent, ...]:
        """CRC64s of what was read of sources that a manifest knows; blocks that touch are joined."""
        found: list[tuple[int, int, int, int]] = []
        for source, number in sorted(self._sums):
            begin, end = self._starts[source][number], self._ends[source][number]
            crc = self._sums[source, number]
            touches = found and found[-1][0] == source and found[-1][1] + found[-1][2] == begin
            if touches and found[-1][2] < MOST_RUN_BYTES:
                _, offset, nbytes, before = found.pop()
                found.append((source, offset, nbytes + end - begin, crc64_combined(before, crc, end - begin)))
            else:
                found.append((source, begin, end - begin, crc))
        return tuple(Extent(source=s, offset=o, nbytes=n, crc64=to_hex(c)) for s, o, n, c in found)


def _changed(source: TaskSource) -> SourceChanged:
    return SourceChanged(
        f"{source.name} was written or removed since it was planned, or is another file on this worker",
        hint="nothing was published; SRC must be the same on every worker",
    )


# --- Shards that lie on a worker's own disk (docs/internals/conversion.md) ----------------------------
# A file counts only while it is the one whose size and CRC64 the manifest says, whoever wrote it (P2); with
# any doubt the remote is read, so that no answer depends on what a disk holds.

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

    def __init__(self, shelf: LocalShards, other: SourcePlace, check_stop: Callable[[], None]) -> None:
        self._shelf = shelf
        self._other = other
        self._check_stop = check_stop
        self._lock = threading.Lock()
        self._files: dict[int, tuple[int, FileIdentity] | None] = {}
        self.local_bytes = 0

    def fetch(self, source: TaskSource, offset: int, nbytes: int) -> bytes:
        """Return those bytes from the local disk, else from the others; raises as `SourcePlace.fetch`."""
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
