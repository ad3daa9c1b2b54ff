"""Writing a large output past the page cache: one copy in memory, no dirty pages, half the CPU (adr/0081).

Source bytes are read into an aligned buffer at the place that they have in the output, and whole buffers
are written with O_DIRECT. The ragged end is written normally. Where a file system knows no O_DIRECT,
`begin` says so. For sources in the page cache alone: what comes from disk is faster through the cache, whose
write-back goes on while the next block is read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from ckptd import files
from ckptd.errors import SourceChanged

BUFFER_BYTES = 4 << 20
MIN_FILE_BYTES = 1 << 20
_BLOCK_BYTES = 4096


class DirectWriter:
    """Fills files front to back; one buffer, used for file after file."""

    def __init__(self, buffer_bytes: int) -> None:
        size = max(_BLOCK_BYTES, buffer_bytes // _BLOCK_BYTES * _BLOCK_BYTES)
        self._view = memoryview(mmap.mmap(-1, size))
        self._size = size
        self._fd = -1
        self._at = self._filled = 0

    def begin(self, fd: int, nbytes: int) -> bool:
        """Start a new file of `nbytes`; False where it must be written through the page cache.

        Raises:
            OSError: no space.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return False
        files.allocate(fd, nbytes)
        self._fd, self._at, self._filled = fd, 0, 0
        return True

    def room(self) -> int:
        """Bytes until the buffer is written."""
        return self._size - self._filled

    def take(self, source: int, offset: int, nbytes: int) -> None:
        """Append at most `room()` bytes of a source.

        Raises:
            SourceChanged: it ends early.
        """
        end = self._filled + nbytes
        while self._filled < end:
            count = os.preadv(source, [self._view[self._filled : end]], offset)
            if count == 0:
                raise SourceChanged(f"a source ended {end - self._filled} bytes early")
            self._filled += count
            offset += count
        if self._filled == self._size:
            self._write(self._size)

    def put(self, data: bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            count = min(len(view), self.room())
            self._view[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == self._size:
                self._write(self._size)

    def finish(self) -> None:
        """Write what is left: whole blocks past the page cache, the ragged end through it."""
        end, whole = self._filled, self._filled // _BLOCK_BYTES * _BLOCK_BYTES
        tail = bytes(self._view[whole:end])
        self._write(whole)
        self._through_cache()
        if tail:
            files.write_at(self._fd, tail, self._at)

    def _write(self, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            try:
                done += os.pwrite(self._fd, self._view[done:nbytes], self._at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._through_cache():
                    raise
        self._at += nbytes
        self._filled = 0

    def _through_cache(self) -> bool:
        """Write normally from now on; False when that was so already."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)
