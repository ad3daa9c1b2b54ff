"""Write headers and tail of a `torch.save` archive whose storages are copied in by someone else.

It exists because torch's zip is simple enough to lay out without torch, and only so can the payload be
cloned or range-copied: with CRC 0 in every record the header does not depend on the payload
(docs/design.md §4, docs/formats.md §3). Records: data.pkl, byteorder, version, then the storages.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.errors import DamagedError, NeedsWholeFiles
from ckptd.formats.torchfile.archive import (
    AT_ONCE_BYTES,
    LOCAL_HEADER_BYTES,
    TAIL_BYTES,
    Framing,
    directory_place,
    frame,
    read_directory,
    read_entries,
)
from ckptd.formats.torchfile.fingerprint import has_crc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PREFIX = "archive"
ALIGN_BYTES = 64
BLOCK_BYTES = 4096
"""Clone granularity: block size of XFS and btrfs."""
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_SATURATED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for `nbytes`; `congruent`: wanted file offset modulo BLOCK_BYTES, None = aligned to 64."""

    key: str
    nbytes: int
    congruent: int | None = None


@dataclass(frozen=True, slots=True)
class Skeleton:
    """`chunks[i]` comes before the payload of slot i, the last chunk ends the file; sizes in bytes."""

    chunks: tuple[bytes, ...]
    slot_bytes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size of the finished file."""
        return sum(map(len, self.chunks)) + sum(self.slot_bytes)


def skeleton(pickle: bytes, slots: Sequence[Slot]) -> Skeleton:
    """Lay out an archive with `pickle` as data.pkl and one record `data/<key>` per slot, in order."""
    builder = _Builder()
    for name, data in (("data.pkl", pickle), ("byteorder", b"little"), ("version", b"3\n")):
        builder.record(name, len(data), None)
        builder.literal(data)
    for slot in slots:
        builder.record(f"data/{slot.key}", slot.nbytes, slot.congruent)
        builder.slot(slot.nbytes)
    return builder.finish()


class _Builder:
    """Accumulates bytes; `at` is the file offset reached."""

    def __init__(self) -> None:
        self.at = 0
        self.pending: list[bytes] = []
        self.chunks: list[bytes] = []
        self.sizes: list[int] = []
        self.central: list[bytes] = []

    def literal(self, data: bytes) -> None:
        self.pending.append(data)
        self.at += len(data)

    def slot(self, nbytes: int) -> None:
        self.chunks.append(b"".join(self.pending))
        self.pending = []
        self.sizes.append(nbytes)
        self.at += nbytes

    def record(self, name: str, nbytes: int, congruent: int | None) -> None:
        """A local header, padded so that the payload begins where it should."""
        label = f"{PREFIX}/{name}".encode()
        wide = nbytes >= _SATURATED
        size = _SATURATED if wide else nbytes
        extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if wide else b""
        start = self.at + _LOCAL.size + len(label) + len(extra) + 4
        modulus, wanted = (ALIGN_BYTES, 0) if congruent is None else (BLOCK_BYTES, congruent)
        padding = (wanted - start) % modulus
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        offset = self.at
        self.literal(
            _LOCAL.pack(b"PK\x03\x04", 45 if wide else 20, 0, 0, 0, 0, 0, size, size, len(label), len(extra))
        )
        self.literal(label + extra)
        self.central.append(self._central(label, nbytes, offset))

    @staticmethod
    def _central(label: bytes, nbytes: int, offset: int) -> bytes:
        values = [v for v in (nbytes, nbytes, offset) if v >= _SATURATED]
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        size, where = min(nbytes, _SATURATED), min(offset, _SATURATED)
        version = 45 if values else 20
        header = (version, version, 0, 0, 0, 0, 0, size, size, len(label), len(extra), 0, 0, 0, 0, where)
        return _CENTRAL.pack(b"PK\x01\x02", *header) + label + extra

    def finish(self) -> Skeleton:
        start, count = self.at, len(self.central)
        directory = b"".join(self.central)
        self.literal(directory)
        end64 = self.at
        self.literal(
            struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
        )
        self.literal(struct.pack("<4sLQL", b"PK\x06\x07", 0, end64, 1))
        few = min(count, 0xFFFF)
        length, where = min(len(directory), _SATURATED), min(start, _SATURATED)
        self.literal(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, few, few, length, where, 0))
        self.chunks.append(b"".join(self.pending))
        return Skeleton(tuple(self.chunks), tuple(self.sizes))


# --- The mirror of a remote archive: a sparse file of what planning reads ---------------------
# With it the process that reads pickles needs neither network nor credentials: its parent fetches the zip
# directory, the local headers, `data.pkl` and records up to `SMALL_BYTES`; all else are holes. No pickle is
# read here.

SMALL_BYTES = 64 << 10
"""Records up to this are mirrored whole: the step of an optimizer is a tensor of one element."""
_GAP_BYTES = 32 << 10
_MORE_TAIL_BYTES = 4096
END_BYTES = 4096
"""Bytes at both ends of a small archive that hold all its records but tensors: torch writes six or seven."""
WHOLE = "bring it here (`ckptd restore`) and convert that"


class MirrorFd(int):
    """A descriptor of a mirror: values may be read from small records alone."""


def fill(
    fd: int,
    name: str,
    fetch: Callable[[int, int], bytes],
    *,
    needs_crcs: bool = True,
    is_one_of_many: bool = False,
) -> None:
    """Fill the mirror open at `fd`, which has its final size, with what planning reads.

    `fetch(offset, nbytes)` gives bytes of the remote file. What is no archive is left to the planner to say.
    `needs_crcs`: False where no fingerprint is made of the mirror. `is_one_of_many`: of a file that holds
    thousands, each of one tensor: little is fetched beyond its headers.

    Raises:
        TornArchiveError: a directory that leaves the file.
        DamagedError: a record that was fetched is not what `torch.save` wrote.
        NeedsWholeFiles: its fingerprint needs all its bytes (of before zip archives, or without CRCs).
    """
    size = os.fstat(fd).st_size
    head = min(size, END_BYTES if is_one_of_many else SMALL_BYTES)
    tail = max(0, size - (END_BYTES if is_one_of_many else TAIL_BYTES + _MORE_TAIL_BYTES))
    _bring(fd, fetch, [(0, head), (tail, size - tail)])
    framing = frame(fd, expected=True)
    if framing is Framing.LEGACY:
        raise NeedsWholeFiles(f"{name} is of torch's format before zip archives", hint=WHOLE)
    if framing is not Framing.ZIP:
        return
    start, length = directory_place(fd, name)
    is_apart = is_one_of_many or start > AT_ONCE_BYTES
    _bring(fd, fetch, [(start, length)] if is_apart else [(0, start + length)])
    headers = (entry.header for entry in read_entries(fd, name))
    _bring(fd, fetch, ((offset, min(LOCAL_HEADER_BYTES, size - offset)) for offset in headers))
    directory = read_directory(fd, name)
    if needs_crcs and not has_crc(directory):
        raise NeedsWholeFiles(f"{name} was written without CRC32s", hint=WHOLE)
    records = directory.records.values()
    wanted = [r for r in records if r.name == "data.pkl" or r.size <= SMALL_BYTES]
    _bring(fd, fetch, ((record.offset, record.size) for record in wanted))
    for record in wanted:
        if record.crc and zlib.crc32(os.pread(fd, record.size, record.offset)) != record.crc:
            raise DamagedError(f"{name}: record {record.name} is not what torch.save wrote")


def _bring(fd: int, fetch: Callable[[int, int], bytes], ranges: Iterable[tuple[int, int]]) -> None:
    """Fetch ranges (offset, bytes) and write them where they belong; near ones in one go."""
    for begin, end in joined(ranges):
        data, at = fetch(begin, end - begin), begin
        while data:
            count = os.pwrite(fd, data, at)
            at, data = at + count, data[count:]


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (begin, end) of ranges (offset, bytes) in order; what lies near each other is one."""
    found: list[tuple[int, int]] = []
    for offset, nbytes in sorted(r for r in ranges if r[1] > 0):
        if found and offset - found[-1][1] <= _GAP_BYTES:
            found[-1] = (found[-1][0], max(found[-1][1], offset + nbytes))
        else:
            found.append((offset, offset + nbytes))
    return found
