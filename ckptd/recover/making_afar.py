"""The committed ZeRO form of a remote as what another form is made of, in that very remote (docs/adr/0118).

The COMMIT is read afresh, its manifests by their digests, and nothing of them is used before they can be
believed (P15): what a node makes of them is committed for the whole job.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.coverage import objects_of
from ckptd.core.layouts import Role, parse_shard_name
from ckptd.core.view import ZERO
from ckptd.errors import DamagedError, SourceChanged
from ckptd.recover.mirrored import of_commit
from ckptd.recover.trust import distrust
from ckptd.remote.access import Access
from ckptd.remote.documents import manifests_of_commit, read_commit, read_identity
from ckptd.torchfile.archive import Framing, frame, read_directory
from ckptd.torchfile.fingerprint import fingerprint

if TYPE_CHECKING:
    from ckptd.recover.mirrored import RemoteSource
    from ckptd.remote.making_messages import Committed, Making
    from ckptd.remote.messages import ShipOrder
    from ckptd.remote.store import Store
    from ckptd.torchfile.archive import Record

MIRROR = "mirror."
"""Begins the name of a folder in staging: what planning reads of objects, gone once it is planned."""
WINDOW_BYTES = 4 << 20
LEAST_CACHE_BYTES = 8 << 20


def committed_source(
    store: Store, order: ShipOrder, making: Making, zero: Committed
) -> tuple[RemoteSource, tuple[tuple[str, str], ...]]:
    """The shards that the COMMIT lists, and their fingerprints by path.

    Raises:
        SourceChanged: that COMMIT is gone, or disputed. DamagedError: its manifests cannot be believed.
    """
    tag, generation = order.manifest.tag, order.manifest.generation
    view = read_commit(store, (tag, generation, ZERO))
    if view is None or view.disputed or view.sha256 != zero.sha256:
        msg = f"{store.url} no longer holds the COMMIT of {tag} that was seen there"
        raise SourceChanged(msg, hint="the next turn looks again")
    members = [known.manifest for known in manifests_of_commit(store, view.commit)]
    identity = read_identity(store)
    problem = distrust(identity, view.commit, members) if identity is not None else "it has no remote.json"
    if problem is not None:
        msg = f"nothing is made of {tag} in {store.url}: {problem}"
        raise DamagedError(msg, hint="it was changed in the remote; see `ckptd verify`")
    objects = list(objects_of(members).values())
    marks = tuple(sorted((f.path, f.fingerprint) for f in objects if f.role is not Role.EXTRA))
    root = making.folders[0].removeprefix(tag).strip("/")
    folder = f"{view.commit.folder}/{root}".rstrip("/")
    return of_commit(store.url, Access(), store, folder, tag, objects), marks


def proven_records(place_fd: int, source: RemoteSource) -> dict[str, tuple[Record, ...]]:
    """The records of each archive mirrored below `place_fd`, by path in the mirror.

    A manifest's fingerprint is of the zip directory, and that has a CRC32 of each record: so what is read of
    one is proven, however little of the object it is.

    Raises:
        DamagedError: a directory is not the one that was committed.
    """
    found = {}
    for file in source.files:
        if not file.fingerprint or not parse_shard_name(Path(file.path).name):
            continue
        fd = files.open_beneath(place_fd, file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if frame(fd, expected=True) is not Framing.ZIP:
                continue  # planning says what is wrong with it
            directory = read_directory(fd, file.path)
            if fingerprint(fd, directory) != file.fingerprint:
                msg = f"{file.key} in {source.store.url} is damaged: its zip directory is not as committed"
                raise DamagedError(msg, hint="see `ckptd verify`")
            found[file.path] = tuple(directory.records.values())
        finally:
            os.close(fd)
    return found


def cache_for(room_bytes: int, sources: int) -> int:
    """Bytes of blocks to keep: two windows of each source where there is room, half of the room at most."""
    return max(LEAST_CACHE_BYTES, min(room_bytes // 2, 2 * WINDOW_BYTES * sources))
