"""What of committed checkpoints lies intact or damaged in save_dir, by size and CRC64 (adr/0091)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.coverage import order_of
from ckptd.core.layouts import Role
from ckptd.core.listing import OURS
from ckptd.errors import CkptdError, TargetExists
from ckptd.recover.choose import ZERO, Copy, Nodes
from ckptd.recover.copies import of_node
from ckptd.recover.held import look_into, same_bytes
from ckptd.recover.mend import is_same_file, seen_in, unrest
from ckptd.recover.steps import name_of_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ckptd.core.manifest import ManifestFile
    from ckptd.recover.mend import Seen
    from ckptd.recover.sight import RemoteSight

_SHARDS = (Role.OPTIM, Role.MODEL, Role.LAYER, Role.EXPERT, Role.WEIGHTS)
_DERIVED = f"{OURS}/derived/universal"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFault:
    """One file of a committed save that is absent from its folder here, or other bytes."""

    tag: str
    file: ManifestFile
    copies: tuple[Copy, ...]
    """The very save on each remote that holds it."""
    is_there: bool
    seen: Seen
    """Every file of the folder as it was before the first of them was compared."""
    left: str | None = None
    """Why it is not mended; None: it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFolder:
    """An empty folder of a committed save that is absent here; NVMe offload loads no save without it."""

    tag: str
    path: str
    copy: Copy
    left: str | None = None
    """As in `LocalFault`."""


class LocalFiles:
    """save_dir as a source of intact bytes, and what in it is damaged. `node_id`: whose files ours are."""

    def __init__(self, save_dir: Path, fd: int, node_id: str | None, say: Callable[[str], None]) -> None:
        self._save_dir = save_dir
        self._fd = fd
        self._node_id = node_id
        self._say = say
        self._good: dict[tuple[str, str], bool] = {}

    def find(self, tag: str, form: str, file: ManifestFile) -> str | None:
        """Path below save_dir of a file with exactly those bytes; None: there is none."""
        for path in _candidates(tag, form, file):
            mark = (path, file.checksums.crc64nvme)
            if mark not in self._good:
                self._good[mark] = same_bytes(self._fd, file.model_copy(update={"path": path}))
            if self._good[mark]:
                return path
        return None

    def is_good_now(self, tag: str, file: ManifestFile) -> None:
        """It was mended."""
        self._good[f"{tag}/{file.path}", file.checksums.crc64nvme] = True

    def faults(
        self, remotes: Sequence[RemoteSight], tag: str | None
    ) -> tuple[list[LocalFault], list[LostFolder]]:
        """Damaged files and lost folders of committed saves whose folder is here; oldest checkpoint first.

        A folder that holds another save than the newest committed one of its tag is left alone, and so are
        files beside the shards that somebody changed on purpose (another time or size).
        """
        found: list[LocalFault] = []
        folders: list[LostFolder] = []
        for name, copies in _newest_by_tag(remotes, tag, self._say).items():
            status = files.stat_beneath(self._fd, name)
            if status is None:
                continue
            whole = self._ours(copies[0], name)
            seen = seen_in(self._fd, name)
            held = self._lacking(name, whole)
            if held is None:
                self._say(f"{name}: the folder here is another save than the committed one; left alone")
                continue
            lacking = [file for file in held if self._is_damage(name, file)]
            lost = self._lost(name, copies[0])
            if not lacking and not lost:
                continue
            reason = unrest(str(self._save_dir), self._fd, name)
            same = (whole, *(other for other in copies[1:] if _is_of_save(other, whole)))
            found += [
                LocalFault(
                    tag=name,
                    file=file,
                    copies=same,
                    is_there=self._is_there(name, file),
                    seen=seen,
                    left=reason,
                )
                for file in lacking
            ]
            folders += [LostFolder(tag=name, path=path, copy=whole, left=reason) for path in lost]
        return found, folders

    def _lost(self, tag: str, copy: Copy) -> list[str]:
        """The empty folders of this node's part of a save that are not there."""
        is_alone = len(copy.manifests) == 1
        mine = (m for m in copy.manifests if is_alone or m.node_id == self._node_id)
        paths = {path for manifest in mine for path in manifest.empty_folders}
        return sorted(path for path in paths if files.stat_beneath(self._fd, f"{tag}/{path}") is None)

    def _lacking(self, tag: str, whole: Copy) -> list[ManifestFile] | None:
        """What of a committed save is bad or absent here; None: the folder is another save.

        Where fingerprints tell nothing any more (rot in a zip directory), sizes and times do: whoever saves
        again changes the time of what it writes.
        """
        try:
            return list(look_into(self._save_dir, self._fd, tag, whole, whole).lacking)
        except TargetExists:
            lacking = []
        try:
            for file in whole.files:
                path = f"{tag}/{file.path}"
                status = files.stat_beneath(self._fd, path)
                is_same = status is None or (status.st_size, status.st_mtime_ns) == (
                    file.bytes,
                    file.mtime_ns,
                )
                if file.role in _SHARDS and not is_same:
                    return None
                if status is None or not same_bytes(self._fd, file.model_copy(update={"path": path})):
                    lacking.append(file)
        except (CkptdError, OSError):
            return None
        return lacking

    def _is_there(self, tag: str, file: ManifestFile) -> bool:
        return files.stat_beneath(self._fd, f"{tag}/{file.path}") is not None

    def _is_damage(self, tag: str, file: ManifestFile) -> bool:
        if file.role in _SHARDS:
            return True
        status = files.stat_beneath(self._fd, f"{tag}/{file.path}")
        if status is None or (status.st_size, status.st_mtime_ns) == (file.bytes, file.mtime_ns):
            return True
        self._say(f"{tag}/{file.path} was changed since the save; left alone")
        return False

    def _ours(self, copy: Copy, tag: str) -> Copy:
        """What of a copy this node wrote; where that is not known, what is here of it."""
        whole = of_node(copy, Nodes())
        if len(copy.manifests) == 1:
            return whole
        mine = tuple(m for m in copy.manifests if m.node_id == self._node_id)
        if mine:
            return of_node(replace(copy, manifests=mine), Nodes())
        here = tuple(file for file in whole.files if self._is_there(tag, file))
        return replace(whole, files=here)


