"""Upload a shard while the others of its save are still being written (docs/adr/0220).

Nothing is proved and nothing replaced: the upload of the whole save finds the object, compares it with the
file as it was sealed, and replaces what differs. So an object that came early saves time and decides nothing.
What no save came of is deleted. Both only where no other node ever wrote: another may take an object that
nobody lists for its own.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, cast

from ckptd.base.names import decode_name
from ckptd.core.model.generation import objects_of
from ckptd.core.model.records import ZERO
from ckptd.errors import RefusedError, TargetExists
from ckptd.storage.remote.commit import open_root
from ckptd.storage.remote.documents import manifest_folder, manifests_of_commit, read_commit, read_generation
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import UploadedObject
from ckptd.storage.remote.observe import still_ours
from ckptd.storage.remote.transfer import mode_of_folder, open_source
from ckptd.storage.stores.checksums import to_hex
from ckptd.storage.stores.sources import CheckedSource, FileSource, RateLimitedSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import DeleteEarly, EarlyRequest
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.remote.transfer import TransferControl
    from ckptd.storage.stores.base import Store


def upload_early(attached: AttachedRemote, order: EarlyRequest, control: TransferControl) -> None:
    """Upload the shard, unless it has no end yet, is not in the page cache, or is not alone there.

    What is cut short is given up: nobody could tell whether its bytes and those of a later attempt are of one
    write.

    Raises:
        SourceChanged, DamagedError: the file was written again, or the order was cancelled.
        RemoteError: as the store.
    """
    still_ours(attached.store, attached.identity)
    where = _generation(order.file.key)
    if _other_node(attached.store, order.node_id) or any(attached.store.list(manifest_folder(where))):
        return
    root = open_root(order.root)
    try:
        _upload(attached, order, root, control)
    finally:
        os.close(root)


def _upload(attached: AttachedRemote, order: EarlyRequest, root: int, control: TransferControl) -> None:
    file, store = order.file, attached.store
    with open_source(file, root, partial(mode_of_folder, root)) as source:
        # to read the disk would slow the save
        is_fit = isinstance(source, CheckedSource) and cast("FileSource", source.inner).is_cached
        if not is_fit or store.stat(file.key) is not None:
            return
        paced = RateLimitedSource(source, control.pacer, control.check)
        moving = partial(control.on_moving, file.key, file.bytes)
        try:
            crc = store.upload(file.key, paced, resume=None, on_progress=moving)
        except TargetExists:
            return
        finally:
            # nothing half done stays, and the answer is no proof of what lies there when the save is whole
            store.discard(file.key)
    control.on_done(UploadedObject(key=file.key, bytes=file.bytes, crc64nvme=to_hex(crc), proof="none"))


def delete_early(attached: AttachedRemote, order: DeleteEarly, check: Callable[[], None]) -> None:
    """Give up half uploads, and delete objects that no manifest lists.

    A COMMIT is asked for by its name, and its manifests by theirs: a listing may be of before it.

    Raises:
        RefusedError: another node has written there, or a manifest cannot be read.
        DamagedError: a COMMIT there cannot be read.
    """
    store = attached.store
    still_ours(store, attached.identity)
    for key, token in order.uploads:
        store.discard(key, token)
    if node := _other_node(store, order.node_id):
        raise RefusedError(f"node {node} writes to {store.url}, too", hint="they cost room, nothing else")
    for key in order.objects:
        check()
        damaged: list[str] = []
        where = _generation(key)
        manifests = read_generation(store, where, damaged)
        if damaged:
            raise RefusedError(f"{key} stays: {damaged[0]}", hint="see `ckptd verify`")
        if (commit := read_commit(store, where)) is not None:
            manifests += manifests_of_commit(store, commit.commit)
        if key not in objects_of(known.manifest for known in manifests):
            store.delete(key)


def _other_node(store: Store, node_id: str) -> str | None:
    seen = Heartbeats(store).everyone()
    return next((s.node for s in seen if s.heartbeat is None or s.heartbeat.node_id != node_id), None)


def _generation(key: str) -> Stem:
    return decode_name(key.partition("/")[0]), 1, ZERO
