"""Read a `torch.save` archive as named byte ranges, from the zip's central directory alone.

It exists because conversion, fingerprints and completeness need offsets, sizes and CRCs, never the
payload, and because Python's `zipfile` neither proves that records lie inside the file nor that they
do not overlap. Formats: docs/formats.md §3; limits and refusals: docs/design.md P14.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from ckptd.errors import RefusedError, TornArchiveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds; a file beyond one of them is refused with a sentence, not read further."""

    directory_bytes: int = 64 << 20
    """Central directory of the zip."""
    records: int = 500_000
    name_bytes: int = 4096
    pickle_bytes: int = 64 << 20
    """`data.pkl`: kilobytes for a shard, some megabytes with a large client_state."""
    operations: int = 8_000_000
    """Pickle opcodes executed."""
    memo_entries: int = 4_000_000
    key_depth: int = 6
    """Nesting of tuples used as dictionary keys (a deeper one could hash for ever)."""
    key_items: int = 1_000_000
    """Items of all tuples used as keys: few nested ones that share their items hash for ever, too."""
    dimensions: int = 64
    line_bytes: int = 4096
    """Text-mode opcodes (protocol 0) end at a newline within this."""


DEFAULT_LIMITS = Limits()


_EOCD = struct.Struct("<4s4H2LH")
_EOCD64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
AT_ONCE_BYTES = 1 << 20
"""A file up to this (model states of stage 3 with hundreds of empty records) is read in one go."""
TAIL_BYTES = 65_535 + _EOCD.size
"""Bytes at the end of a file in which the end of a zip is looked for."""
LOCAL_HEADER_BYTES = _LOCAL.size
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ENCRYPTED_FLAGS = 0x2041


class Framing(StrEnum):
    """Name the framing of a file's bytes, in the words of `ckptd.core.model.facts.Archive`."""

    ZIP = "zip"
    LEGACY = "legacy"
    TORN = "torn"
    EMPTY = "empty"
    OTHER = "other"


class DirectoryEntry(NamedTuple):
    """One record as the central directory tells of it."""

    label: str
    """Name, the archive's prefix included."""
    header: int
    """Offset of its local header."""
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Record:
    """One stored record: payload at `[offset, offset + size)` of the file, bytes."""

    name: str
    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Directory:
    """A validated archive; `prefix` is the first path component of every record ("archive", a stem …)."""

    prefix: str
    records: dict[str, Record]
    """Name without the prefix ("data.pkl", "data/0", "version" …) → record, in directory order."""
    has_crcs: bool = True
    """False for legacy files, whose framing has none."""

    def storages(self) -> list[Record]:
        """Return the tensor payloads (`data/<key>`), in directory order."""
        return [record for name, record in self.records.items() if name.startswith("data/")]


def frame(fd: int, *, expected: bool) -> Framing:
    """Classify by the first bytes: `expected` says that the name promises a torch archive.

    A zip whose directory is invalid is still `ZIP` here; `read_directory` tells.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return Framing.EMPTY
    head = os.pread(fd, 16, 0)
    if head.startswith(b"PK"):
        return Framing.ZIP
    if head.startswith(LEGACY_MAGIC):
        return Framing.LEGACY
    return Framing.TORN if expected else Framing.OTHER


def read_directory(fd: int, name: str, limits: Limits = DEFAULT_LIMITS) -> Directory:
    """Read and validate the central directory of the archive open at `fd`.

    `name` is only used in messages.

    Raises:
        TornArchiveError: truncated, empty, garbled, records outside the file or overlapping.
        RefusedError: encrypted, compressed, or beyond `limits`.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        raise TornArchiveError(f"{name} is empty")
    start, length, count = _checked_place(fd, name, size, limits)
    raw = _read_exactly(fd, length, start, name)
    entries = _parse_entries(raw, count, name, limits)
    return _validated(fd, entries, start, name)


def directory_place(fd: int, name: str, limits: Limits = DEFAULT_LIMITS) -> tuple[int, int]:
    """Return (offset, bytes) of the central directory, from the last `TAIL_BYTES` and a little more.

    Raises:
        TornArchiveError, RefusedError: as `read_directory`.
    """
    return _checked_place(fd, name, os.fstat(fd).st_size, limits)[:2]


def read_entries(fd: int, name: str, limits: Limits = DEFAULT_LIMITS) -> list[DirectoryEntry]:
    """Return the entries of the central directory in its order; their records are not looked at.

    Raises:
        TornArchiveError, RefusedError: as `read_directory`.
    """
    start, length, count = _checked_place(fd, name, os.fstat(fd).st_size, limits)
    entries = _parse_entries(_read_exactly(fd, length, start, name), count, name, limits)
    return [entry for entry in entries if entry.header + _LOCAL.size <= start]


