"""Find bytes of a file that the remote holds already, in the node's own committed checkpoints.

A frozen base, an adapter run's untouched weights, a tag that is saved again: the store is asked to copy them
instead of their being sent (docs/adr/0207). What is found here is a hint. The file is read all the same, and
its checksum proves the copy as it proves every upload.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.model.generation import order_of
from ckptd.core.model.manifest import node_in
from ckptd.errors import DamagedError, NotPermitted, RefusedError, StorageError, TornArchiveError
from ckptd.formats.torchfile.archive import TAIL_BYTES, directory_place, read_entries
from ckptd.storage.remote.documents import read_commits
from ckptd.storage.stores.base import HeldRange
from ckptd.storage.stores.sources import read_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.model.manifest import ManifestFile, NodeManifest
    from ckptd.formats.torchfile.archive import DirectoryEntry
    from ckptd.storage.remote.messages import UploadFile
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.base import Source

_COMMITS = 3
"""The newest so many are looked at: what did not change lies in the last one."""
_ALIGN_BYTES = 64
"""torch makes payloads begin at a multiple of this by padding headers, which are equal at equal places."""
_DIRECTORY_LIMIT_BYTES = 8 << 20
"""Larger ones, of some hundred thousand records, are not compared (P12)."""


class HeldObjects:
    """Look files up in this node's newest COMMITs of one form; may be asked from several threads."""

    def __init__(self, attached: AttachedRemote, ours: NodeManifest) -> None:
        self._attached = attached
        self._ours = ours
        self._lock = threading.Lock()
        self._rows: list[ManifestFile] | None = None

    def ranges_of(self, file: UploadFile, source: Source) -> tuple[HeldRange, ...]:
        """Return the ranges of a file that objects of the remote most likely hold, in order.

        Raises:
            RemoteError: as the store.
        """
        rows = [row for row in self._known() if row.key != file.key]
        for row in rows:
            if file.fingerprint and (row.bytes, row.fingerprint) == (file.bytes, file.fingerprint):
                return (HeldRange(offset=0, length=row.bytes, key=row.key, key_offset=0),)
        alike = [row for row in rows if row.path == file.path]
        return self._common_records(source, alike[0]) if alike and file.check_zip_crc else ()

    def _known(self) -> list[ManifestFile]:
        """Return the files that this node has in its newest COMMITs, newest first; read once."""
        with self._lock:
            if self._rows is None:
                self._rows = self._read()
            return self._rows

    def _read(self) -> list[ManifestFile]:
        attached, ours = self._attached, self._ours
        commits = [view.commit for view in read_commits(attached.store, cache=attached.documents).live()]
        newest = sorted((c for c in commits if c.form == ours.form), key=order_of, reverse=True)
        found: list[ManifestFile] = []
        for commit in newest[:_COMMITS]:
            for ref in commit.manifests:
                if node_in(ref.key) != ours.node:
                    continue
                try:
                    known = attached.manifests.get(attached.store, ref.key)
                except DamagedError:
                    continue
                found += known.manifest.files if known is not None else ()
        return found

    def _common_records(self, source: Source, row: ManifestFile) -> tuple[HeldRange, ...]:
        """Return the records of a `torch.save` archive that the object has too, by name, size and CRC32."""
        store = self._attached.store
        try:
            ours = _stretches(partial(read_range, source), source.size_bytes)
        except (TornArchiveError, RefusedError):
            return ()
        try:
            theirs = _stretches(partial(store.read_at, row.key), row.bytes)
        except (TornArchiveError, RefusedError, FileNotFoundError, StorageError, NotPermitted):
            return ()  # a hint: what is wrong with an older copy holds up no newer one
        places = {name: begin for name, (begin, _) in theirs.items()}
        return tuple(
            HeldRange(offset=begin, length=end - begin, key=row.key, key_offset=places[name])
            for name, (begin, end) in ours.items()
            if name in places and (begin - places[name]) % _ALIGN_BYTES == 0
        )


def _stretches(
    read: Callable[[int, int], bytes | bytearray], size_bytes: int
) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Return (name, size, CRC32) of each record that has a CRC → where its header and the next one begin."""
    fd = os.memfd_create("directory", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        tail = max(0, size_bytes - TAIL_BYTES - 2 * _ALIGN_BYTES)
        os.pwrite(fd, read(tail, size_bytes - tail), tail)
        start, length = directory_place(fd, "it")
        if length > _DIRECTORY_LIMIT_BYTES:
            return {}
        if start < tail:
            os.pwrite(fd, read(start, tail - start), start)
        entries: list[DirectoryEntry] = sorted(read_entries(fd, "it"), key=lambda entry: entry.header)
    finally:
        os.close(fd)
    ends = [entry.header for entry in entries[1:]] + [start]
    return {
        (entry.label, entry.size, entry.crc): (entry.header, end)
        for entry, end in zip(entries, ends, strict=True)
        if entry.crc
    }
