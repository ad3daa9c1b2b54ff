"""Give uploads their bytes: a sealed file by descriptor, bytes in memory, and two decorators.

`CheckedSource` compares the CRC32s that `torch.save` left in the zip directory in the same pass, so that a
bit that flipped since the save is found before it is uploaded; `RateLimitedSource` limits the speed.
"""

from __future__ import annotations

import bisect
import os
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isal import isal_zlib

from ckptd.base import extents
from ckptd.errors import DamagedError, RefusedError, SourceChanged, SourceUnreadable, TornArchiveError
from ckptd.formats.torchfile.archive import Framing, frame, read_directory
from ckptd.storage.stores.checksums import crc32_combined, crc64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptd.formats.torchfile.archive import Record
    from ckptd.storage.stores.base import Source
    from ckptd.storage.stores.rate_limit import RateLimiter


# --- checksum of a range whose bytes pass in any order ---------------------------------------------------
# Bytes pass in several threads; CRCs of adjoining ranges combine. What passes again counts once: the parts of
# an upload are hashed, sent, and sent again.

_Stretch = tuple[int, int, int]
"""Begin, end, CRC."""


class CrcRanges:
    """Track which parts of one range have passed, with their CRCs.

    `lock` may be shared by many of them: nothing is hashed under it.
    """

    __slots__ = ("_combined", "_crc", "_held", "_lock")

    def __init__(
        self,
        crc: Callable[[memoryview], int],
        combined: Callable[[int, int, int], int],
        lock: threading.Lock,
    ) -> None:
        self._crc = crc
        self._combined = combined
        self._lock = lock
        self._held: list[_Stretch] = []

    def feed(self, offset: int, data: memoryview) -> int:
        """Take `data`, which lies at `offset`; how much of it was new, in bytes."""
        count = 0
        for begin, end in self.gaps(offset, offset + len(data)):
            count += self._add((begin, end, self._crc(data[begin - offset : end - offset])))
        return count

    def take(self, offset: int, length: int, crc: int) -> None:
        """Add a stretch that passed elsewhere, with its CRC; ignore it where some of it passed here."""
        if length and self.gaps(offset, offset + length) == [(offset, offset + length)]:
            self._add((offset, offset + length, crc))

    @property
    def passed(self) -> int:
        """Return how many bytes have passed."""
        with self._lock:
            return sum(end - begin for begin, end, _ in self._held)

    def crc_of(self, begin: int, end: int) -> int | None:
        """Return the CRC of exactly this range; None while some of it has not passed."""
        with self._lock:
            held = self._held[0] if self._held else None
        return held[2] if held is not None and held[:2] == (begin, end) else None

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts of a range that have not passed."""
        gaps = []
        with self._lock:
            for begin, end, _ in self._held:
                if first < begin and first < last:
                    gaps.append((first, min(begin, last)))
                first = max(first, end)
        return [*gaps, (first, last)] if first < last else gaps

    def _add(self, stretch: _Stretch) -> int:
        """Join a stretch to its neighbours; 0 when another thread brought the same meanwhile."""
        with self._lock:
            held = self._held
            at = bisect.bisect_left(held, stretch)
            before = held[at - 1][1] if at else stretch[0]
            after = held[at][0] if at < len(held) else stretch[1]
            if before > stretch[0] or after < stretch[1]:
                return 0
            held.insert(at, stretch)
            for left in (at, at - 1):
                if 0 <= left < len(held) - 1 and held[left][1] == held[left + 1][0]:
                    (begin, _, crc), (second, end, more) = held[left : left + 2]
                    held[left : left + 2] = [(begin, end, self._combined(crc, more, end - second))]
        return stretch[1] - stretch[0]


# --- checksums of an archive's records -------------------------------------------------------------------
# `torch.save` left a CRC32 of each record in the zip directory. A record is compared once all of it passed;
# of one that was right nothing is kept. CRC 0 proves nothing.


@dataclass(frozen=True, slots=True)
class WrongRecord:
    """A record whose bytes are not those that `torch.save` wrote; `crc`: what they come to."""

    record: Record
    crc: int

    def __str__(self) -> str:
        return f"record {self.record.name} has CRC {self.crc:08x}, torch.save wrote {self.record.crc:08x}"


class RecordChecksums:
    """Compare the CRC32s of an archive's records while their bytes pass; what passes again counts once."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = sorted((r for r in records if r.crc != 0 and r.size > 0), key=lambda r: r.offset)
        self._lock, self._hashing = threading.Lock(), threading.Lock()
        self._open: dict[int, CrcRanges] = {}
        self._right = bytearray(len(self._records))
        self._wrong: dict[int, WrongRecord] = {}
        self._asked: set[int] = set()
        self.is_telling = True
        """All that was asked for lies in records that have a CRC."""

    def feed(self, offset: int, data: memoryview) -> WrongRecord | None:
        """Take `data`, which lies at `offset`; the first record in it that is known to be wrong."""
        end, found = offset + len(data), None
        for index in self._within(offset, end):
            record = self._records[index]
            first, last = max(record.offset, offset), min(_end(record), end)
            wrong = self._feed(index, first, data[first - offset : last - offset])
            found = found or wrong
        return found

    def _feed(self, index: int, first: int, data: memoryview) -> WrongRecord | None:
        record = self._records[index]
        with self._lock:
            if self._right[index] or index in self._wrong:
                return self._wrong.get(index)
            passed = self._open.get(index)
            if passed is None:
                passed = self._open[index] = CrcRanges(isal_zlib.crc32, crc32_combined, self._hashing)
        passed.feed(first, data)
        crc = passed.crc_of(record.offset, _end(record))
        if crc is None:
            return None
        with self._lock:
            self._open.pop(index, None)
            if crc != record.crc:
                self._wrong[index] = WrongRecord(record, crc)
            else:
                self._right[index] = True
            return self._wrong.get(index)

    def ask(self, offset: int, nbytes: int) -> None:
        """Note that a range is used, so that its records are proved."""
        end, covered = offset + nbytes, 0
        for index in self._within(offset, end):
            record = self._records[index]
            covered += min(_end(record), end) - max(record.offset, offset)
            self._asked.add(index)
        self.is_telling &= covered == nbytes

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Return the parts of the requested records that have not passed, as (begin, end)."""
        found = []
        for index in sorted(self._asked):
            record = self._records[index]
            if not self._right[index] and index not in self._wrong:
                passed = self._open.get(index)
                whole = [(record.offset, _end(record))]
                found += passed.gaps(*whole[0]) if passed is not None else whole
        return found

    @property
    def wrong(self) -> WrongRecord | None:
        """Return the first requested record whose CRC differs; None: none does."""
        return next((self._wrong[index] for index in sorted(self._asked & self._wrong.keys())), None)

    def beginning(self, offset: int) -> int:
        """Return where the record begins that `offset` lies within; `offset` itself where there is none."""
        index = bisect.bisect_right(self._records, offset, key=_end)
        return min(self._records[index].offset, offset) if index < len(self._records) else offset

    def _within(self, offset: int, end: int) -> Iterator[int]:
        index = bisect.bisect_right(self._records, offset, key=_end)
        while index < len(self._records) and self._records[index].offset < end:
            yield index
            index += 1


def _end(record: Record) -> int:
    return record.offset + record.size


# --- sources ---------------------------------------------------------------------------------------------

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
        self._cached = extents.cached_runs(fd, status.st_size)

    @property
    def is_cached(self) -> bool:
        """Tell whether the whole file lay in the page cache when it was opened."""
        return any(begin <= 0 and self.size_bytes <= end for begin, end in self._cached)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read at `offset`; SourceUnreadable when the local disk fails."""
        try:
            return os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            raise SourceUnreadable(f"reading {self._name} at {offset}: {error.strerror or error}") from error

    def drop(self, offset: int, length: int) -> None:
        """Forget the pages of the range that were not cached before."""
        extents.drop_pages_but(self._fd, self._cached, offset, length)

    def drop_all(self) -> None:
        """Drop the whole file from the page cache, with what was read ahead or looked at on the way."""
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
        """Do nothing: nothing is cached."""