def entries_of_all(fd: int, name: str, limits: Limits = DEFAULT_LIMITS) -> list[DirectoryEntry] | None:
    """Return the entries of zips that lie one behind another and fill the file, as in a `.distcp` file.

    Offsets are the file's. None: it is no such file, or has more than `limits` allow.
    """
    found: list[DirectoryEntry] = []
    end = os.fstat(fd).st_size
    try:
        while end > 0:
            start, length, count, bound = _place_before(fd, name, end)
            begin = bound - length - start
            if begin < 0 or len(found) + count > limits.records or length > limits.directory_bytes:
                return None
            raw = _read_exactly(fd, length, begin + start, name)
            entries = _parse_entries(raw, count, name, limits)
            found += [entry._replace(header=begin + entry.header) for entry in entries]
            end = begin
    except (TornArchiveError, RefusedError, struct.error):
        return None
    return found


def _place_before(fd: int, name: str, end: int) -> tuple[int, int, int, int]:
    """Return as `_locate_directory` of a zip without a comment that ends at `end`, however much is before it.

    Where its directory lies is told from its own begin, where it ended from the file's.
    """
    at = end - _EOCD.size
    _, disk, first_disk, here, count, length, start, comment = _EOCD.unpack(
        _read_exactly(fd, _EOCD.size, at, name)
    )
    if disk or first_disk or here != count or comment:
        raise TornArchiveError(f"{name} holds more than zips")
    locator = os.pread(fd, _LOCATOR64.size, at - _LOCATOR64.size) if at >= _LOCATOR64.size else b""
    if not locator.startswith(b"PK\x06\x07"):
        return start, length, count, at
    at -= _LOCATOR64.size + _EOCD64.size
    fields = _EOCD64.unpack(_read_exactly(fd, _EOCD64.size, at, name))
    if fields[0] != b"PK\x06\x06":
        raise TornArchiveError(f"{name} has a garbled zip64 directory")
    return fields[9], fields[8], fields[7], at


def _checked_place(fd: int, name: str, size: int, limits: Limits) -> tuple[int, int, int]:
    start, length, count, bound = _locate_directory(fd, name, size)
    # Before the limits: an end record that lost its fields to zeros, or has a wrong length, would be refused
    # as the zip of something else, and such a file is sent as it is.
    if start + length != bound:
        raise TornArchiveError(f"{name} has a zip directory that does not end where its end record begins")
    if length > limits.directory_bytes or count > limits.records:
        raise RefusedError(f"{name} declares a zip directory of {length} bytes with {count} records")
    return start, length, count


def _read_exactly(fd: int, length: int, offset: int, name: str) -> bytes:
    data = os.pread(fd, length, offset) if offset >= 0 else b""
    if len(data) != length:
        raise TornArchiveError(f"{name} ends at byte {offset + len(data)}, {length - len(data)} too early")
    return data


def _locate_directory(fd: int, name: str, size: int) -> tuple[int, int, int, int]:
    """(start, length, records, bound) of the central directory; `bound` is where it must have ended."""
    tail_start = max(0, size - TAIL_BYTES)
    tail = os.pread(fd, size - tail_start, tail_start)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if at + _EOCD.size <= len(tail):
            fields = _EOCD.unpack_from(tail, at)
            if at + _EOCD.size + fields[7] == len(tail):
                break
        at = tail.rfind(b"PK\x05\x06", 0, at)
    else:
        raise TornArchiveError(f"{name} has no zip directory at its end")
    _, disk, first_disk, here, count, length, start, _ = _EOCD.unpack_from(tail, at)
    end = tail_start + at
    if end >= _LOCATOR64.size:
        locator = os.pread(fd, _LOCATOR64.size, end - _LOCATOR64.size)
        if locator.startswith(b"PK\x06\x07"):
            return _locate_directory64(fd, name, locator, end)
    if disk or first_disk or here != count:
        raise TornArchiveError(f"{name} claims to be one part of a split zip")
    return start, length, count, end


def _locate_directory64(fd: int, name: str, locator: bytes, end: int) -> tuple[int, int, int, int]:
    _, disk, where, _ = _LOCATOR64.unpack(locator)
    if disk or where + _EOCD64.size > end:
        raise TornArchiveError(f"{name} has a zip64 locator that points outside the file")
    fields = _EOCD64.unpack(_read_exactly(fd, _EOCD64.size, where, name))
    if fields[0] != b"PK\x06\x06" or fields[6] != fields[7]:
        raise TornArchiveError(f"{name} has a garbled zip64 directory")
    return fields[9], fields[8], fields[7], where


