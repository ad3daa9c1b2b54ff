"""What an upload reads: a sealed file by descriptor, bytes in memory, and two decorators.

`CheckedSource` compares the CRC32s that `torch.save` left in the zip directory in the same pass, so that a
bit that flipped since the save is found before it is shipped; `PacedSource` limits the speed.
"""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.errors import DamagedError, RefusedError, TornArchiveError, from_os_error
from ckptd.remote.checksums import crc64
from ckptd.remote.record_sums import RecordSums
from ckptd.torchfile.archive import Framing, frame, read_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.remote.pacing import Pacer
    from ckptd.remote.store import Source
    from ckptd.torchfile.archive import Record

_REREAD_BYTES = 1 << 20


class FileSource:
    """An open regular file; `name` is for messages. The caller owns the descriptor.

    What was cached before is noted at once, so that `drop` leaves those pages to whoever brought them in.
    """

    def __init__(self, fd: int, name: str, *, folder_mode: int = 0o755) -> None:
        status = os.fstat(fd)
        self._fd = fd
        self._name = name
        self.size_bytes: int = status.st_size
        self.mode: int = stat.S_IMODE(status.st_mode)
        self.gid: int | None = status.st_gid
        self.folder_mode = folder_mode
        self._cached = files.cached_runs(fd, status.st_size)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read at `offset`; StorageError when the local disk fails."""
        try:
            return os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            raise from_os_error(error, f"reading {self._name} at {offset}") from error

    def drop(self, offset: int, length: int) -> None:
        """Forget the pages of the range that were not cached before."""
        files.drop_pages_but(self._fd, self._cached, offset, length)

    def drop_all(self) -> None:
        """As `drop`, of the whole file: what was read ahead, or looked at on the way, goes as well."""
        self.drop(0, self.size_bytes)


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
    """Compares each record's CRC32 when its last byte was read; records with CRC 0 prove nothing.

    Ranges may be read in any order and by several threads: the CRCs of adjoining pieces combine. What is
    read again counts once.
    """

    def __init__(self, inner: Source, records: Iterable[Record], name: str) -> None:
        self._inner = inner
        self._name = name
        self._sums = RecordSums(records)
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
        self._feed(offset, buffer[:count])
        return count

    def drop(self, offset: int, length: int) -> None:
        """As the file."""
        self._inner.drop(offset, length)

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read what will be read, and checked, again."""
        return peek(self._inner)(offset, buffer)

    def go_on(self, offset: int, check: Callable[[], None] = lambda: None) -> None:
        """The bytes before were read by an earlier attempt: read the beginning of a record that goes on.

        `check` is called at each step and may raise.
        """
        begin = self._sums.beginning(offset)
        view = memoryview(bytearray(_REREAD_BYTES))
        while begin < offset and (count := self.read_into(begin, view[: min(len(view), offset - begin)])):
            self._inner.drop(begin, count)
            begin += count
            check()

    def _feed(self, offset: int, data: memoryview) -> None:
        wrong = self._sums.feed(offset, data)
        if wrong is not None:
            hint = "bits flipped on the local disk since the save; nothing was shipped"
            raise DamagedError(f"{self._name}: {wrong}", hint=hint)


class PacedSource:
    """Reads no faster than the pacer allows, and stops when `check` raises."""

    def __init__(self, inner: Source, pacer: Pacer, check: Callable[[], None]) -> None:
        self._inner = inner
        self.read_bytes = 0
        self._pacer = pacer
        self._check = check
        self._lock = threading.Lock()
        self.size_bytes: int = inner.size_bytes
        self.mode: int = inner.mode
        self.folder_mode: int = inner.folder_mode
        self.gid: int | None = inner.gid

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Wait, then read at most one step."""
        room = self._pacer.chunk_bytes(len(buffer))
        self._pacer.take(room, self._check)
        count = self._inner.read_into(offset, buffer[:room])
        # what is made on the way comes in small pieces
        self._pacer.give_back(room - count)
        with self._lock:
            self.read_bytes += count
        return count

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read what will be read again: not paced, not counted, its CRCs are left for that time."""
        self._check()
        return peek(self._inner)(offset, buffer)

    def look_into(self, offset: int, buffer: memoryview) -> int:
        """Read what is hashed and not sent: it costs no bandwidth."""
        self._pacer.breathe(self._check)
        return self._inner.read_into(offset, buffer)

    def drop(self, offset: int, length: int) -> None:
        """As the inner source."""
        self._inner.drop(offset, length)


def peek(source: Source) -> Callable[[int, memoryview], int]:
    """How a source reads what it will be asked for again; by `read_into` where it makes no difference."""
    found: Callable[[int, memoryview], int] = getattr(source, "peek_into", source.read_into)
    return found


def crc64_of(
    source: Source,
    offset: int,
    length: int,
    *,
    is_read_again: bool = False,
    drops: bool = False,
    also: Callable[[memoryview], None] | None = None,
) -> int:
    """CRC64NVME of a range that is not sent, or later; of less where the source ends early.

    `is_read_again`: it will be sent, and its records' CRCs compared then. `also` gets the bytes too.
    """
    read = peek(source) if is_read_again else source.read_into
    if not is_read_again and isinstance(source, PacedSource):
        read = source.look_into
    view = memoryview(bytearray(min(_REREAD_BYTES, max(length, 1))))
    end, crc = offset + length, 0
    while offset < end and (count := read(offset, view[: min(len(view), end - offset)])):
        crc = crc64(view[:count], crc)
        if also is not None:
            also(view[:count])
        if drops:
            source.drop(offset, count)
        offset += count
    return crc


def records_of(fd: int, name: str, *, is_shard: bool) -> list[Record]:
    """The records of a `torch.save` archive, empty for other files.

    Raises:
        TornArchiveError: a shard whose zip directory is not whole.
    """
    try:
        framing = frame(fd, expected=is_shard)
        if is_shard and framing in (Framing.TORN, Framing.EMPTY):
            raise TornArchiveError(f"{name} is no torch.save archive any more")
        if framing is not Framing.ZIP:
            return []
        return list(read_directory(fd, name).records.values())
    except RefusedError:
        return []
    except TornArchiveError:
        # a side file may be any zip; a shard was judged a whole archive when it was sealed
        if is_shard:
            raise
        return []
