"""What an upload reads: a sealed file by descriptor, bytes in memory, and two decorators.

`CheckedSource` compares the CRC32s that `torch.save` left in the zip directory in the same pass, so that a
bit that flipped since the save is found before it is shipped; `PacedSource` limits the speed.
"""

from __future__ import annotations

import os
import stat
import zlib
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.errors import DamagedError, RefusedError, TornArchiveError, from_os_error
from ckptd.torchfile.archive import Framing, frame, read_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.remote.pacing import Pacer
    from ckptd.remote.store import Source
    from ckptd.torchfile.archive import Record

_REREAD_BYTES = 1 << 20


class FileSource:
    """An open regular file; `name` is for messages. The caller owns the descriptor."""

    def __init__(self, fd: int, name: str, *, folder_mode: int = 0o755) -> None:
        status = os.fstat(fd)
        self._fd = fd
        self._name = name
        self.size_bytes: int = status.st_size
        self.mode: int = stat.S_IMODE(status.st_mode)
        self.gid: int | None = status.st_gid
        self.folder_mode = folder_mode

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read at `offset`; StorageError when the local disk fails."""
        try:
            return os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            raise from_os_error(error, f"reading {self._name} at {offset}") from error

    def drop(self, offset: int, length: int) -> None:
        """Forget the cached pages of the range."""
        files.drop_pages(self._fd, offset, length)


class MemorySource:
    """A small file that was read whole."""

    def __init__(self, data: bytes, *, mode: int, folder_mode: int, gid: int | None) -> None:
        self._data = data
        self.size_bytes: int = len(data)
        self.mode = mode
        self.folder_mode = folder_mode
        self.gid = gid

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Copy out of memory."""
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def drop(self, offset: int, length: int) -> None:
        """Nothing is cached."""


class CheckedSource:
    """Compares each record's CRC32 as its last byte passes; records with CRC 0 prove nothing.

    A transfer that goes on in the middle of a record reads that record's beginning again, locally.
    """

    def __init__(self, inner: Source, records: list[Record], name: str) -> None:
        self._inner = inner
        self._records = sorted((r for r in records if r.crc != 0 and r.size > 0), key=lambda r: r.offset)
        self._name = name
        self._index = 0
        self._at = 0
        self._crc = 0
        self.size_bytes: int = inner.size_bytes
        self.mode: int = inner.mode
        self.folder_mode: int = inner.folder_mode
        self.gid: int | None = inner.gid

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read and check.

        Raises:
            DamagedError: a record's bytes are not those that `torch.save` wrote.
        """
        count = self._inner.read_into(offset, buffer)
        if offset != self._at:
            self._seek(offset)
        self._feed(offset, buffer[:count])
        self._at = offset + count
        return count

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read what will be read, and checked, again."""
        return _peek(self._inner)(offset, buffer)

    def drop(self, offset: int, length: int) -> None:
        """As the file."""
        self._inner.drop(offset, length)

    def _seek(self, offset: int) -> None:
        self._index = 0
        self._crc = 0
        while self._index < len(self._records) and _end(self._records[self._index]) <= offset:
            self._index += 1
        if self._index == len(self._records):
            return
        begin = self._records[self._index].offset
        view = memoryview(bytearray(_REREAD_BYTES))
        while begin < offset:
            count = self._inner.read_into(begin, view[: min(len(view), offset - begin)])
            if count == 0:
                return
            self._crc = zlib.crc32(view[:count], self._crc)
            self._inner.drop(begin, count)
            begin += count

    def _feed(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        while self._index < len(self._records):
            record = self._records[self._index]
            if record.offset >= end:
                return
            first, last = max(record.offset, offset), min(_end(record), end)
            self._crc = zlib.crc32(data[first - offset : last - offset], self._crc)
            if _end(record) > end:
                return
            if self._crc != record.crc:
                msg = (
                    f"{self._name}: record {record.name} has CRC {self._crc:08x}, "
                    f"torch.save wrote {record.crc:08x}"
                )
                raise DamagedError(
                    msg, hint="bits flipped on the local disk since the save; nothing was shipped"
                )
            self._index += 1
            self._crc = 0


def _end(record: Record) -> int:
    return record.offset + record.size


class PacedSource:
    """Reads no faster than the pacer allows, and stops when `check` raises."""

    def __init__(self, inner: Source, pacer: Pacer, check: Callable[[], None]) -> None:
        self._inner = inner
        self.read_bytes = 0
        self._pacer = pacer
        self._check = check
        self.size_bytes: int = inner.size_bytes
        self.mode: int = inner.mode
        self.folder_mode: int = inner.folder_mode
        self.gid: int | None = inner.gid

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Wait, then read at most one step."""
        room = self._pacer.chunk_bytes(len(buffer))
        self._pacer.take(room, self._check)
        count = self._inner.read_into(offset, buffer[:room])
        self.read_bytes += count
        return count

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read what will be read again: not paced, not counted, its CRCs are left for that time."""
        self._check()
        return _peek(self._inner)(offset, buffer)

    def drop(self, offset: int, length: int) -> None:
        """As the inner source."""
        self._inner.drop(offset, length)


def _peek(source: Source) -> Callable[[int, memoryview], int]:
    found: Callable[[int, memoryview], int] = getattr(source, "peek_into", source.read_into)
    return found


def records_of(fd: int, name: str, *, is_shard: bool) -> list[Record]:
    """The records of a `torch.save` archive, empty for other files.

    Raises:
        TornArchiveError: a shard whose zip directory is not whole.
    """
    try:
        if frame(fd, expected=False) is not Framing.ZIP:
            return []
        return list(read_directory(fd, name).records.values())
    except RefusedError:
        return []
    except TornArchiveError:
        # a side file may be any zip; a shard was judged a whole archive when it was sealed
        if is_shard:
            raise
        return []