class WrappedSource:
    """Pass on a source, of the same size and rights."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.size_bytes: int = inner.size_bytes
        self.mode: int = inner.mode
        self.folder_mode: int = inner.folder_mode
        self.gid: int | None = inner.gid

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read what will be read again: its CRCs are left for that time."""
        return peek(self.inner)(offset, buffer)

    def drop(self, offset: int, length: int) -> None:
        """Drop a range from the page cache of the inner source."""
        self.inner.drop(offset, length)


class CheckedSource(WrappedSource):
    """Compares each record's CRC32 when its last byte was read; records with CRC 0 prove nothing.

    Ranges may be read in any order and by several threads: the CRCs of adjoining pieces combine. What is
    read again counts once.
    """

    def __init__(self, inner: Source, records: Iterable[Record], name: str) -> None:
        super().__init__(inner)
        self._name = name
        self._sums = RecordChecksums(records)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read and check.

        Raises:
            DamagedError: a record's bytes are not those that `torch.save` wrote.
        """
        count = self.inner.read_into(offset, buffer)
        wrong = self._sums.feed(offset, buffer[:count])
        if wrong is not None:
            hint = "bits flipped on the local disk since the save; nothing was uploaded"
            raise DamagedError(f"{self._name}: {wrong}", hint=hint)
        return count

    def go_on(self, offset: int, check: Callable[[], None] = lambda: None) -> None:
        """The bytes before were read by an earlier attempt: read the beginning of a record that goes on.

        `check` is called at each step and may raise.
        """
        begin = self._sums.beginning(offset)
        view = memoryview(bytearray(_REREAD_BYTES))
        while begin < offset and (count := self.read_into(begin, view[: min(len(view), offset - begin)])):
            self.inner.drop(begin, count)
            begin += count
            check()


class RateLimitedSource(WrappedSource):
    """Reads no faster than the pacer allows, and stops when `check` raises.

    `is_afar`: the source itself is read over the network.
    """

    def __init__(
        self, inner: Source, pacer: RateLimiter, check: Callable[[], None], *, is_afar: bool = False
    ) -> None:
        super().__init__(inner)
        self._is_afar = is_afar
        self.read_bytes = 0
        self._pacer = pacer
        self._check = check
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Wait, then read at most one step."""
        count = self._read_paced(offset, buffer)
        with self._lock:
            self.read_bytes += count
        return count

    def _read_paced(self, offset: int, buffer: memoryview) -> int:
        room = self._pacer.chunk_bytes(len(buffer))
        self._pacer.take(room, self._check)
        count = self.inner.read_into(offset, buffer[:room])
        # what is made on the way comes in small pieces
        self._pacer.give_back(room - count)
        return count

    def peek_into(self, offset: int, buffer: memoryview) -> int:
        """Read what will be read again: not paced, not counted, its CRCs are left for that time."""
        self._check()
        return super().peek_into(offset, buffer)

    def look_into(self, offset: int, buffer: memoryview) -> int:
        """Read what is hashed and not sent: it costs no bandwidth, but for a source afar."""
        if self._is_afar:
            return self._read_paced(offset, buffer)
        self._pacer.breathe(self._check)
        return self.inner.read_into(offset, buffer)


def peek(source: Source) -> Callable[[int, memoryview], int]:
    """Return how a source reads what it is asked for twice; by `read_into` where it makes no difference."""
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
    """Return the CRC64NVME of a range that is not sent, or later; of less where the source ends early.

    `is_read_again`: it will be sent, and its records' CRCs compared then. `also` gets the bytes too.
    """
    read = peek(source) if is_read_again else source.read_into
    if not is_read_again and isinstance(source, RateLimitedSource):
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


def read_range(source: Source, offset: int, length: int) -> bytearray:
    """Return a small range, whole.

    Raises:
        SourceChanged: the source ends before that.
    """
    data, done = bytearray(length), 0
    with memoryview(data) as view:
        while done < length:
            count = source.read_into(offset + done, view[done:])
            if count == 0:
                msg = f"the source ended after {offset + done} bytes"
                raise SourceChanged(msg, hint="this attempt is dropped; the next turn looks again")
            done += count
    return data


def records_of(fd: int, name: str, *, is_shard: bool) -> list[Record]:
    """Return the records of a `torch.save` archive, empty for other files.

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
