"""Whether a checkpoint folder is damaged: every byte of its shards read, and `torch.save`'s own CRCs compared.

It is what an upload compares (docs/formats.md), proven anew for a person who gives the folder up.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.errors import DamagedError
from ckptd.remote.source import CheckedSource, FileSource, crc64_of, records_of

if TYPE_CHECKING:
    from ckptd.core.identity import FileIdentity
    from ckptd.core.listing import FolderListing


def damage_in(save_dir_fd: int, listing: FolderListing) -> str | None:
    """The first shard whose bytes are not those that were saved, and how; None: none is known to be other.

    Raises:
        SourceChanged: somebody writes there. StorageError: the disk cannot read a shard.
    """
    for file in listing.shards:
        path = f"{listing.tag}/{file.path}"
        # what memory holds of a file may be wrong where the disk is right: the second time it is read anew
        if _differs(save_dir_fd, path, file.identity) is not None:
            reason = _differs(save_dir_fd, path, file.identity)
            if reason is not None:
                return reason
    return None


def _differs(save_dir_fd: int, path: str, identity: FileIdentity) -> str | None:
    with files.reading(save_dir_fd, path, identity) as fd:
        source = FileSource(fd, path)
        try:
            checked = CheckedSource(source, records_of(fd, path, is_shard=True), path)
            crc64_of(checked, 0, source.size_bytes, drops=True)
        except DamagedError as error:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return error.message
    return None
