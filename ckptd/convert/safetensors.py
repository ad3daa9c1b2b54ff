"""The safetensors file format: a length, a JSON header, then tensors one after another without a gap.

Written here by hand because the tensors are byte ranges of other files and never pass through memory
(docs/formats.md §8). Within a file tensors go by size of their elements, then by name, as the library does.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.convert.parts import Literal, Part, Range
from ckptd.errors import DamagedError, RefusedError
from ckptd.torchfile.skeleton import BLOCK_BYTES
from ckptd.torchfile.values import ITEM_BYTES

if TYPE_CHECKING:
    from ckptd.convert.plan import OutputCheck

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
MAX_HEADER_BYTES = 100_000_000
"""What the library reads at most."""
ALIGNMENT_BYTES = 8
CLONE_WORTH_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor: row-major elements of `dtype` (torch's name), made by `parts`; checks of its copies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    checks: tuple[OutputCheck, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(part.nbytes for part in self.parts)


def file_parts(entries: Sequence[Entry], *, block: bool) -> tuple[Part, ...]:
    """The parts of a file that holds `entries`; `block`: place the data so that most of it can be cloned.

    Raises:
        RefusedError: a type that the format does not have, or a header beyond its limit.
    """
    ordered = sorted(entries, key=lambda e: (-ITEM_BYTES[e.dtype], e.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in ordered:
        if entry.dtype not in DTYPES:
            raise RefusedError(f"{entry.name} is of type {entry.dtype}, which safetensors does not have")
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    parts = [part for entry in ordered for part in entry.parts]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    length = 8 + len(text)
    if block and (wanted := _congruence(parts)) is not None:
        length += (wanted - length) % BLOCK_BYTES
    length += -length % ALIGNMENT_BYTES
    if length - 8 > MAX_HEADER_BYTES:
        raise RefusedError(
            "its header would be larger than safetensors allows", hint="a smaller --max-shard-size"
        )
    return (Literal(struct.pack("<Q", length - 8) + text.ljust(length - 8)), *parts)


def _congruence(parts: Sequence[Part]) -> int | None:
    """Where the data should begin, modulo the block, so that most bytes can be cloned; None: nothing can."""
    gains: dict[int, int] = {}
    at = 0
    for part in parts:
        if isinstance(part, Range) and part.nbytes >= CLONE_WORTH_BYTES:
            place = (part.offset - at) % BLOCK_BYTES
            if place % ALIGNMENT_BYTES == 0:
                gains[place] = gains.get(place, 0) + part.nbytes
        at += part.nbytes
    return max(gains, key=lambda place: gains[place]) if gains else None


def read_names(fd: int, path: str) -> list[str]:
    """Names of the tensors in the file open at `fd`, whose header must account for every byte.

    Raises:
        DamagedError: truncated, or a header that is none or leaves gaps.
    """
    size = os.fstat(fd).st_size
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little") if len(head) == 8 else size
    if 8 + length > size or length > MAX_HEADER_BYTES:
        raise DamagedError(f"{path} ends inside its header")
    try:
        header = json.loads(os.pread(fd, length, 8))
        header.pop("__metadata__", None)
        spans = sorted(tuple(int(n) for n in entry["data_offsets"]) for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} has no safetensors header") from error
    at = 0
    for begin, end in spans:
        if begin != at or end < begin:
            raise DamagedError(f"{path} has a gap or an overlap at byte {at} of its data")
        at = end
    if 8 + length + at != size:
        raise DamagedError(f"{path} holds {size} bytes instead of {8 + length + at}")
    return [str(name) for name in header]
