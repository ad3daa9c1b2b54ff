"""Dirty pages of an output, kept to a window: some go to disk while more are written (P12)."""

from __future__ import annotations

from ckptd import files


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
