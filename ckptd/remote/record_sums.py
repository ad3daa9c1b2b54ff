"""The CRC32s that `torch.save` left in an archive, compared as its bytes pass, in whatever order.

A record is compared once all of it passed; of one that was right nothing is kept. CRC 0 proves nothing.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isal import isal_zlib

from ckptd.remote.checksums import crc32_combined
from ckptd.remote.stretches import Stretches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptd.torchfile.archive import Record


@dataclass(frozen=True, slots=True)
class WrongRecord:
    """A record whose bytes are not those that `torch.save` wrote; `crc`: what they come to."""

    record: Record
    crc: int

    def __str__(self) -> str:
        return f"record {self.record.name} has CRC {self.crc:08x}, torch.save wrote {self.record.crc:08x}"


class RecordSums:
    """Of one archive; what passes again counts once."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = sorted((r for r in records if r.crc != 0 and r.size > 0), key=lambda r: r.offset)
        self._lock, self._hashing = threading.Lock(), threading.Lock()
        self._open: dict[int, Stretches] = {}
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
                passed = self._open[index] = Stretches(isal_zlib.crc32, crc32_combined, self._hashing)
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
        """That range is used: its records are to be proven."""
        end, covered = offset + nbytes, 0
        for index in self._within(offset, end):
            record = self._records[index]
            covered += min(_end(record), end) - max(record.offset, offset)
            self._asked.add(index)
        self.is_telling &= covered == nbytes

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """What has not passed of the records that were asked for, as (begin, end)."""
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
        """Of the records that were asked for, the first that is."""
        return next((self._wrong[index] for index in sorted(self._asked & self._wrong.keys())), None)

    def beginning(self, offset: int) -> int:
        """Where the record begins that `offset` lies within; `offset` itself where there is none."""
        index = bisect.bisect_right(self._records, offset, key=_end)
        return min(self._records[index].offset, offset) if index < len(self._records) else offset

    def _within(self, offset: int, end: int) -> Iterator[int]:
        index = bisect.bisect_right(self._records, offset, key=_end)
        while index < len(self._records) and self._records[index].offset < end:
            yield index
            index += 1


def _end(record: Record) -> int:
    return record.offset + record.size
