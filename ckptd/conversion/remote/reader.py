"""Read ranges of remote objects for a conversion: in blocks, each fetched once, all hashed on the way.

A plan reads its sources forwards, in pieces from bytes to gigabytes; requests are of blocks, of which a few
are kept. Where a manifest says what a file's bytes are, the CRC64s of its blocks are joined at the end; of a
file of which little is needed, the CRC32s of its records, where they are known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.conversion.reader import Ranges
from ckptd.errors import CkptdError, DamagedError, SourceChanged
from ckptd.storage.stores.checksums import crc64, crc64_combined, to_hex
from ckptd.storage.stores.sources import CrcRanges, RecordChecksums

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptd.conversion.remote.source import RemoteFile
    from ckptd.formats.torchfile.archive import Record
    from ckptd.storage.stores.base import ObjectInfo, Store

MOST_BLOCK_BYTES = 512 << 10
LEAST_BLOCK_BYTES = 64 << 10
PARALLEL = 6
_PROVEN_SHARE = 2
"""A file of which one in so many bytes was needed, or more, is read to its end and compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProof:
    """Count the files that were compared with their manifest, and those that were read in part only."""

    compared: int
    in_part: int


class RemoteRanges(Ranges):
    """Sources in a store; `cache_bytes` bounds the blocks that are kept."""

    def __init__(
        self,
        store: Store,
        sources: Sequence[RemoteFile],
        *,
        cache_bytes: int,
        check_stop: Callable[[], None],
        most_block_bytes: int = MOST_BLOCK_BYTES,
        records: Mapping[str, Sequence[Record]] | None = None,
    ) -> None:
        """`records`: by path, of archives whose directory is proven."""
        self._store = store
        self._sources = sources
        self._check_stop = check_stop
        share = cache_bytes // max(1, 2 * len(sources))
        size = LEAST_BLOCK_BYTES
        while size * 2 <= min(share, most_block_bytes):
            size *= 2
        self.block_bytes = size
        least = 16 if size < MOST_BLOCK_BYTES else 2
        self._most_blocks = max(least, cache_bytes // size)
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._coming: set[tuple[int, int]] = set()
        self._changed = threading.Condition()
        lock = threading.Lock()
        self._passed = [CrcRanges(crc64, crc64_combined, lock) for _ in sources]
        """Per source: of what was fetched. Joined as it comes: of terabytes there are millions of blocks."""
        known = records or {}
        self._sums = [RecordChecksums(known[s.path]) if s.path in known else None for s in sources]
        self.fetched_bytes = 0

    def path(self, source: int) -> str:
        """Return the path of a source."""
        return self._sources[source].path

    def read(self, source: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a source, out of blocks."""
        self._check_stop()
        sums = self._sums[source]
        if sums is not None:
            sums.ask(offset, nbytes)
        size = self.block_bytes
        first, last = offset // size, (offset + max(nbytes, 1) - 1) // size
        found = self._take(source, first, last)
        begin = offset - first * size
        if len(found) == 1:
            return found[0][begin : begin + nbytes]
        return b"".join(found)[begin : begin + nbytes]

    def _take(self, source: int, first: int, last: int) -> list[bytes]:
        """Blocks `first` to `last`, those that are missing in as few requests as possible."""
        held: dict[int, bytes] = {}
        while True:
            with self._changed:
                for number in range(first, last + 1):
                    block = self._blocks.get((source, number))
                    if block is not None:
                        held[number] = block
                        self._blocks.move_to_end((source, number))
                lacking = [n for n in range(first, last + 1) if n not in held]
                if not lacking:
                    return [held[n] for n in range(first, last + 1)]
                free = [n for n in lacking if (source, n) not in self._coming]
                if not free:  # another thread is fetching them
                    self._changed.wait(1.0)
                    continue
                run = [n for i, n in enumerate(free) if n == free[0] + i]
                self._coming |= {(source, n) for n in run}
            fetched: dict[int, bytes] = {}
            try:
                fetched = self._fetch(source, run)
            finally:
                with self._changed:
                    self._coming -= {(source, n) for n in run}
                    for number, block in fetched.items():
                        self._blocks[source, number] = block
                    while len(self._blocks) > self._most_blocks:
                        self._blocks.popitem(last=False)
                    self._changed.notify_all()
            held |= fetched

    def _fetch(self, source: int, run: list[int]) -> dict[int, bytes]:
        size = self.block_bytes
        offset = run[0] * size
        data = self._read_at(source, offset, (run[-1] + 1) * size - offset)
        return {number: data[i * size : (i + 1) * size] for i, number in enumerate(run)}

    def _read_at(self, source: int, offset: int, nbytes: int) -> bytes:
        file = self._sources[source]
        wanted = min(nbytes, file.bytes - offset)
        try:
            data = self._store.read_at(file.key, offset, wanted) if wanted > 0 else b""
        except FileNotFoundError as error:
            raise _gone(file, self._store) from error
        if len(data) != max(0, wanted):
            raise _gone(file, self._store)
        if file.crc64 is not None:
            self._passed[source].feed(offset, memoryview(data))
        sums = self._sums[source]
        if sums is not None:
            sums.feed(offset, memoryview(data))
        with self._changed:
            self.fetched_bytes += len(data)
        return data

    def take_over(self, source: int, offset: int, nbytes: int, crc: int) -> None:
        """Take over a range that another process read, and its CRC64, so that `prove` can skip it."""
        self._passed[source].take(offset, nbytes, crc)

    def recheck(self) -> None:
        """Every object still has the size and time that it had when it was planned (P4).

        Raises:
            SourceChanged: one has not.
        """
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="recheck") as pool:
            for file, found in zip(self._sources, pool.map(self._stat, self._sources), strict=True):
                if found is None or found.bytes != file.bytes or _is_other_time(file, found):
                    raise _gone(file, self._store)

    def _stat(self, file: RemoteFile) -> ObjectInfo | None:
        self._check_stop()
        return self._store.stat(file.key)

    def prove(self, *, everything: bool) -> ReadProof:
        """Compare files with their manifests' CRC64s; what was not needed of one is read to its end.

        Without `everything`, of files of which less than half was needed the records are compared that were
        read, where they are known; else such files are left.

        Raises:
            DamagedError: the bytes are not those that were committed.
            SourceChanged: they are, and were read otherwise.
        """
        compared = in_part = 0
        for number, file in enumerate(self._sources):
            if file.crc64 is None:
                continue
            is_part = self._passed[number].passed * _PROVEN_SHARE < file.bytes
            sums = self._sums[number]
            if is_part and not everything and (sums is None or sums.is_telling):
                if sums is not None:
                    self._compare_records(number, sums)
                in_part += 1
                continue
            found = self._crc_of(number)
            if to_hex(found) != file.crc64:
                raise self._wrong(number, f"CRC64 {to_hex(found)}, committed was {file.crc64}")
            compared += 1
        return ReadProof(compared=compared, in_part=in_part)

    def _compare_records(self, number: int, sums: RecordChecksums) -> None:
        """Read the rest of the records that were read in part, and raise if one has another checksum."""
        for begin, end in sums.gaps:
            self._read_range(number, begin, end)
        if sums.wrong is not None:
            raise self._wrong(number, str(sums.wrong))

    def _wrong(self, number: int, what: str) -> CkptdError:
        """Return the error for bytes that differ from the committed ones, after reading the object once more.

        All nodes may be told that the object is damaged, so one wrong read is not enough.
        """
        file = self._sources[number]
        again = RemoteRanges(self._store, [file], cache_bytes=0, check_stop=self._check_stop)
        if to_hex(again._crc_of(0)) == file.crc64:
            msg = f"{file.key} in {self._store.url} was read otherwise than it is: {what}"
            return SourceChanged(msg, hint="nothing was published; it is whole when it is read again")
        msg = f"{file.key} in {self._store.url} is damaged: {what}"
        hint = "nothing was published; see `ckptd verify`, and convert an older checkpoint"
        return DamagedError(msg, hint=hint)

    def _crc_of(self, number: int) -> int:
        """Return the CRC64 of the whole file: what was hashed, and the rest read now."""
        passed, size = self._passed[number], self._sources[number].bytes
        for begin, end in passed.gaps(0, size):
            self._read_range(number, begin, end)
        return passed.crc_of(0, size) or 0

    def _read_range(self, number: int, begin: int, end: int) -> None:
        for at in range(begin, end, MOST_BLOCK_BYTES):
            self._check_stop()
            self._read_at(number, at, min(MOST_BLOCK_BYTES, end - at))


def _is_other_time(file: RemoteFile, found: ObjectInfo) -> bool:
    """Listings know parts of a second, single answers often do not."""
    both = bool(file.mtime_ns and found.mtime_ns)
    return both and file.mtime_ns // 1_000_000_000 != found.mtime_ns // 1_000_000_000


def _gone(file: RemoteFile, store: Store) -> SourceChanged:
    return SourceChanged(
        f"{file.key} in {store.url} was written or removed while it was converted",
        hint="nothing was published; convert again, or another checkpoint",
    )
