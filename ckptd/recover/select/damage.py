"""Find damage in a checkpoint folder: read every byte and compare `torch.save`'s own CRCs.

An upload compares the same; here it is proven anew for a person who gives the folder up.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.core.model.layouts import parse_shard_name
from ckptd.errors import DamagedError
from ckptd.storage.stores.sources import CheckedSource, FileSource, crc64_of, records_of

if TYPE_CHECKING:
    from ckptd.core.model.listing import FolderListing, ListedFile


def damage_in(save_dir_fd: int, listing: FolderListing) -> str | None:
    """Return the first shard whose bytes are not those that were saved, and how; None: none is known to be
    other.

    Raises:
        SourceChanged: somebody writes there. StorageError: the disk cannot read a shard.
    """
    for file in listing.own:
        # what memory holds of a file may be wrong where the disk is right: the second time it is read anew
        path = f"{listing.tag}/{file.path}"
        if _differs(save_dir_fd, path, file) is not None:
            reason = _differs(save_dir_fd, path, file)
            if reason is not None:
                return reason
    return None


def _differs(save_dir_fd: int, path: str, file: ListedFile) -> str | None:
    with files.reading(save_dir_fd, path, file.identity) as fd:
        source = FileSource(fd, path)
        is_shard = parse_shard_name(file.name) is not None
        try:
            checked = CheckedSource(source, records_of(fd, path, is_shard=is_shard), path)
            crc64_of(checked, 0, source.size_bytes, drops=True)
        except DamagedError as error:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return error.message
    return None
