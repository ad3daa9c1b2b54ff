"""Universal forms that lie in a directory already, and what each was made from (H15)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.trainers import universal_name
from ckptd.errors import CkptdError
from ckptd.recover.choose import DESCRIPTION
from ckptd.recover.steps import DERIVED_ACCELERATE, DERIVED_UNIVERSAL

if TYPE_CHECKING:
    from ckptd.core.listing import SaveDirListing

_DESCRIPTION_LIMIT_BYTES = 8 << 20


def derived_universals(save_dir_fd: int) -> dict[str, dict[str, str] | None]:
    """What lies in `_ckptd/derived/universal`: tag → fingerprints of its source; None when unreadable."""
    return _derived(save_dir_fd, DERIVED_UNIVERSAL, "")


def derived_accelerate(save_dir_fd: int) -> dict[str, dict[str, str] | None]:
    """The same of `_ckptd/derived/accelerate`, where the form lies one level deeper."""
    return _derived(save_dir_fd, DERIVED_ACCELERATE, "/pytorch_model", "/checkpoint")


def put_in_universals(save_dir_fd: int, listing: SaveDirListing) -> dict[str, dict[str, str] | None]:
    """The same of what lies beside shards under a universal form's name, by that name below save_dir."""
    names = [f"{f.tag}/{universal_name(root)}" for f in listing.folders for root in f.roots if root]
    is_there = [name for name in names if files.stat_beneath(save_dir_fd, name) is not None]
    return {name: source_of(save_dir_fd, name) for name in is_there}


def _derived(save_dir_fd: int, place: str, *inner: str) -> dict[str, dict[str, str] | None]:
    try:
        fd = files.open_dir_beneath(save_dir_fd, place)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        names = [name for name in sorted(os.listdir(fd)) if not name.startswith(".")]
        found = {name: [_sources(fd, name + one) for one in inner] for name in names}
        return {name: next(filter(None, sources), None) for name, sources in found.items()}
    finally:
        os.close(fd)


def source_of(save_dir_fd: int, folder: str) -> dict[str, str] | None:
    """Fingerprints of what a universal folder was made from; None when it is absent or unreadable."""
    head, _, name = folder.rpartition("/")
    try:
        fd = files.open_dir_beneath(save_dir_fd, head)
    except (OSError, CkptdError):
        return None
    try:
        return _sources(fd, name)
    finally:
        os.close(fd)


def _sources(fd: int, name: str) -> dict[str, str] | None:
    try:
        data = files.read_beneath(fd, f"{name}/{DESCRIPTION}", limit_bytes=_DESCRIPTION_LIMIT_BYTES)
        marks = json.loads(data)["source"]["fingerprints"]
        return {str(path): str(mark) for path, mark in marks.items()}
    except (OSError, CkptdError, ValueError, KeyError, TypeError, AttributeError):
        return None