def _parse_entries(raw: bytes, count: int, name: str, limits: Limits) -> list[DirectoryEntry]:
    entries: list[DirectoryEntry] = []
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(raw):
            raise TornArchiveError(f"{name} has a zip directory shorter than its {count} records")
        fields = _CENTRAL.unpack_from(raw, at)
        signature, flags, method, crc, packed, size = fields[0], fields[3], fields[4], *fields[7:10]
        name_length, extra_length, comment_length, offset = fields[10], fields[11], fields[12], fields[16]
        end = at + _CENTRAL.size + name_length + extra_length + comment_length
        if signature != b"PK\x01\x02" or end > len(raw):
            raise TornArchiveError(f"{name} has a garbled zip directory")
        label_bytes = raw[at + _CENTRAL.size : at + _CENTRAL.size + name_length]
        if name_length > limits.name_bytes:
            raise RefusedError(f"{name} has a record name of {name_length} bytes")
        try:
            label = label_bytes.decode()
        except UnicodeDecodeError as error:
            raise TornArchiveError(f"{name} has a record name that is no UTF-8") from error
        if flags & _ENCRYPTED_FLAGS:
            raise RefusedError(f"{name} has an encrypted record ({label})")
        extra = raw[at + _CENTRAL.size + name_length : end - comment_length]
        size, packed, offset = _widen(extra, size, packed, offset, name)
        if method != 0 or packed != size:
            raise RefusedError(f"{name} has a compressed record ({label}); torch.save stores them plainly")
        entries.append(DirectoryEntry(label, offset, size, crc))
        at = end
    return entries


def _widen(extra: bytes, size: int, packed: int, offset: int, name: str) -> tuple[int, int, int]:
    """Apply the zip64 extra field (id 1) to the 32-bit values that are saturated."""
    values = [size, packed, offset]
    if 0xFFFFFFFF not in values:
        return size, packed, offset
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wanted = [i for i, value in enumerate(values) if value == 0xFFFFFFFF]
            if len(field) < 8 * len(wanted):
                break
            for place, i in enumerate(wanted):
                values[i] = struct.unpack_from("<Q", field, 8 * place)[0]
            return values[0], values[1], values[2]
        at += 4 + length
    raise TornArchiveError(f"{name} has a record of 4 GiB or more without its zip64 sizes")


def _validated(fd: int, entries: list[DirectoryEntry], directory_start: int, name: str) -> Directory:
    """Follow every entry to its local header; prove bounds, order and uniqueness."""
    prefix = _prefix(entries, name)
    placed: dict[str, Record] = {}
    spans: list[tuple[int, int, str]] = []
    small = os.pread(fd, directory_start, 0) if directory_start <= AT_ONCE_BYTES else b""
    for label, header, size, crc in entries:
        if not label.startswith(prefix + "/"):
            raise TornArchiveError(f"{name} mixes record prefixes ({label} beside {prefix}/data.pkl)")
        if header + _LOCAL.size > directory_start:
            raise TornArchiveError(f"{name} has a record ({label}) outside the file")
        local = _LOCAL.unpack(
            small[header : header + _LOCAL.size]
            if len(small) == directory_start
            else _read_exactly(fd, _LOCAL.size, header, name)
        )
        if local[0] != b"PK\x03\x04" or local[3] != 0 or local[9] != len(label.encode()):
            raise TornArchiveError(f"{name} has no local header where its directory says ({label})")
        offset = header + _LOCAL.size + local[9] + local[10]
        if offset + size > directory_start:
            raise TornArchiveError(f"{name} has a record ({label}) that leaves the file")
        short = label[len(prefix) + 1 :]
        if short in placed:
            raise TornArchiveError(f"{name} lists {label} twice")
        placed[short] = Record(short, offset, size, crc)
        spans.append((header, offset + size, label))
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise TornArchiveError(f"{name} has overlapping records ({first} and {second})")
    return Directory(prefix, placed)


def _prefix(entries: list[DirectoryEntry], name: str) -> str:
    found = [label[: -len("/data.pkl")] for label, *_ in entries if label.endswith("/data.pkl")]
    found = [prefix for prefix in found if prefix and "/" not in prefix]
    if len(found) != 1:
        raise RefusedError(f"{name} is a zip but no torch.save archive (no single data.pkl)")
    return found[0]
