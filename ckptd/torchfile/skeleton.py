"""Headers and tail of a `torch.save` archive whose storages are copied in by someone else.

It exists because torch's zip is simple enough to lay out without torch, and only so can the payload be
cloned or range-copied: with CRC 0 in every record the header does not depend on the payload
(docs/design.md §4, docs/formats.md §3). Records: data.pkl, byteorder, version, then the storages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
