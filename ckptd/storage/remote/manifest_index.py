"""Index the objects that manifests of a generation list, and announce the replacement of unlisted ones.

An object may be uploaded hours before a manifest lists it, and nobody else can tell it from what a killed
attempt left. A node that replaces an unlisted object first writes a lease, then re-reads the manifests; a
committer reads the manifests, then the leases. Whatever the interleaving, one of them detects the other
(docs/adr/0083).
"""

from __future__ import annotations

import shlex
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.model.manifest import Checksums, Lease, ManifestFile, lease_key, name_in, parse, to_bytes
from ckptd.errors import DamagedError
from ckptd.storage.remote.documents import (
    lease_folder,
    manifest_folder,
    read_keys,
    read_manifest,
    read_snapshot,
    stem_of,
)
from ckptd.storage.stores.checksums import to_hex
from ckptd.storage.stores.parallel import crc_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.model.generation import KnownManifest
    from ckptd.core.model.manifest import NodeManifest, Proof
    from ckptd.storage.remote.documents import GenerationSnapshot, ManifestCache
    from ckptd.storage.remote.messages import UploadFile
    from ckptd.storage.stores.base import Store

    Row = tuple[KnownManifest, ManifestFile]


class ManifestIndex:
    """The manifests of the generation that `ours` is made for; may be asked from several threads."""

    def __init__(
        self, store: Store, ours: NodeManifest, seen: GenerationSnapshot, cache: ManifestCache
    ) -> None:
        self._store = store
        self._ours = ours
        self._seen = seen
        self._cache = cache
        self._rows = _by_key(seen.read)
        self._lock = threading.Lock()
        self._is_announced = False
        self._is_doubtful: bool | None = None

    def find(self, key: str) -> Row | None:
        """Return who lists the object as it is; None: nobody, and after this call it may be removed."""
        found = self._pick(key) or self._ask_likely(key)
        if found is None:
            with self._lock:
                if not self._is_announced:
                    self._store.put_if_absent(lease_key(self._ours), to_bytes(_lease(self._ours)))
                    self._is_announced = True
            # whoever listed it before we said so is seen now, and is asked for all that it lists
            self._rows = _by_key(read_snapshot(self._store, stem_of(self._ours), self._cache, node=None).read)
            found = self._pick(key)
        return found

    def _ask_likely(self, key: str) -> Row | None:
        """Most likely the node of the lowest rank there lists a replica; no other is read for it."""
        with self._lock:
            likely, self._seen = self._seen.likely, replace(self._seen, named=())
            if likely is None:
                return None
            where = stem_of(self._ours)
            keys = [i.key for i in self._store.list(manifest_folder(where)) if name_in(i.key) == likely]
            self._rows = _by_key([*self._seen.read, *read_keys(self._store, where, keys, self._cache)[0]])
        return self._pick(key)

    def _pick(self, key: str) -> Row | None:
        rows = self._rows.get(key, [])
        if self._was_replaced() or len({file.checksums.crc64nvme for _, file in rows}) > 1:
            held = _crc_of(self._store, key) if rows else None
            rows = [row for row in rows if row[1].checksums.crc64nvme == held]
        return rows[-1] if rows else None

    def _was_replaced(self) -> bool:
        """Whether somebody replaced objects before this attempt: the manifests may speak of those before."""
        with self._lock:
            if self._is_doubtful is None:
                folder = lease_folder(stem_of(self._ours))
                self._is_doubtful = any(True for _ in self._store.list(folder))
            return self._is_doubtful


def release_lease(store: Store, ours: NodeManifest) -> None:
    """Remove the lease: our manifest lists now what we replaced."""
    if holds_lease(store, ours):
        store.delete(lease_key(ours))


def holds_lease(store: Store, ours: NodeManifest) -> bool:
    """Tell whether our lease lies there: an attempt may have replaced objects that it then did not list."""
    return any(info.key == lease_key(ours) for info in store.list(lease_folder(stem_of(ours))))


def replaced_object(store: Store, keys: Iterable[str], listed: Iterable[KnownManifest]) -> str | None:
    """Return why one of these objects is not what a manifest lists; None: each is, or nobody lists it.

    Reads each of them that is listed.
    """
    rows = _by_key(listed)
    for key in keys:
        found = rows.get(key, [])
        if found and _crc_of(store, key) not in {file.checksums.crc64nvme for _, file in found}:
            node = found[0][0].manifest.node
            return f"{key} is not what {node} listed: an attempt of this node replaced it and was cut short"
    return None


def pending_replacement(
    store: Store, ours: NodeManifest, members: Iterable[KnownManifest]
) -> tuple[str, str] | None:
    """Return why nothing is committed over these manifests now, read a moment ago: a node replaces objects.

    The reason, and what a person may do about it ("": nothing).
    """
    where = stem_of(ours)
    mine = lease_key(ours)
    for info in store.list(lease_folder(where)):
        if info.key != mine:
            node = _node_of(store, info.key)
            gone = f"`ckptd gc JOB --gone {shlex.quote(node)}`"
            hint = f"see that node's `ckptd status`; is it gone for good: {gone}"
            return f"node {node} replaces what it found there and is not done ({info.key})", hint
    # who was done between the two readings has listed what it replaced
    seen = {known.key for known in members}
    for info in store.list(manifest_folder(where)):
        if info.key not in seen and _is_readable(store, info.key):
            return f"a node has just listed its files ({info.key})", ""
    return None


def _node_of(store: Store, key: str) -> str:
    """Return the node that wrote a lease; the name in the key where the lease cannot be read."""
    data = store.get(key)
    try:
        return parse(Lease, data, key).node if data is not None else key.rsplit("/", 1)[1].partition("~")[0]
    except DamagedError:
        return key.rsplit("/", 1)[1].partition("~")[0]


def _is_readable(store: Store, key: str) -> bool:
    try:
        return read_manifest(store, key) is not None
    except DamagedError:
        return False


def _lease(ours: NodeManifest) -> Lease:
    return Lease(
        tag=ours.tag,
        generation=ours.generation,
        form=ours.form,
        node=ours.node,
        node_id=ours.node_id,
    )


def _by_key(known: Iterable[KnownManifest]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for one in known:
        for file in one.manifest.files:
            found.setdefault(file.key, []).append((one, file))
    return found


def _crc_of(store: Store, key: str) -> str | None:
    info = store.stat(key)
    if info is None:
        return None
    return to_hex(crc_of(partial(store.stream, key), info.bytes, lambda _: None, at_once=1)[1])


def manifest_entry(
    file: UploadFile, size_bytes: int, crc64nvme: str, fingerprint: str, proof: Proof
) -> ManifestFile:
    """Return the manifest entry of a file that lies in the remote now."""
    return ManifestFile(
        path=file.path,
        key=file.key,
        bytes=size_bytes,
        role=file.role,
        shard=file.shard,
        checksums=Checksums(crc64nvme=crc64nvme),
        fingerprint=fingerprint,
        tensor_fingerprint=file.tensor_fingerprint,
        proof=proof,
        mode=file.mode,
        mtime_ns=file.identity.mtime_ns if file.identity else 0,
    )
