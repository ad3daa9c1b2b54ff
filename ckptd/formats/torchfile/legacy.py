"""`torch.save` files of before zip archives (`checkpoint_serialization: false`), as the same byte ranges.

Five pickles (magic number, protocol, facts of the machine, the object, the list of storage keys), then per
key an int64 count of elements and the raw bytes, to the very end of the file (docs/formats.md §3.1,
docs/internals/conversion.md). There is no directory: where a storage lies is known only after the pickles
were run, so they run under the same restricted machine as everything else (P14), and never outside the
children.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

from ckptd.errors import RefusedError, TornArchiveError
from ckptd.formats.torchfile.archive import (
    DEFAULT_LIMITS,
    LEGACY_MAGIC,
    Directory,
    Framing,
    Limits,
    Record,
    frame,
    read_directory,
)
from ckptd.formats.torchfile.rebuild import Rebuilder
from ckptd.formats.torchfile.unpickler import run_pickle
from ckptd.formats.torchfile.values import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL = 1001
_FIRST_BYTES = 1 << 20
_GROWTH = 8
_COUNT = struct.Struct("<q")


def read_archive(fd: int, name: str, limits: Limits = DEFAULT_LIMITS) -> Directory:
    """Return the records of a `torch.save` file of either framing; only in restricted children.

    Raises:
        TornArchiveError, RefusedError: see `read_directory` and `read_legacy`.
    """
    if frame(fd, expected=True) is Framing.LEGACY:
        return read_legacy(fd, name, limits)
    return read_directory(fd, name, limits)


def read_legacy(fd: int, name: str, limits: Limits = DEFAULT_LIMITS) -> Directory:
    """Find the pickle and every storage of the legacy file open at `fd`.

    The pickle is record "data.pkl", storage <key> is "data/<key>", as in a zip; none has a CRC.

    Raises:
        TornArchiveError: it ends early, or goes on after its last storage, or is garbled.
        RefusedError: of a big-endian machine, of another protocol, or beyond `limits`.
    """
    size = os.fstat(fd).st_size
    nothing = Directory("", {}, has_crcs=False)
    plain = Rebuilder(name, nothing, limits)
    protocol, at = _pickle(fd, name, len(LEGACY_MAGIC), plain, limits)
    if protocol != PROTOCOL:
        raise RefusedError(f"{name} is a pre-zip torch.save file of another protocol than {PROTOCOL}")
    machine, at = _pickle(fd, name, at, plain, limits)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise RefusedError(f"{name} was not written by a little-endian machine")
    scout = Scout(name, nothing, limits)
    start = at
    _, at = _pickle(fd, name, start, scout, limits)
    records = {"data.pkl": Record("data.pkl", start, at - start, 0)}
    keys, at = _pickle(fd, name, at, plain, limits)
    for record in _storages(fd, name, _checked(keys, name, scout, limits), scout, at, size):
        records[record.name] = record
        at = record.offset + record.size
    if at != size:
        raise TornArchiveError(f"{name} holds {size - at} bytes after its last storage")
    return Directory("", records, has_crcs=False)


class Scout(Rebuilder):
    """Runs a pickle to learn which storages it speaks of; the values that it makes are thrown away."""

    def __init__(self, name: str, directory: Directory, limits: Limits) -> None:
        super().__init__(name, directory, limits)
        self.seen: dict[str, tuple[str, int]] = {}
        """Storage key → (dtype, elements)."""

    def place(self, key: str, dtype: str, numel: int) -> int:
        """Remember the storage; it lies nowhere yet."""
        known = self.seen.setdefault(key, (dtype, numel))
        if known != (dtype, numel):
            raise RefusedError(f"{self.name}: data.pkl describes storage {key} in two ways")
        if len(self.seen) > self.limits.records:
            raise RefusedError(f"{self.name} refers to more than {self.limits.records} storages")
        return 0


def _pickle(fd: int, name: str, start: int, rebuild: Rebuilder, limits: Limits) -> tuple[Any, int]:
    """Return (value, end) of the pickle at `start`, whose length nothing tells: read more until it ends."""
    wanted = _FIRST_BYTES
    while True:
        data = os.pread(fd, min(wanted, limits.pickle_bytes), start)
        try:
            value, used = run_pickle(data, name, rebuild, limits)
        except TornArchiveError as error:
            if len(data) == limits.pickle_bytes:
                raise RefusedError(
                    f"{name}: data.pkl is beyond the limit of {limits.pickle_bytes} bytes"
                ) from error
            if len(data) < wanted:  # the file ends here, and so did the pickle
                raise
            wanted *= _GROWTH
        else:
            return value, start + used


def _checked(keys: Any, name: str, scout: Scout, limits: Limits) -> list[str]:
    """Return the list of storage keys, each known to the pickle and named once."""
    if not isinstance(keys, list) or len(keys) > limits.records:
        raise RefusedError(f"{name} has no readable list of storages")
    for key in keys:
        if not isinstance(key, str) or key not in scout.seen:
            raise TornArchiveError(f"{name} lists a storage that its pickle does not speak of")
    listed = set(keys)
    if len(listed) != len(keys):
        raise TornArchiveError(f"{name} lists a storage twice")
    for key in scout.seen:
        if key not in listed:
            raise TornArchiveError(f"{name} lacks the record of storage {key}")
    return keys


def _storages(fd: int, name: str, keys: list[str], scout: Scout, at: int, size: int) -> Iterator[Record]:
    for key in keys:
        dtype, numel = scout.seen[key]
        head = os.pread(fd, _COUNT.size, at)
        if len(head) < _COUNT.size:
            raise TornArchiveError(f"{name} ends before storage {key}")
        (count,) = _COUNT.unpack(head)
        if count != numel:
            raise TornArchiveError(f"{name}: storage {key} holds {count} elements, its pickle says {numel}")
        at += _COUNT.size
        nbytes = numel * ITEM_BYTES[dtype]
        if at + nbytes > size:
            raise TornArchiveError(f"{name} ends at byte {size}, {at + nbytes - size} too early")
        yield Record(f"data/{key}", at, nbytes, 0)
        at += nbytes
