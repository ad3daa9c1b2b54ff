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
from ckptd.core.layouts import Role
from ckptd.errors import RefusedError, TargetExists
from ckptd.recover.fetch import BUFFER_BYTES, PARALLEL
from ckptd.remote.checksums import crc64, to_hex

if TYPE_CHECKING:
    from ckptd.core.manifest import ManifestFile
    from ckptd.recover.choose import Copy

_TELLING = (Role.OPTIM, Role.MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """`is_there`: the folder exists and is this save. `lacking`: absent from it, or other bytes."""

    is_there: bool
    lacking: tuple[ManifestFile, ...]


def look_into(dir_fd: int, target: str, whole: Copy, wanted: Copy) -> Held:
    """Compare `target` below `dir_fd` with what is wanted of a form; `whole` tells which save it is.

    Raises:
        TargetExists: there is something else under that name (73).
    """
    try:
        folder = files.open_dir_beneath(dir_fd, target)
    except FileNotFoundError:
        return Held(is_there=False, lacking=wanted.files)
    except (NotADirectoryError, RefusedError) as error:
        msg = f"{target} is there and is no folder of its own"
        raise TargetExists(msg) from error
    try:
        known = {file.path: file for file in whole.files}
        present = [file for file in known.values() if _is_something(folder, file.path)]
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="compare") as pool:
            found = dict(
                zip((f.path for f in present), pool.map(lambda f: _is(folder, f), present), strict=True)
            )
    finally:
        os.close(folder)
    telling = [same for path, same in found.items() if _tells(known[path])]
    if not (any(telling) if telling else all(found.values())):
        commit = whole.view.commit
        msg = f"{target} is there and is not the {commit.form} form of {commit.tag} that was committed"
        raise TargetExists(msg)
    return Held(is_there=True, lacking=tuple(f for f in wanted.files if not found.get(f.path, False)))


def _tells(file: ManifestFile) -> bool:
    """Whether its bytes differ from save to save: shards; what a conversion puts at the top of its folder."""
    if file.role is Role.UNIVERSAL:
        return file.path.rpartition("/")[2] == "ckptd.json" or "/" not in file.path
    return file.role in _TELLING


def _is_something(folder: int, path: str) -> bool:
    try:
        return files.stat_beneath(folder, path) is not None
    except RefusedError:
        return True


def _is(folder: int, file: ManifestFile) -> bool:
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
