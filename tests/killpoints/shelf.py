"""An object store that outlives the process: the memory store of the suite, its dictionaries in files.

Objects appear whole or not at all, as in S3; what a killed process had sent of one is a partial upload.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote

from tests.stores.memory import MemoryStore

_open, _write, _rename, _unlink, _listdir = os.open, os.write, os.rename, os.unlink, os.listdir


class Shelf(MutableMapping[str, bytes]):
    """A dictionary of bytes, one file each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = str(folder)

    def _path(self, key: str) -> str:
        return f"{self._folder}/{quote(key, safe='')}"

    def __getitem__(self, key: str) -> bytes:
        try:
            with open(self._path(key), "rb") as stream:
                return stream.read()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, data: bytes) -> None:
        path = self._path(key)
        temporary = f"{self._folder}/.new"
        fd = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        _write(fd, data)
        os.close(fd)
        _rename(temporary, path)

    def __delitem__(self, key: str) -> None:
        try:
            _unlink(self._path(key))
        except FileNotFoundError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return iter([unquote(name) for name in sorted(_listdir(self._folder)) if not name.startswith(".")])

    def __len__(self) -> int:
        return len(list(iter(self)))


class ShelfStore(MemoryStore):
    """The store of a remote that a killed daemon finds again."""

    def __init__(self, folder: Path, window_bytes: int, lanes: int) -> None:
        super().__init__(
            objects=Shelf(folder / "objects"),  # type: ignore[arg-type]
            partial=Shelf(folder / "partial"),  # type: ignore[arg-type]
            window_bytes=window_bytes,
            lane_count=lanes,
        )
