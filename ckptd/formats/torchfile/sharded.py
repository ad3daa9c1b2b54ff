"""Read what proves other layouts whole: `.metadata` of torch, the header of safetensors, manifests."""

from __future__ import annotations

import json
import os
import re
from operator import index
from typing import Any, NamedTuple

from ckptd.base.names import stays_inside
from ckptd.errors import TornArchiveError
from ckptd.formats.torchfile.archive import DEFAULT_LIMITS, Directory
from ckptd.formats.torchfile.rebuild import Rebuilder
from ckptd.formats.torchfile.unpickler import run_pickle
from ckptd.formats.torchfile.values import Inert

_HEADER_LIMIT_BYTES = 16 << 20
"""A hundred bytes for each tensor are usual; the library allows six times that."""
_NAME_LETTERS = 255
_SHA256 = re.compile("[0-9a-fA-F]{64}")


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


class ListedPart(NamedTuple):
    """A file that a manifest lists."""

    name: str
    size_bytes: int | None = None
    sha256: str = ""


def listed_files(data: bytes, name: str) -> list[ListedPart]:
    """Return the files that a manifest lists, which is JSON or lines as `sha256sum` writes them.

    JSON: a list of names or of objects with `name` (or `path`), `size` (or `bytes`) and `sha256`; or an
    object of these by name, or of sizes or SHA-256 by name; either may stand below the key `files`. A line
    is a name, with a SHA-256 before it or not.

    Raises:
        TornArchiveError: it is none of these, or names what lies elsewhere.
    """
    try:
        text = data.decode()
        rows = json.loads(text) if text.lstrip()[:1] in ("[", "{") else text.splitlines()
        if isinstance(rows, dict):
            rows = rows.get("files", rows)
        if isinstance(rows, dict):
            rows = [_listed_row(value) | {"name": key} for key, value in rows.items()]
        found = [_listed_part(row if isinstance(row, dict) else _line(row)) for row in rows if row]
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise TornArchiveError(f"{name} is no manifest that ckptd reads, or is cut off") from error
    for part in found:
        if not stays_inside(part.name):
            raise TornArchiveError(f"{name} names {part.name!r}, which leads out of its folder")
    return found


def _listed_row(value: Any) -> dict[str, Any]:
    """Return what a manifest says of the file that is the key of this value."""
    if isinstance(value, dict):
        return value
    return {"sha256" if isinstance(value, str) else "size": value}


def _listed_part(row: dict[str, Any]) -> ListedPart:
    name, size = row.get("name") or row["path"], row.get("size", row.get("bytes"))
    if not isinstance(name, str) or not isinstance(size, int | None) or isinstance(size, bool):
        raise TypeError(name)
    sha256 = str(row.get("sha256") or "").lower()
    if sha256 and not _SHA256.fullmatch(sha256):
        raise ValueError(sha256)
    return ListedPart(name.removeprefix("./"), size, sha256)


def _line(text: str) -> dict[str, Any]:
    """Read a line: a name, or a SHA-256, a space, a space or a star, and a name."""
    mark, _, name = text.partition(" ")
    if _SHA256.fullmatch(mark):
        return {"name": name[1:] if name[:1] in " *" else name, "sha256": mark}
    return {"name": text.strip()}


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
