"""Read and write `.metadata` of torch.distributed.checkpoint; tell whether a safetensors file is whole.

A `.distcp` file is a row of `torch.save` archives; `.metadata` is a pickle that says of each name where its
chunks lie (docs/formats.md §9).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError, TornArchiveError
from ckptd.formats.torchfile.archive import DEFAULT_LIMITS, Directory
from ckptd.formats.torchfile.rebuild import Rebuilder
from ckptd.formats.torchfile.repickle import WRITABLE, repickle
from ckptd.formats.torchfile.unpickler import run_pickle
from ckptd.formats.torchfile.values import ITEM_BYTES, Global, Inert, Size

if TYPE_CHECKING:
    from collections.abc import Mapping

METADATA = ".metadata"
SUFFIX = ".distcp"
_HEADER_LIMIT_BYTES = 16 << 20
"""A hundred bytes for each tensor are usual; the library allows six times that."""
_NAME_LETTERS = 255


def named_parts(data: bytes, name: str) -> list[tuple[str, int]]:
    """Return (file, least bytes) of every file that a `.metadata` says tensors or objects lie in.

    Raises:
        TornArchiveError: it is cut off, or no `Metadata`. RefusedError: work beyond the limits.
    """
    ends: dict[str, int] = {}
    for row in _rows(_metadata(data, name), "storage_data", name).values():
        item = _item(row, name)
        ends[item.path] = max(ends.get(item.path, 0), item.offset + item.nbytes)
    return sorted(ends.items())


def _metadata(data: bytes, name: str) -> Inert:
    directory = Directory(prefix="", records={})
    found = run_pickle(data, name, Rebuilder(name, directory, DEFAULT_LIMITS), DEFAULT_LIMITS)[0]
    if not isinstance(found, Inert):
        raise TornArchiveError(f"{name} is no metadata of torch.distributed.checkpoint")
    return found


def _rows(metadata: Inert, field: str, name: str) -> dict[Any, Any]:
    rows = metadata.field(field)
    if not isinstance(rows, dict):
        raise TornArchiveError(f"{name} is no metadata of torch.distributed.checkpoint")
    return rows


def _item(row: Any, name: str) -> Item:
    path, offset, nbytes = (_field(row, what) for what in ("relative_path", "offset", "length"))
    if (
        type(path) is not str
        or len(path) > _NAME_LETTERS
        or type(offset) is not int
        or type(nbytes) is not int
    ):
        raise TornArchiveError(f"{name} names a part without its place")
    return Item(path, offset, nbytes)


def _field(row: Any, name: str) -> Any:
    return row.field(name) if isinstance(row, Inert) else None


# --- What a `.metadata` says of its names ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One `torch.save` archive: `nbytes` bytes at `offset` of the file `path`."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: `sizes` elements from `offsets` on, in an archive of their own."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor of elements `dtype` (torch's name), in chunks that several ranks may have written."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Entry = ShardedTensor | Item
"""A tensor, or an archive that holds any other value."""


def read_metadata(data: bytes, name: str) -> dict[str, Entry]:
    """Return what a `.metadata` says, by name in its order; `name` of the file is only used in messages.

    Raises:
        TornArchiveError: it is cut off, or no `Metadata`.
        RefusedError: work beyond the limits, or parts that were transformed when they were written.
    """
    metadata = _metadata(data, name)
    places: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for key, row in _rows(metadata, "storage_data", name).items():
        if _field(row, "transform_descriptors"):
            raise RefusedError(f"{name}: its parts were compressed or encrypted by an extension of torch's")
        places[str(_field(key, "fqn")), _field(key, "offset")] = _item(row, name)
    found: dict[str, Entry] = {}
    for fqn, row in _rows(metadata, "state_dict_metadata", name).items():
        chunks = _field(row, "chunks")
        try:
            found[str(fqn)] = (
                _tensor(fqn, row, chunks, places) if isinstance(chunks, list) else places[fqn, None]
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise TornArchiveError(f"{name} does not say where {str(fqn)[:80]!r} lies") from error
    return found


def _tensor(fqn: str, row: Any, chunks: list[Any], places: Mapping[Any, Item]) -> ShardedTensor:
    dtype = row.field("properties").state[0].name
    shape = row.field("size")
    if dtype not in ITEM_BYTES or not isinstance(shape, Size):
        raise TypeError(dtype)
    boxes = [(chunk.field("offsets"), chunk.field("sizes")) for chunk in chunks]
    if any(not isinstance(n, Size) or len(n) != len(shape) for box in boxes for n in box):
        raise TypeError(fqn)
    made = (Chunk(tuple(o), tuple(sizes), places[fqn, o]) for o, sizes in boxes)
    return ShardedTensor(dtype, tuple(shape), tuple(made))


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    name: Global(_METADATA, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {"_StorageInfo": Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
_LAYOUT = Global("torch.serialization", "_get_layout")
VERSION = "1.0.0"
"""`CURRENT_DCP_VERSION` of torch 2.9 to 2.13; older ones ignore it."""


def write_metadata(entries: Mapping[str, Entry], paths: Mapping[str, tuple[str | int, ...]]) -> bytes:
    """Return a `.metadata` that torch reads; `paths`: where a name lies in the nested state dictionary.

    Raises:
        RefusedError: a type that torch cannot name.
    """
    rows: dict[str, Inert] = {}
    places: dict[Inert, Inert] = {}
    properties: dict[str, Inert] = {}
    infos: dict[Item, Inert] = {}
    for fqn, entry in entries.items():
        if isinstance(entry, Item):
            rows[fqn] = _made("BytesStorageMetadata")
            places[_made("MetadataIndex", fqn=fqn, index=None)] = _info(entry, infos)
            continue
        chunks = [
            _made("ChunkStorageMetadata", offsets=Size(c.offsets), sizes=Size(c.sizes)) for c in entry.chunks
        ]
        of_dtype = properties.setdefault(entry.dtype, _properties(entry.dtype))
        rows[fqn] = _made("TensorStorageMetadata", properties=of_dtype, size=Size(entry.shape), chunks=chunks)
        for number, chunk in enumerate(entry.chunks):
            key = _made("MetadataIndex", fqn=fqn, offset=Size(chunk.offsets), index=number)
            places[key] = _info(chunk.item, infos)
    value = _made(
        "Metadata",
        state_dict_metadata=rows,
        planner_data=dict(paths),
        storage_data=places,
        storage_meta=None,
        version=VERSION,
    )
    dtypes = {Global("torch", dtype) for dtype in properties}
    return repickle(value, METADATA, writable=WRITABLE | dtypes | {_LAYOUT, *_CLASSES.values()}).data


def _made(kind: str, **state: Any) -> Inert:
    return Inert(_CLASSES[kind], (), state or None, made_by_new=True)


def _info(item: Item, known: dict[Item, Inert]) -> Inert:
    """Return the row of an archive's place; names that share it share the row."""
    made = _made("_StorageInfo", relative_path=item.path, offset=item.offset, length=item.nbytes)
    return known.setdefault(item, made)


def _properties(dtype: str) -> Inert:
    """Return a tensor's `TensorProperties`: type, strided, no gradient, contiguous, not pinned."""
    if dtype not in ITEM_BYTES:
        raise RefusedError(f"torch has no type {dtype}")
    encoding = Inert(_CLASSES["_MEM_FORMAT_ENCODING"], (0,))
    state = (Global("torch", dtype), Inert(_LAYOUT, ("torch.strided",)), False, encoding, False)
    return Inert(_CLASSES["TensorProperties"], (), state, made_by_new=True)


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
