"""Detect links where checkpoints should be, by their names, without following them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckptd.base.names import name_problem, shown
from ckptd.core.model.layouts import parse_shard_name

if TYPE_CHECKING:
    from ckptd.core.model.listing import FolderListing

_CHECKPOINT = re.compile(r"^(global_step|checkpoint[-_]|step[-_]?|iter_)\d+$")


def may_be_checkpoint(name: str, latest: str | None) -> bool:
    """Whether a name may be a checkpoint's: as DeepSpeed, Hugging Face and others write it, or as `latest`
    says.
    """
    is_one = _CHECKPOINT.match(name) is not None or name == latest
    return is_one and shown(name) == name and name_problem(name) is None


def leads_elsewhere(save_dir_fd: int, name: str) -> bool:
    """False for a second name of something that lies beside it: that is looked at under its own."""
    try:
        target = os.readlink(name, dir_fd=save_dir_fd)
    except OSError:
        return True
    return "/" in target.removeprefix("./").rstrip("/")


def linked_shard(listing: FolderListing | None) -> list[str]:
    """Return the first shard of a folder that is a link, or no regular file; nothing where there is none."""
    for path in listing.irregular if listing is not None else ():
        if parse_shard_name(path.rpartition("/")[2]) is not None:
            return [f"{listing.tag}/{path}"] if listing is not None else []
    return []
