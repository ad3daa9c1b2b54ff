"""What copying threads write with: limits, counts, folders on demand, a window of dirty pages (P12, P15)."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ckptd import files

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to write: window and batch bound what is dirty per thread; reserve is P13's."""

    window_bytes: int
    batch_bytes: int
    threads: int
    stripe_threads: int
    """Threads that write one large file together; 1: a file is one thread's."""
    clone: bool
    reserve_bytes: int
    file_mode: int
    folder_mode: int
    gid: int

    @staticmethod
    def within(
        budget_bytes: int,
        *,
        threads: int,
        stripe_threads: int = 1,
        clone: bool,
        reserve_bytes: int,
        modes: tuple[int, int, int],
    ) -> Settings:
        """Divide a memory budget: 48 MiB for two Python processes, the rest for dirty pages."""
        share = max(8 * MIB, (budget_bytes - 48 * MIB) // (2 * threads * stripe_threads))
        window = min(64 * MIB, share)
        return Settings(
            window_bytes=window,
            batch_bytes=window,
            threads=threads,
            stripe_threads=stripe_threads,
            clone=clone,
            reserve_bytes=reserve_bytes,
            file_mode=modes[0],
            folder_mode=modes[1],
            gid=modes[2],
        )


class Counters:
    """What was done, shared by the threads and the progress line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.files = self.bytes = self.cloned = self.copied = self.resumed = 0

    def add(
        self, *, files: int = 0, nbytes: int = 0, cloned: int = 0, copied: int = 0, resumed: int = 0
    ) -> None:
        """Add to the counts; bytes are of output files."""
        with self._lock:
            self.files += files
            self.bytes += nbytes
            self.cloned += cloned
            self.copied += copied
            self.resumed += resumed


class Folders:
    """Folders below the output folder, made on demand."""

    def __init__(self, out_fd: int, settings: Settings) -> None:
        self._out_fd = out_fd
        self._settings = settings
        self._lock = threading.Lock()
        self._made: set[str] = set()

    def ensure(self, path: str) -> None:
        """Make the parent folder of an output."""
        parents = path.split("/")[:-1]
        with self._lock:
            for depth in range(1, len(parents) + 1):
                parent = "/".join(parents[:depth])
                if parent in self._made:
                    continue
                fd = files.open_dir_beneath(self._out_fd, parent, create_mode=self._settings.folder_mode)
                try:
                    own(fd, self._settings.gid, self._settings.folder_mode)
                finally:
                    os.close(fd)
                self._made.add(parent)

    def made(self) -> list[str]:
        """Folders that hold outputs, for the last fsync."""
        return sorted(self._made)


def own(fd: int, gid: int, mode: int) -> None:
    """Give a file or folder the checkpoint's group, never a wider mode (P15)."""
    if os.fstat(fd).st_gid != gid:
        try:
            os.fchown(fd, -1, gid)
        except OSError:
            mode &= ~0o070
    os.fchmod(fd, mode)


class Dirty:
    """The dirty pages of one file being written front to back: never more than a window of them (P12).

    `begin`: where in the file writing begins. While one half of the window is on its way to disk, the other
    is filled.
    """

    def __init__(self, fd: int, window_bytes: int, begin: int = 0) -> None:
        self._fd = fd
        self._half_bytes = max(1, window_bytes // 2)
        self._begin = begin
        self._bytes = 0
        self._under_way: tuple[int, int] | None = None

    def room(self) -> int:
        """How much may be written before `wrote`."""
        return self._half_bytes - self._bytes

    def wrote(self, at: int, length: int) -> None:
        """`length` bytes were written, the last of them before `at`."""
        self._bytes += length
        if self._bytes < self._half_bytes:
            return
        if self._under_way is not None:
            begin, nbytes = self._under_way
            files.flush_range(self._fd, begin, nbytes)
            files.drop_pages(self._fd, begin, nbytes)
        self._under_way = (self._begin, at - self._begin)
        files.start_flush(self._fd, *self._under_way)
        self._begin, self._bytes = at, 0
