"""Reading archives back in tests, with the product's own reader (which has tests of its own)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptd.formats.torchfile.archive import Directory, read_directory
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.torchfile.values import Tensor


def load(path: Path) -> tuple[Any, Directory, bytes]:
    """(unpickled value, directory, bytes of the whole file)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        directory = read_directory(fd, path.name)
    finally:
        os.close(fd)
    data = path.read_bytes()
    record = directory.records["data.pkl"]
    return unpickle(data[record.offset : record.offset + record.size], path.name, directory), directory, data


def tensor_bytes(tensor: Tensor, data: bytes) -> bytes:
    """The elements of a contiguous tensor."""
    return data[tensor.byte_offset : tensor.byte_offset + tensor.nbytes]