def _candidates(tag: str, form: str, file: ManifestFile) -> Iterable[str]:
    if file.role is Role.EXTRA:
        return [name_of_extra(file)]
    if form == ZERO:
        return [f"{tag}/{file.path}"]
    below = file.path.partition("/")[2]
    return [f"{_DERIVED}/{tag}/{path}" for path in (file.path, below) if path]


def _newest_by_tag(
    remotes: Sequence[RemoteSight], tag: str | None, say: Callable[[str], None]
) -> dict[str, list[Copy]]:
    """The newest committed save of each tag, on every remote that holds it."""
    views = [
        (order_of(view.commit), view.commit.generation, remote, view)
        for remote in remotes
        for view in remote.commits
        if view.commit.form == ZERO and tag in (None, view.commit.tag)
    ]
    newest = {view.commit.tag: order for order, _, _, view in sorted(views, key=lambda row: row[:2])}
    found: dict[str, list[Copy]] = {}
    for order, _, remote, view in sorted(views, key=lambda row: row[:2]):
        name = view.commit.tag
        if order != newest[name]:
            continue
        try:
            copy = of_node(
                Copy(remote=remote, view=view, manifests=remote.manifests(view.commit), files=()), Nodes()
            )
        except CkptdError as error:
            say(f"{remote.name}: {name}: {error.message}")
            continue
        others = [c for c in found.get(name, []) if c.remote.name != remote.name]
        found[name] = [*others, copy]
    return found


def _is_of_save(other: Copy, whole: Copy) -> bool:
    """Whether a copy holds the same content, file by file."""
    theirs = {file.path: file for file in other.files}
    return all(f.path in theirs and is_same_file(theirs[f.path], f) for f in whole.files if f.role in _SHARDS)


def opened_save_dir(path: Path) -> int | None:
    """A descriptor of save_dir; None where there is none."""
    try:
        return os.open(path, files.DIR_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return None
