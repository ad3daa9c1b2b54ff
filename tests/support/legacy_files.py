"""`torch.save` files of before zip archives, written without torch, truthfully or not."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

from ckptd.formats.torchfile.archive import LEGACY_MAGIC, read_directory
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.torchfile.values import Storage, Tensor

LITTLE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def legacy_bytes(
    pickled: bytes,
    storages: list[tuple[str, int, bytes]],
    *,
    keys: Any = None,
    machine: Any = None,
    protocol: Any = 1001,
) -> bytes:
    """A file of (key, elements, bytes) storages; `keys`, `machine` and `protocol` may lie."""
    listed = [key for key, _, _ in storages] if keys is None else keys
    head = LEGACY_MAGIC + pickle.dumps(protocol, 2) + pickle.dumps(LITTLE if machine is None else machine, 2)
    data = b"".join(struct.pack("<q", count) + raw for _, count, raw in storages)
    return head + pickled + (listed if isinstance(listed, bytes) else pickle.dumps(listed, 2)) + data


def parts_of(path: Path) -> tuple[bytes, list[tuple[str, int, bytes]]]:
    """The pickle and the storages of a zip archive, as `legacy_bytes` takes them."""
    data = path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    try:
        directory = read_directory(fd, path.name)
    finally:
        os.close(fd)
    record = directory.records["data.pkl"]
    pickled = data[record.offset : record.offset + record.size]
    found: dict[str, Storage] = {}
    _collect(unpickle(pickled, path.name, directory), found)
    return pickled, [(k, s.numel, data[s.offset : s.offset + s.nbytes]) for k, s in found.items()]


def as_legacy(path: Path) -> None:
    """Frame a zip archive anew."""
    path.write_bytes(legacy_bytes(*parts_of(path)))


def _collect(value: Any, found: dict[str, Storage]) -> None:
    if isinstance(value, Tensor):
        found[value.storage.key] = value.storage
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _collect(item, found)
