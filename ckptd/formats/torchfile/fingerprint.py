"""Fingerprints: what tells two saves apart and makes replicas recognisable, for the price of two reads.

docs/design.md §3 *Fingerprint*: SHA-256 over the zip directory's names, sizes and CRC32s; the tensor
fingerprint is the same over the storages only, so that replicas whose pickles differ still agree. A `.distcp`
file is zips one behind another, each with its directory. An archive without CRC32s may be as large as a shard
is: its small records are read, of the others samples. A legacy file has no directory: samples of it are read
at places that its size alone decides, so that whoever must not unpickle can compare it too. Of any other file
every byte is read.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from typing import TYPE_CHECKING

from ckptd.errors import DamagedError
from ckptd.formats.torchfile.archive import Framing, Record, entries_of_all, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptd.formats.torchfile.archive import Directory

_BLOCK_BYTES = 1 << 20
_CRC_MATTERS_BYTES = 1024
_SAMPLE_BYTES = 4096
_FILE_SAMPLES = 2048
"""Samples of a legacy file: all of one up to 8 MiB, 8 MiB of a larger one."""
_STORAGE_SAMPLES = 16
"""Samples of each storage of a legacy file."""
_ARCHIVE_SAMPLES = 512
"""Samples of an archive without CRC32s, shared out by size."""
_SMALL_RECORD_BYTES = 64 << 10
"""Largest record that is read whole in an archive without CRC32s: steps and schedules differ there."""


def has_crc(directory: Directory) -> bool:
    """Tell whether the directory's CRC32s say something of every record of 1 KiB or more."""
    large = (r for r in directory.records.values() if r.size >= _CRC_MATTERS_BYTES)
    return directory.has_crcs and all(record.crc != 0 for record in large)


def directory_digest(records: Iterable[Record], prefix: str) -> str:
    """SHA-256 hex over (name, size, CRC32) of the records, sorted by name."""
    digest = hashlib.sha256()
    for record in sorted(records, key=lambda r: r.name):
        name = f"{prefix}/{record.name}" if prefix else record.name
        digest.update(f"{name}\0{record.size}\0{record.crc:08x}\n".encode())
    return digest.hexdigest()


def fingerprint(fd: int, directory: Directory | None, alive: Callable[[], object] = bool) -> str:
    """Fingerprint of the file open at `fd`; `directory` None when it is no zip (SHA-256 hex).

    `alive`: called for each block where all of a file is read.
    """
    if directory is not None:
        if has_crc(directory):
            return directory_digest(directory.records.values(), directory.prefix)
        if directory.has_crcs:
            return _sampled(fd, directory.records.values())
    size = os.fstat(fd).st_size
    framing = frame(fd, expected=False)
    if framing is Framing.LEGACY:
        return _samples(fd, 0, size, _FILE_SAMPLES).hexdigest()
    entries = entries_of_all(fd, "it") if directory is None and framing is Framing.ZIP else None
    if entries and all(entry.crc or entry.size < _CRC_MATTERS_BYTES for entry in entries):
        records = (Record(f"{e.header} {e.label}", e.header, e.size, e.crc) for e in entries)
        return directory_digest(records, "")
    digest = hashlib.sha256()
    for block in _blocks(fd, 0, size, alive):
        digest.update(block)
    return digest.hexdigest()


def _sampled(fd: int, records: Iterable[Record]) -> str:
    """SHA-256 hex over (name, size) of the records, all of the small ones, and samples of the others."""
    chosen = sorted(records, key=lambda r: r.name)
    total = sum(record.size for record in chosen)
    digest = hashlib.sha256(b"samples\0")
    for record in chosen:
        digest.update(f"{record.name}\0{record.size}\n".encode())
        share = _ARCHIVE_SAMPLES * record.size // max(total, 1)
        is_small = record.size <= _SMALL_RECORD_BYTES
        count = -(-record.size // _SAMPLE_BYTES) if is_small else max(2, share)
        digest.update(_samples(fd, record.offset, record.size, count).digest())
    return digest.hexdigest()


def raw_fingerprint(fd: int) -> str:
    """Fingerprint of a tensor's plain bytes, from their number and a few samples (SHA-256 hex)."""
    return _samples(fd, 0, os.fstat(fd).st_size, _STORAGE_SAMPLES).hexdigest()


def raw_samples(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of what `raw_fingerprint` reads of a file."""
    for place in _places(size_bytes, _STORAGE_SAMPLES):
        yield place, min(_SAMPLE_BYTES, size_bytes - place)


def _samples(fd: int, offset: int, length: int, count: int) -> hashlib._Hash:
    """Digest of a range's length and of `count` evenly spaced blocks, its first and last among them.

    All of it is read when that is no more.
    """
    digest = hashlib.sha256(f"{length}\0".encode())
    for place in _places(length, count):
        for block in _blocks(fd, offset + place, min(_SAMPLE_BYTES, length - place)):
            digest.update(block)
    return digest


def _places(length: int, count: int) -> list[int]:
    if length <= count * _SAMPLE_BYTES:
        return list(range(0, length, _SAMPLE_BYTES))
    return [i * (length - _SAMPLE_BYTES) // (count - 1) for i in range(count)]


def tensor_fingerprint(fd: int, directory: Directory) -> str:
    """Fingerprint over the storages only: equal for replicas whose pickles differ (SHA-256 hex)."""
    storages = directory.storages()
    if has_crc(directory):
        return directory_digest(storages, "")
    if not directory.has_crcs:  # keys are addresses of the process that saved: only the bytes compare
        parts = (_samples(fd, r.offset, r.size, _STORAGE_SAMPLES).digest() for r in storages)
        return hashlib.sha256(b"".join(sorted(parts))).hexdigest()
    return _sampled(fd, storages)


def check_crcs(fd: int, directory: Directory, name: str) -> int:
    """Read every record and compare its CRC32 with the directory's; returns the bytes read.

    Records without a CRC (0 and ≥ 1 KiB) prove nothing and are skipped.

    Raises:
        DamagedError: a record's bytes are not those that `torch.save` wrote.
    """
    checked = 0
    for record in directory.records.values():
        if record.crc == 0 and record.size >= _CRC_MATTERS_BYTES:
            continue
        crc = 0
        for block in _blocks(fd, record.offset, record.size):
            crc = zlib.crc32(block, crc)
        if crc != record.crc and not (record.crc == 0):
            raise DamagedError(
                f"{name}: record {record.name} has CRC {crc:08x}, written as {record.crc:08x}",
                hint="a bit flipped since the save; use another copy of this checkpoint",
            )
        checked += record.size
    return checked


def _blocks(fd: int, offset: int, length: int, alive: Callable[[], object] = bool) -> Iterator[bytes]:
    """Blocks of a range; what was read is dropped from the page cache behind us (P12)."""
    end = offset + length
    while offset < end:
        block = os.pread(fd, min(_BLOCK_BYTES, end - offset), offset)
        if not block:
            raise DamagedError(f"a file ended {end - offset} bytes early while it was read")
        yield block
        alive()
        offset += len(block)
