"""Putting a bad or missing object of a COMMIT right, from intact bytes (P2, P3; adr/0091).

The COMMIT lists digests of manifests and these list CRC64, so the same bytes under the same key make it true
again; nothing else is written. A bad object is removed only when a verified spare lies beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from typing import TYPE_CHECKING

from ckptd.core.manifest import ROOT
from ckptd.errors import CkptdError, DamagedError, RefusedError, VerifyError
from ckptd.remote.checksums import crc64, crc64_combined, to_hex
from ckptd.remote.documents import generations_with_manifests, read_generation
from ckptd.remote.observe import confirm
from ckptd.remote.stretches import Stretches

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.manifest import ManifestFile, RemoteIdentity
    from ckptd.remote.messages import CommitView
    from ckptd.remote.store import Progress, Source, Store

SPARE = f"{ROOT}/spare/"
_AHEAD_BYTES = 8 << 20


class ExactSource:
    """A source that ends in an error, not in an object, unless its bytes are those of the manifest.

    Several parts may be in flight: no order is asked for, and what is read again counts once.
    """

    def __init__(self, inner: Source, file: ManifestFile, on_bytes: Callable[[int], None]) -> None:
        self._inner = inner
        self._file = file
        self._on_bytes = on_bytes
        self._passed = Stretches(crc64, crc64_combined, threading.Lock())
        self.size_bytes = file.bytes
        self.mode = file.mode & 0o777
        self.folder_mode = inner.folder_mode
        self.gid = inner.gid

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read, and compare with the manifest when no byte is left that did not pass.

        Raises:
            DamagedError: other bytes; what was sent of them never gets a name.
        """
        if self._inner.size_bytes != self.size_bytes:
            raise self._other()
        count = self._inner.read_into(offset, buffer)
        if news := self._passed.feed(offset, buffer[:count]):
            self._on_bytes(news)
        crc = self._passed.crc_of(0, self.size_bytes)
        if crc is not None and to_hex(crc) != self._file.checksums.crc64nvme:
            raise self._other()
        return count

    def drop(self, offset: int, length: int) -> None:
        """As the inner source."""
        self._inner.drop(offset, length)

    def _other(self) -> DamagedError:
        return DamagedError(f"what was to be sent as {self._file.key} is not what was committed")


