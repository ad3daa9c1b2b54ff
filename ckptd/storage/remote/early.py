"""Upload a shard while the others of its save are still being written (docs/adr/0219).

Nothing is proved and nothing replaced: the upload of the whole save finds the object, compares it with the
file as it was sealed, and replaces what differs. So an object that came early saves time and decides nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from ckptd.errors import CkptdError, TargetExists
from ckptd.storage.remote.commit import open_root
from ckptd.storage.remote.messages import UploadedObject
from ckptd.storage.remote.observe import still_ours
from ckptd.storage.remote.transfer import mode_of_folder, open_source
from ckptd.storage.stores.checksums import to_hex
from ckptd.storage.stores.sources import CheckedSource, FileSource, RateLimitedSource

if TYPE_CHECKING:
    from ckptd.storage.remote.messages import EarlyRequest
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.remote.transfer import TransferControl


def upload_early(attached: AttachedRemote, order: EarlyRequest, control: TransferControl) -> None:
    """Send the shard, unless it has no end yet, is not in the page cache, or something has its key.

    What is cut short is given up: nobody could tell whether its bytes and those of a later attempt are of one
    write.

    Raises:
        SourceChanged, DamagedError: the file was written again, or the order was cancelled.
        RemoteError: as the store.
    """
    still_ours(attached.store, attached.identity)
    root = open_root(order.root)
    try:
        _send(attached, order, root, control)
    finally:
        os.close(root)


def _send(attached: AttachedRemote, order: EarlyRequest, root: int, control: TransferControl) -> None:
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
        except CkptdError:
            with suppress(CkptdError):
                store.discard(file.key)
            raise
    control.on_done(UploadedObject(key=file.key, bytes=file.bytes, crc64nvme=to_hex(crc), proof="none"))
