"""Repair a bad or missing object of a COMMIT from intact bytes (docs/adr/0091).

The COMMIT lists digests of manifests and these list CRC64, so the same bytes under the same key make it true
again; nothing else is written. A bad object is removed only when a verified spare lies beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base.names import ROOT
from ckptd.core.model.manifest import Lease, parse
from ckptd.errors import CkptdError, DamagedError, RefusedError, VerifyError
from ckptd.storage.remote.documents import (
    LEASES,
    generations_with_manifests,
    read_commits,
    read_generation,
    stem_of,
)
from ckptd.storage.remote.observe import confirm, still_ours
from ckptd.storage.stores.checksums import crc64, crc64_combined, to_hex
from ckptd.storage.stores.sources import CrcRanges, WrappedSource, crc64_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.model.manifest import ManifestFile, RemoteIdentity
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import CommitView
    from ckptd.storage.stores.base import ObjectInfo, Progress, Source, Store

SPARE = f"{ROOT}/spare/"
_AHEAD_BYTES = 8 << 20


class ExactSource(WrappedSource):
    """A source that ends in an error, not in an object, unless its bytes are those of the manifest.

    Several parts may be in flight: no order is asked for, and what is read again counts once.
    """

    def __init__(self, inner: Source, file: ManifestFile, on_bytes: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._file = file
        self._on_bytes = on_bytes
        self._passed = CrcRanges(crc64, crc64_combined, threading.Lock())
        self.size_bytes = file.bytes
        self.mode = file.mode & 0o777

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read, and compare with the manifest when no byte is left that did not pass.

        Raises:
            DamagedError: other bytes; what was sent of them never gets a name.
        """
        if self.inner.size_bytes != self.size_bytes:
            raise self._other()
        count = self.inner.read_into(offset, buffer)
        if news := self._passed.feed(offset, buffer[:count]):
            self._on_bytes(news)
        crc = self._passed.crc_of(0, self.size_bytes)
        if crc is not None and to_hex(crc) != self._file.checksums.crc64nvme:
            raise self._other()
        return count

    peek_into = read_into

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
        """Do nothing: nothing is cached."""


def holds(store: Store, key: str, file: ManifestFile) -> bool:
    """Whether the bytes that a manifest lists lie under this key: all of them are read."""
    info = store.stat(key)
    if info is None or info.bytes != file.bytes:
        return False
    source = StoreSource(store, file.model_copy(update={"key": key}))
    return to_hex(crc64_of(source, 0, file.bytes)) == file.checksums.crc64nvme


def _is_still(store: Store, bad: ObjectInfo, file: ManifestFile) -> bool:
    """Tell whether an object is the one that was read as bad: another node may have put it right since."""
    now = store.stat(bad.key)
    return now == bad and (bad.mtime_ns > 0 or not holds(store, bad.key, file))


def staging_key(file: ManifestFile) -> str:
    """Return the key under which the good bytes of an object lie while the bad ones are replaced."""
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


class ObjectRepairer:
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
        store, spare, has_spare = self._store, staging_key(file), False
        while (bad := store.stat(file.key)) is not None:
            # one reading found it bad, perhaps hours ago: a flip on the way, or sent by another repair since
            if holds(store, file.key, file):
                if has_spare:
                    store.delete(spare)
                return False
            if not holds(store, spare, file):
                store.delete(spare)
                self._send(spare, file, open_source())
            has_spare = True
            self._still_counts(view)
            if _is_still(store, bad, file):
                store.delete(file.key)
                break
        self._send(file.key, file, open_source())
        store.delete(spare)
        if not confirm(store, ((view.key, view.sha256),), self._identity).ok:
            # retention went by: it does not know of what was sent after it
            store.delete(file.key)
            self._still_counts(view)
        return True

    def spare_of(self, file: ManifestFile) -> ManifestFile | None:
        """Return the good bytes that a killed repair left, as an object to read; None: there are none."""
        info = self._store.stat(staging_key(file))
        if info is None or info.bytes != file.bytes:
            return None
        return file.model_copy(update={"key": staging_key(file)})

    def _still_counts(self, view: CommitView) -> None:
        found = confirm(self._store, ((view.key, view.sha256),), self._identity)
        if not found.ok:
            msg = f"{view.commit.tag} is not repaired: {found.reason}"
            raise RefusedError(msg, hint="what is disputed or being deleted does not count for anybody")

    def _is_alone(self, file: ManifestFile) -> None:
        """Refuse an object that is listed with two contents: nobody can say which one is right."""
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


# --- leases of a node that is gone for good --------------------------------------------------------------
# A lease holds up a COMMIT because objects may have changed under a manifest that lists them (docs/adr/0083).
# Only a person knows that its node will not come back; whether the objects are what manifests say is found by
# reading them, before the lease is removed (docs/internals/stores.md).


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingLease:
    """A lease that holds up a COMMIT.

    `wrong`: objects that are not what a manifest lists, with their bytes; `others`: nodes whose leases say
    that they replace objects there too.
    """

    key: str
    where: Stem
    node: str
    wrong: tuple[tuple[str, int], ...]
    others: tuple[str, ...] = ()


def leases_of(store: Store, node: str) -> list[tuple[str, Stem]]:
    """Return the keys and generations of that node's leases, of generations that are neither committed nor
    retired.

    Raises:
        DamagedError: a lease cannot be read.
    """
    return [(key, stem_of(lease)) for key, lease in _leases(store) if lease.node == node]


def _leases(store: Store) -> list[tuple[str, Lease]]:
    found = read_commits(store)
    over = {stem_of(view.commit) for view in found.commits} | found.stones.keys()
    leases: list[tuple[str, Lease]] = []
    for info in sorted(store.list(LEASES), key=lambda info: info.key):
        data = store.get(info.key)
        if data is None:
            continue
        lease = parse(Lease, data, info.key)
        if stem_of(lease) not in over:
            leases.append((info.key, lease))
    return leases


def compare(store: Store, key: str, where: Stem, node: str) -> BlockingLease:
    """Read every object that a manifest of that generation lists."""
    listed: dict[str, list[ManifestFile]] = {}
    for known in read_generation(store, where):
        for file in known.manifest.files:
            listed.setdefault(file.key, []).append(file)
    wrong = []
    for name, files in sorted(listed.items()):
        # of several listings (revisions, replicas) what lies there must be one; whose, every attempt asks
        if not any(holds(store, name, file) for file in files):
            info = store.stat(name)
            wrong.append((name, info.bytes if info is not None else 0))
    others = (lease.node for _, lease in _leases(store) if stem_of(lease) == where and lease.node != node)
    return BlockingLease(
        key=key, where=where, node=node, wrong=tuple(wrong), others=tuple(sorted(set(others)))
    )


def lapse(
    store: Store, identity: RemoteIdentity, held: BlockingLease, on_done: Callable[[str, int], None]
) -> None:
    """Remove the lease, or else the objects that are wrong: whoever lists them sends them again.

    Raises:
        RefusedError: another node is at work on them. RemoteNotOurs: the remote is another than `identity`.
    """
    if held.wrong and held.others:
        msg = (
            f"{held.wrong[0][0]} is not what its manifest lists, and {', '.join(held.others)} replaces there"
        )
        raise RefusedError(msg, hint="call it again when that node is done, or name it too if it is gone")
    still_ours(store, identity)
    for key, size in held.wrong:
        store.delete(key)
        on_done(key, size)
    if not held.wrong:
        store.delete(held.key)
        on_done(held.key, 0)
