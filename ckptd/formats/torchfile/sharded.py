"""Read what proves files of other layouts whole: `.metadata` of torch, the header of safetensors."""

from __future__ import annotations

import json
import os
from operator import index
from typing import Any

from ckptd.errors import TornArchiveError
from ckptd.formats.torchfile.archive import DEFAULT_LIMITS, Directory
from ckptd.formats.torchfile.rebuild import Rebuilder
from ckptd.formats.torchfile.unpickler import run_pickle
from ckptd.formats.torchfile.values import Inert

_HEADER_LIMIT_BYTES = 16 << 20
"""A hundred bytes for each tensor are usual; the library allows six times that."""
_NAME_LETTERS = 255


def named_parts(data: bytes, name: str) -> list[tuple[str, int]]:
    """Return (file, least bytes) of every file that a `.metadata` says tensors or objects lie in.

    Raises:
        TornArchiveError: it is cut off, or no `Metadata`. RefusedError: work beyond the limits.
    """
    directory = Directory(prefix="", records={}, file_bytes=len(data))
    found = run_pickle(data, name, Rebuilder(name, directory, DEFAULT_LIMITS), DEFAULT_LIMITS)[0]
    rows = found.field("storage_data") if isinstance(found, Inert) else None
    if not isinstance(rows, dict):
        raise TornArchiveError(f"{name} is no metadata of torch.distributed.checkpoint")
    ends: dict[str, int] = {}
    for row in rows.values():
        path, offset, length = (_field(row, what) for what in ("relative_path", "offset", "length"))
        if (
            type(path) is not str
            or len(path) > _NAME_LETTERS
            or type(offset) is not int
            or type(length) is not int
        ):
            raise TornArchiveError(f"{name} names a part without its place")
        ends[path] = max(ends.get(path, 0), offset + length)
    return sorted(ends.items())


def _field(row: Any, name: str) -> Any:
    return row.field(name) if isinstance(row, Inert) else None


def torn_safetensors(fd: int, size_bytes: int) -> str | None:
    """Say why an open safetensors file is not whole, None when it is: its header tells where it ends."""
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size_bytes - 8, _HEADER_LIMIT_BYTES):
        return "ends within its header"
    try:
        rows = json.loads(os.pread(fd, length, 8))
        ends = [row["data_offsets"][1] for name, row in rows.items() if name != "__metadata__"]
        end = max(map(index, ends), default=0)
    except (ValueError, RecursionError, MemoryError, AttributeError, TypeError, KeyError, IndexError):
        return "has no header of safetensors"
    return None if size_bytes == 8 + length + end else f"has {size_bytes} bytes, not {8 + length + end}"
