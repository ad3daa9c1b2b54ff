"""What of a committed form lies in a folder already: every file compared by size and CRC64 (P2).

A second `restore` fetches only what is missing or bad. A folder under the same name that is another save is
never mixed with this one: shards of two saves load without a warning and train wrongly (docs/design.md §3).
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.convert.supervise import inspect_files
from ckptd.core.layouts import Role
from ckptd.errors import RefusedError, TargetExists
from ckptd.recover.choose import DESCRIPTION, ZERO
from ckptd.recover.fetch import BUFFER_BYTES, PARALLEL
from ckptd.remote.checksums import crc64, to_hex

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptd.core.manifest import ManifestFile
    from ckptd.recover.choose import Copy

_SHARDS = (Role.OPTIM, Role.MODEL, Role.LAYER, Role.EXPERT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """`is_there`: the folder exists and is this save. `lacking`: absent from it, or other bytes."""

    is_there: bool
    lacking: tuple[ManifestFile, ...]


def look_into(root: Path, dir_fd: int, target: str, whole: Copy, wanted: Copy) -> Held:
    """Compare `target` below `root` (open as `dir_fd`) with what is wanted of the form `whole`.

    Raises:
        TargetExists: there is something else under that name (73).
    """
    try:
        folder = files.open_dir_beneath(dir_fd, target)
    except FileNotFoundError:
        return Held(is_there=False, lacking=wanted.files)
    except (NotADirectoryError, RefusedError) as error:
        msg = f"{root / target} is there and is no folder of its own"
        raise TargetExists(msg) from error
    try:
        known = {file.path: file for file in whole.files}
        present = [file for file in known.values() if _is_something(folder, file.path)]
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="compare") as pool:
            found = dict(
                zip(
                    (f.path for f in present), pool.map(lambda f: same_bytes(folder, f), present), strict=True
                )
            )
    finally:
        os.close(folder)
    if not _is_this_save(root / target, whole, found):
        commit = whole.view.commit
        msg = f"{root / target} is there and is not the {commit.form} form of {commit.tag} that was committed"
        raise TargetExists(msg)
    return Held(is_there=True, lacking=tuple(f for f in wanted.files if not found.get(f.path, False)))


def _is_this_save(folder: Path, whole: Copy, found: Mapping[str, bool]) -> bool:
    """Whether a folder with these files (path → as committed) is the save, perhaps with bad files in it.

    A shard whose bytes differ is a bad copy if it cannot be read or bears the committed fingerprint; a whole
    archive with another one is another save. A universal form is known by its `ckptd.json`.
    """
    if whole.view.commit.form != ZERO:
        top = [same for path, same in found.items() if "/" not in path]
        return found.get(DESCRIPTION, any(top) or not found)
    shards = {f.path: f.fingerprint for f in whole.files if f.role in _SHARDS and f.path in found}
    if not shards:
        return all(found.values())
    other = [path for path in shards if not found[path]]
    same_save = len(other) < len(shards)
    for row in inspect_files(folder, other):
        if row.fingerprint and row.fingerprint != shards[row.path]:
            return False
        same_save = same_save or bool(row.fingerprint)
    return same_save


def _is_something(folder: int, path: str) -> bool:
    try:
        return files.stat_beneath(folder, path) is not None
    except RefusedError:
        return True


def same_bytes(folder: int, file: ManifestFile) -> bool:
    """Same size and same CRC64; pages are dropped after reading."""
    try:
        fd = files.open_beneath(folder, file.path)
    except (OSError, RefusedError):
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
            return False
        crc = offset = 0
        while data := os.pread(fd, BUFFER_BYTES, offset):
            crc = crc64(data, crc)
            files.drop_pages(fd, offset, len(data))
            offset += len(data)
        return to_hex(crc) == file.checksums.crc64nvme
    finally:
        os.close(fd)