class StoreSource:
    """An object of some store, read ahead in ranges of 8 MiB, one for each thread that sends parts of it."""

    def __init__(self, store: Store, file: ManifestFile) -> None:
        self._store = store
        self._key = file.key
        self._ahead = threading.local()
        self.size_bytes: int = file.bytes
        self.mode: int = file.mode & 0o777
        self.folder_mode = 0o755
        self.gid: int | None = None

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Copy from the range that is held, or read the next one.

        Raises:
            DamagedError: the object is gone.
        """
        begin, data = getattr(self._ahead, "range", (0, b""))
        if not begin <= offset < begin + len(data):
            length = min(_AHEAD_BYTES, self.size_bytes - offset)
            try:
                data = self._store.read_at(self._key, offset, length) if length > 0 else b""
            except (FileNotFoundError, RefusedError) as error:
                raise DamagedError(f"{self._key} is gone from {self._store.url}") from error
            begin = offset
            self._ahead.range = begin, data
        part = data[offset - begin :][: len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def drop(self, offset: int, length: int) -> None:
        """Nothing is cached."""


def holds(store: Store, key: str, file: ManifestFile) -> bool:
    """Whether the bytes that a manifest lists lie under this key: all of them are read."""
    info = store.stat(key)
    if info is None or info.bytes != file.bytes:
        return False
    source = StoreSource(store, file.model_copy(update={"key": key}))
    crc = done = 0
    view = memoryview(bytearray(1 << 20))
    while count := source.read_into(done, view):
        crc = crc64(view[:count], crc)
        done += count
    return done == file.bytes and to_hex(crc) == file.checksums.crc64nvme


def spare_key(file: ManifestFile) -> str:
    """Where the good bytes of an object lie while the bad ones make way."""
    name = hashlib.sha256(f"{file.key}\0{file.checksums.crc64nvme}".encode()).hexdigest()
    return f"{SPARE}{name[:32]}"


def contents_of(store: Store) -> dict[str, set[str]]:
    """Key → CRC64 of every content that any readable manifest promises under it, committed or not."""
    found: dict[str, set[str]] = {}
    for where in generations_with_manifests(store):
        for known in read_generation(store, where):
            for file in known.manifest.files:
                found.setdefault(file.key, set()).add(file.checksums.crc64nvme)
    return found


class Resender:
    """Puts objects of one remote right. `note(key, token)`: an upload that a crash would leave behind; token
    "" when it is over. `on_progress(key, done, total)`."""

    def __init__(
        self,
        store: Store,
        identity: RemoteIdentity,
        note: Callable[[str, str], None],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self._store = store
        self._identity = identity
        self._note = note
        self._on_progress = on_progress
        self._contents: dict[str, set[str]] | None = None

    def put_right(self, view: CommitView, file: ManifestFile, open_source: Callable[[], Source]) -> bool:
        """Send the bytes of `open_source()`; it is asked again for the second of two uploads.

        Returns False when the object, read again, is as it was committed: then nothing was sent.

        Raises:
            RefusedError: the COMMIT does not count any more, or another manifest promises other bytes there.
            DamagedError: the source holds other bytes; the object is as it was, or its spare lies beside it.
        """
        self._still_counts(view)
        self._is_alone(file)
        store, spare = self._store, spare_key(file)
        if store.stat(file.key) is not None:
            # one reading found it bad, perhaps hours ago: a flip on the way, or sent by another repair since
            if holds(store, file.key, file):
                return False
            if not holds(store, spare, file):
                store.delete(spare)
                self._send(spare, file, open_source())
            self._still_counts(view)
            store.delete(file.key)
        self._send(file.key, file, open_source())
        store.delete(spare)
        if not confirm(store, ((view.key, view.sha256),), self._identity).ok:
            # retention went by: it does not know of what was sent after it
            store.delete(file.key)
            self._still_counts(view)
        return True

    def spare_of(self, file: ManifestFile) -> ManifestFile | None:
        """What a killed repair left, as an object to read."""
        info = self._store.stat(spare_key(file))
        if info is None or info.bytes != file.bytes:
            return None
        return file.model_copy(update={"key": spare_key(file)})

    def _still_counts(self, view: CommitView) -> None:
        found = confirm(self._store, ((view.key, view.sha256),), self._identity)
        if not found.ok:
            msg = f"{view.commit.tag} is not repaired: {found.reason}"
            raise RefusedError(msg, hint="what is disputed or retired does not count for anybody")

    def _is_alone(self, file: ManifestFile) -> None:
        """What is bad for one manifest may be intact for another: then nobody can say what is right."""
        if self._contents is None:
            self._contents = contents_of(self._store)
        if len(self._contents.get(file.key, ())) > 1:
            msg = f"{file.key} is listed with two contents"
            raise RefusedError(msg, hint="one of the manifests was changed; nothing was sent")

    def _send(self, key: str, file: ManifestFile, source: Source) -> None:
        done = 0

        def moved(count: int) -> None:
            nonlocal done
            done += count
            self._on_progress(file.key, min(done, file.bytes), file.bytes)

        noted = ""

        def moving(progress: Progress) -> None:
            nonlocal noted
            if progress.token and progress.token != noted:
                noted = progress.token
                self._note(key, noted)

        exact = ExactSource(source, file, moved)
        try:
            crc = self._store.upload(key, exact, resume=None, on_progress=moving)
        except CkptdError:
            with contextlib.suppress(CkptdError):
                self._store.discard(key)
                self._note(key, "")
            raise
        if noted:
            self._note(key, "")
        wanted = int(file.checksums.crc64nvme, 16)
        try:
            self._store.verify(key, file.bytes, wanted, lambda _: None)
        except VerifyError:
            self._store.delete(key)
            raise
        if crc != wanted:
            raise DamagedError(f"{key} was sent with other bytes than were committed")
