"""Reading committed objects again, slowly, in the remote's own child: rot is found while it can be repaired.

Paced as an upload and stopped as one; an object that differs is read twice before it is called bad (P2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.coverage import objects_of
from ckptd.errors import DamagedError, NotPermitted, RefusedError, StorageError
from ckptd.remote.checksums import crc64, to_hex
from ckptd.remote.documents import (
    manifests_of_commit,
    read_commit,
    read_supplements,
    stem_of,
    stem_of_key,
)
from ckptd.remote.observe import confirm, still_ours
from ckptd.remote.scrub_messages import BadCopy, Scrub, Scrubbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.manifest import ManifestFile
    from ckptd.remote.commit import Ground
    from ckptd.remote.pacing import Pacer
    from ckptd.remote.store import Store

_STEP_BYTES = 4 << 20


def scrub(ground: Ground, order: Scrub, pacer: Pacer, check: Callable[[], None]) -> Scrubbed:
    """Compare the next objects; `check` may raise between two steps.

    What rights or I/O keep from being read is neither good nor bad: it is named, and the rest is compared.

    Raises:
        RemoteUnreachable, RemoteNotOurs: the remote is not there, or another one.
    """
    store = ground.store
    still_ours(store, ground.identity)
    where = stem_of_key(order.commit_key)
    view = read_commit(store, where) if where is not None else None
    if view is None or view.sha256 != order.commit_sha256:
        return Scrubbed(is_gone=True)
    bad: list[BadCopy] = []
    unread: list[str] = []
    read = 0
    last = order.after
    is_whole = True
    try:
        commits = [view, *read_supplements(store, stem_of(view.commit))]
        objects = objects_of(
            known.manifest for one in commits for known in manifests_of_commit(store, one.commit)
        )
    except (DamagedError, RefusedError) as error:
        bad.append(BadCopy(key=view.key, expected="its manifests", found=error.message))
        objects = {}
    except (NotPermitted, StorageError):
        unread.append(view.key)
        objects = {}
    for key in sorted(objects):
        if key <= order.after or (order.only and key not in order.only):
            continue
        if read >= order.limit_bytes:
            is_whole = False
            break
        try:
            found = _compare(store, objects[key], pacer, check)
            if found is not None:
                read += objects[key].bytes
                found = _compare(store, objects[key], pacer, check)
        except (NotPermitted, StorageError):
            found = None
            unread.append(key)
        if found is not None:
            bad.append(found)
        read += objects[key].bytes
        last = key
    if bad and not confirm(store, ((view.key, view.sha256),), ground.identity).ok:
        return Scrubbed(read_bytes=read, is_gone=True)
    return Scrubbed(
        read_bytes=read, next_after=None if is_whole else last, bad=tuple(bad), unread=tuple(unread)
    )


def _compare(store: Store, file: ManifestFile, pacer: Pacer, check: Callable[[], None]) -> BadCopy | None:
    held = store.stat(file.key)
    if held is None or held.bytes != file.bytes:
        found = "nothing" if held is None else f"{held.bytes} bytes"
        return BadCopy(key=file.key, expected=f"{file.bytes} bytes", found=found)
    crc = done = 0
    while done < file.bytes:
        step = pacer.chunk_bytes(min(_STEP_BYTES, file.bytes - done))
        pacer.take(step, check)
        try:
            data = store.read_at(file.key, done, step)
        except (FileNotFoundError, RefusedError, DamagedError):
            data = b""
        if not data:
            break
        crc = crc64(data, crc)
        done += len(data)
    if done == file.bytes and to_hex(crc) == file.checksums.crc64nvme:
        return None
    found = f"CRC64 {to_hex(crc)} over {done} bytes"
    return BadCopy(key=file.key, expected=f"CRC64 {file.checksums.crc64nvme}", found=found)
