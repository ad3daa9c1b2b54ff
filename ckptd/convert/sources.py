"""Open the source files of a plan: when first read, proven to be the planned ones, closed when too many.

It exists because a checkpoint of a thousand ranks has more files than a process may have open (1024 is the
usual limit), and because each must still be the very file that the plan was made from.
"""

from __future__ import annotations

import os
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import overload

from ckptd.base import extents, files
from ckptd.errors import SourceChanged

# --- The interface of sources: local files, or any place that serves ranges -------------------
# Local files keep their fast paths (clones, copies in the kernel, O_DIRECT): callers that can use them ask
# for `local`. All others read blocks through `read`, wherever the bytes lie.


class Ranges(ABC):
    """The source files of a plan by number; safe for several threads."""

    @property
    def local(self) -> Sources | None:
        """Return the sources as file descriptors; None where there are none."""
        return None

    @abstractmethod
    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes at `offset` of source number `source`; fewer at its end.

        Raises:
            SourceChanged: it is no longer the planned one. RemoteError: it does not answer.
        """


# --- Local files -----------------------------------------------------------------------------------------

RESERVED_DESCRIPTORS = 320
"""For outputs that wait for their flush (threads × batch), pipes, folders, the plan."""
WANTED_DESCRIPTORS = 16384


class SourceFd(int):
    """A descriptor that is closed when nobody holds it any more, whichever thread was last."""

    def __del__(self) -> None:
        """Close."""
        os.close(self)


class Sources(Ranges, Sequence[int]):
    """Descriptors by number in the plan; safe for several threads."""

    def __init__(self, folder_fd: int, paths: list[str], identities: Sequence[tuple[int, ...]]) -> None:
        """Check all identities by name at once, so that a save under way is noticed before any copying.

        Raises:
            SourceChanged: a file is gone or was written since it was planned.
        """
        self._folder_fd = folder_fd
        self._paths = paths
        self._identities = identities
        self._lock = threading.Lock()
        self._open: dict[int, SourceFd] = {}
        self._cold: set[int] = set()
        self._sparse: set[int] = set()
        self._limit = max(16, descriptors() - RESERVED_DESCRIPTORS)
        for path, identity in zip(paths, identities, strict=True):
            status = files.stat_beneath(folder_fd, path)
            if status is None or identity_of(status) != identity:
                raise _changed(path)

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """Return the descriptor of source `index`: hold it while it is used.

        Raises:
            SourceChanged: the file is no longer the planned one.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if index >= len(self._paths):
            raise IndexError(index)
        found = self._open.get(index)
        return self._opened(index) if found is None else found

    @property
    def local(self) -> Sources:
        """These are."""
        return self

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a source, through the page cache."""
        return os.pread(self[source], nbytes, offset)

    def was_cold(self, fd: int) -> bool:
        """Tell whether most of the file was not in the page cache: what we read of it is dropped again."""
        return fd in self._cold

    def extent_at(self, fd: int, offset: int, length: int) -> tuple[bool, int]:
        """Whether a hole begins at `offset`, and how far hole or data reach (all of a file without holes)."""
        return extents.extent_at(fd, offset, length) if fd in self._sparse else (False, length)

    def _opened(self, index: int) -> SourceFd:
        with self._lock:
            found = self._open.get(index)
            if found is not None:
                return found
            while len(self._open) >= self._limit:
                self._forget(next(iter(self._open)))
            path = self._paths[index]
            try:
                fd = SourceFd(files.open_beneath(self._folder_fd, path))
            except FileNotFoundError as error:  # the trainer's rotation, or a save that begins
                raise _changed(path) from error
            status = os.fstat(fd)
            if identity_of(status) != self._identities[index]:
                raise _changed(path)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            cached = extents.cached_bytes(fd)
            if cached is not None and cached < status.st_size // 2:
                self._cold.add(int(fd))
            if status.st_blocks * 512 < status.st_size:
                self._sparse.add(int(fd))
            self._open[index] = fd
            return fd

    def _forget(self, index: int) -> None:
        """Let go of the descriptor opened first; whoever uses it just now keeps it open."""
        fd = int(self._open.pop(index))
        self._cold.discard(fd)
        self._sparse.discard(fd)


def descriptors() -> int:
    """Return how many files this process may have open, after raising the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def identity_of(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """dev, ino, size, mtime_ns, ctime_ns."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _changed(path: str) -> SourceChanged:
    return SourceChanged(f"{path} was written or removed since it was read")
