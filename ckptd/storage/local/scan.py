"""Scan a save_dir once: names and identities by descriptor; only pointers are opened for reading.

The scanner never enters `_ckptd`, follows no symlink and crosses no mount; what is neither a folder nor a
regular file is reported, not touched. Links where checkpoints should be are known by their names.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import stat
import threading
import time
from typing import TYPE_CHECKING

from ckptd.base import extents, files
from ckptd.base import names as base_names
from ckptd.base.identity import FolderIdentity
from ckptd.base.names import name_problem, shown
from ckptd.base.owned_dirs import list_dir
from ckptd.core.model.layouts import (
    LATEST_UNIVERSAL,
    POINTERS,
    WRITES_AS,
    Trainer,
    parse_shard_name,
    shard_roots_of,
)
from ckptd.core.model.listing import (
    OURS,
    FolderListing,
    ListedFile,
    SaveDirListing,
)
from ckptd.core.model.other_layouts import (
    MODEL,
    NOTHING_DECLARED,
    TORCH_FILE,
    DeclaredSave,
    layout_of_file,
    other_layout_of,
)
from ckptd.core.model.resume_marker import RESUMED_PATH
from ckptd.core.model.unprotected import is_loose, is_trainers_checkpoint, of_listing
from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptd.core.model.other_layouts import Layout
    from ckptd.core.model.unprotected import Unprotected


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


log = logging.getLogger("ckptd.scan")

MAX_DEPTH = 8
_NOT_LISTED = (OURS, base_names.TEMPORARY_PREFIX)
REST_SECONDS = 600.0
"""A folder in which nothing was written for so long will get no files that tell what it is."""
EXTRA_LIMIT_BYTES = 16 << 20
LOST_AND_FOUND = "lost+found"
"""Root's, in every ext4 that is mounted at save_dir."""
WALK_SECONDS = 10.0
"""The result of a walk over all processes is used for so long."""
WALK_WAIT_SECONDS = 1.0
"""So long its end is waited for; usually it takes some milliseconds, on a node of thousands of processes
seconds.
"""
WALK_SPARES = 20
"""And for so many times as long as it took: looking takes at most a twentieth of the time."""
_NOT_TO_BE_SEEN = (PermissionError, FileNotFoundError, ProcessLookupError)
"""Another user's process, or one that has ended."""
_POINTER_LIMIT_BYTES = 4096
_WORD_LIMIT_BYTES = 4 << 20
"""It names every folder of save_dir."""


def scan(
    save_dir_fd: int,
    trainer: str = "auto",
    before: SaveDirListing | None = None,
    declared: DeclaredSave = NOTHING_DECLARED,
) -> SaveDirListing:
    """List a save_dir, without entries that vanish meanwhile: the next scan sees the truth.

    Folders that another trainer than `trainer` wrote, and that are not `declared`, are foreign. What is as it
    was in `before` is given back as the same object, so that comparing is cheap.
    """
    known = {folder.tag: folder for folder in before.folders} if before else {}
    wanted = WRITES_AS.get(trainer, trainer)
    folders, extras = list[FolderListing](), list[ListedFile]()
    bare: dict[str, FolderListing] = {}
    foreign, nameless, closed = list[str](), list[str](), list[str]()
    linked, names = list[str](), list[str]()
    latest = read_pointer(save_dir_fd, "latest")
    for name in sorted(one for one in list_dir(save_dir_fd) if not one.startswith(_NOT_LISTED)):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=save_dir_fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                if name not in known and _is_closed(save_dir_fd, name, status):
                    foreign.append(name)
                    closed += [shown(name)] if name != LOST_AND_FOUND else []
                    continue
                listing = scan_folder(save_dir_fd, name, known.get(name), declared)
                linked += linked_shard(listing)
                is_one = listing is not None and _is_meant(listing, wanted)
                if listing is None or not is_one or shown(name) != name:
                    foreign.append(name)
                    nameless += [shown(name)] if is_one else []
                    if listing is not None and not listing.shards and _is_fit(name):
                        bare[name] = listing
                else:
                    folders.append(listing)
            elif stat.S_ISREG(status.st_mode) and _is_fit(name):
                if (layout := layout_of_file(name, wanted, declared)) is not None:
                    folders.append(_single_file(save_dir_fd, name, status, layout, known.get(name)))
                    continue
                names.append(name)
                extras += [_listed(name, status)] if _is_extra(name, status) else []
            else:
                foreign.append(name)
                linked += _linked(save_dir_fd, name, status, latest)
    folders, loose = _without_loose(folders, names)
    return SaveDirListing(
        device=os.fstat(save_dir_fd).st_dev,
        folders=tuple(folders),
        extras=tuple(extras),
        latest=latest,
        latest_universal=read_pointer(save_dir_fd, LATEST_UNIVERSAL),
        resumed=read_pointer(save_dir_fd, RESUMED_PATH, limit_bytes=_WORD_LIMIT_BYTES),
        foreign=tuple(foreign + loose),
        nameless=tuple(nameless),
        bare=tuple(bare),
        closed=tuple(closed),
        linked=tuple(linked),
        unprotected=_unprotected(bare, names, loose, latest),
    )


def _is_extra(name: str, status: os.stat_result) -> bool:
    return name not in POINTERS and status.st_size <= EXTRA_LIMIT_BYTES


def _linked(save_dir_fd: int, name: str, status: os.stat_result, latest: str | None) -> list[str]:
    is_one = stat.S_ISLNK(status.st_mode) and may_be_checkpoint(name, latest)
    return [name] if is_one and leads_elsewhere(save_dir_fd, name) else []


def _unprotected(
    bare: dict[str, FolderListing], names: list[str], loose: list[str], latest: str | None
) -> tuple[Unprotected, ...]:
    paths = {tag: [file.path for file in listing.files] for tag, listing in bare.items()}
    at_rest = [tag for tag, listing in bare.items() if _is_at_rest(listing)]
    return of_listing(paths, names, loose, latest, at_rest)


def _without_loose(
    folders: list[FolderListing], names: Iterable[str]
) -> tuple[list[FolderListing], list[str]]:
    """Split off the shards in global_stepN that lie beside a Trainer's checkpoints, or in one of them.

    `trainer.save_model` writes them where stage 3 gathers no weights. The Trainer loads checkpoint-N alone.
    """
    has_trainers = any(f.trainer is Trainer.HUGGINGFACE and f.other_layout in (None, MODEL) for f in folders)
    if not has_trainers and not is_trainers_checkpoint(names):
        return folders, []
    loose = [f.tag for f in folders if f.trainer is Trainer.DEEPSPEED and is_loose(f.tag)]
    return [folder for folder in folders if folder.tag not in loose], loose


def _is_closed(save_dir_fd: int, name: str, status: os.stat_result) -> bool:
    """Tell whether a folder is another user's and closed to us; it stops nothing. Our own is waited for."""
    if status.st_uid == os.geteuid():
        return False
    return not os.access(name, os.R_OK | os.X_OK, dir_fd=save_dir_fd, effective_ids=True)


def _is_at_rest(listing: FolderListing) -> bool:
    newest_ns = max((file.identity.mtime_ns for file in listing.files), default=0)
    return time.time() - newest_ns / 1e9 > REST_SECONDS


def _is_meant(listing: FolderListing, wanted: str) -> bool:
    """Tell whether it is a checkpoint of the trainer that the job file names, or is declared there."""
    is_declared = isinstance(listing.other_layout, DeclaredSave)
    return listing.is_checkpoint and (is_declared or wanted in ("auto", listing.trainer))


def _single_file(
    save_dir_fd: int, name: str, status: os.stat_result, layout: Layout, before: FolderListing | None
) -> FolderListing:
    """List a checkpoint that is one file of save_dir."""
    where = os.fstat(save_dir_fd)
    if before is not None and _is_same(before, where, [(name, status)], [], []):
        return before
    return FolderListing(
        tag=name,
        trainer=layout.trainer,
        roots=(),
        other_layout=layout,
        folder=FolderIdentity(dev=where.st_dev, ino=where.st_ino),
        files=(_listed(name, status),),
    )


def scan_folder(
    save_dir_fd: int,
    tag: str,
    before: FolderListing | None = None,
    declared: DeclaredSave = NOTHING_DECLARED,
) -> FolderListing | None:
    """List one checkpoint, a folder with everything below it or a file; None: it vanished; `before` itself:
    nothing changed.
    """
    try:
        fd = files.open_dir_beneath(save_dir_fd, tag)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        status = files.stat_beneath(save_dir_fd, tag)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise
        layout = layout_of_file(tag, "auto", declared) or TORCH_FILE
        return _single_file(save_dir_fd, tag, status, layout, before)
    try:
        status = os.fstat(fd)
        found: list[tuple[str, os.stat_result]] = []
        irregular: list[str] = []
        empty: list[str] = []
        for path, item in _walk(fd, "", status.st_dev, MAX_DEPTH):
            if item is not None and path.endswith("/") and _is_fit(path[:-1]):
                empty.append(path[:-1])
            elif item is not None and stat.S_ISREG(item.st_mode) and _is_fit(path):
                found.append((path, item))
            else:
                irregular.append(shown(path))
        if before is not None and _is_same(before, status, found, irregular, empty):
            return before
        regular = [_listed(path, item) for path, item in found]
        paths = frozenset(file.path for file in regular)
        # the layouts of single files are not of folders
        other = None if tag in paths else other_layout_of(tag, paths, declared)
        trainer, roots = (other.trainer, ()) if other is not None else shard_roots_of(tag, paths)
        return FolderListing(
            tag=tag,
            trainer=trainer,
            roots=roots,
            other_layout=other,
            folder=FolderIdentity(dev=status.st_dev, ino=status.st_ino),
            files=tuple(regular),
            irregular=tuple(irregular),
            empty=tuple(empty),
        )
    finally:
        os.close(fd)


def _is_fit(path: str) -> bool:
    """Whether a file may be uploaded under its name; this runs for every file of a node at every look."""
    is_plain = path.isascii() and path.isprintable() and base_names.TEMPORARY_PREFIX not in path
    return is_plain or name_problem(path) is None


def _is_same(
    before: FolderListing,
    folder: os.stat_result,
    found: list[tuple[str, os.stat_result]],
    irregular: list[str],
    empty: list[str],
) -> bool:
    """Compared on the numbers alone: this runs for every file of a node at every look."""
    if (before.folder.dev, before.folder.ino) != (folder.st_dev, folder.st_ino):
        return False
    if list(before.irregular) != irregular or list(before.empty) != empty:
        return False
    if len(before.files) != len(found):
        return False
    for file, (path, status) in zip(before.files, found, strict=True):
        i = file.identity
        now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if file.path != path or (i.dev, i.ino, i.size_bytes, i.mtime_ns, i.ctime_ns) != now:
            return False
    return True


def _walk(fd: int, prefix: str, device: int, depth: int) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield (path, status) of everything but plain directories; None for what may not be entered.

    Of a directory in which nothing is: its path with a slash at the end.
    """
    names = sorted(list_dir(fd))
    if not names and prefix:
        yield prefix, os.fstat(fd)
    for name in names:
        path = prefix + name
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield path, status
        elif status.st_dev != device or depth == 0:
            yield path, None
        else:
            with contextlib.suppress(FileNotFoundError), files.opened_dir(name, fd) as child:
                if extents.mount_of(child) == extents.mount_of(fd):
                    yield from _walk(child, path + "/", device, depth - 1)
                else:
                    yield path, None


def _listed(path: str, status: os.stat_result) -> ListedFile:
    return ListedFile(path=path, identity=files.identity_of(status), mode=stat.S_IMODE(status.st_mode))


def read_pointer(save_dir_fd: int, name: str, *, limit_bytes: int = _POINTER_LIMIT_BYTES) -> str | None:
    """Return the content of `latest` or `latest_universal`, stripped; None: absent, empty or unreadable."""
    try:
        data = files.read_beneath(save_dir_fd, name, limit_bytes=limit_bytes)
    except (OSError, CkptdError):
        return None
    return data.decode(errors="replace").strip() or None


class OpenWriters:
    """Find the folders of a save_dir that some process writes in; one walk over all processes answers for
    all.

    A walk reads every descriptor that we may see: seconds on a node with thousands of processes. So a thread
    makes it, an answer is used for ten seconds or, where the walk was long, for longer.
    """

    def __init__(self, save_dir: str) -> None:
        self._save_dir = save_dir
        self._tags: frozenset[str] = frozenset()
        self._walked_at_seconds = -math.inf
        self._good_for_seconds = 0.0
        self._walking: threading.Thread | None = None

    def has(self, tag: str, rested_seconds: float = math.inf) -> bool:
        """Whether a file of the folder is open for writing, or may be: the walk that tells is not at its end.

        `rested_seconds`: how long nothing changed in the folder; what was seen before that says nothing of
        whoever wrote last.
        """
        if self._walking is not None and self._walking.is_alive():
            return True
        if self._age_seconds > min(rested_seconds, self._good_for_seconds):
            self._walking = threading.Thread(target=self._walk, name="open-writers", daemon=True)
            self._walking.start()
            self._walking.join(WALK_WAIT_SECONDS)
            if self._walking.is_alive() or self._age_seconds == math.inf:
                return True
        return tag in self._tags

    @property
    def _age_seconds(self) -> float:
        return time.monotonic() - self._walked_at_seconds

    def _walk(self) -> None:
        begun_seconds = time.monotonic()
        try:
            tags = written_folders(self._save_dir)
        except OSError as error:
            log.warning("who writes in %s is not known: %s", self._save_dir, error)
            self._walked_at_seconds = -math.inf
            return
        took_seconds = time.monotonic() - begun_seconds
        self._tags, self._good_for_seconds = tags, max(WALK_SECONDS, WALK_SPARES * took_seconds)
        self._walked_at_seconds = begun_seconds


def has_open_writer(save_dir: str, tag: str) -> bool:
    """Whether a process that we may see holds a file of the folder open for writing (H32)."""
    return tag in written_folders(save_dir)


def written_folders(save_dir: str) -> frozenset[str]:
    """Return the files of save_dir that a process that we may see holds open for writing, and the folders
    in which it does.

    Raises:
        OSError: it cannot be told (no free descriptor).
    """
    prefix = f"{os.path.realpath(save_dir)}/"
    found: set[str] = set()
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        with contextlib.suppress(*_NOT_TO_BE_SEEN):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(*_NOT_TO_BE_SEEN):
                    path = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if not path.startswith(prefix):
                        continue
                    tag, _, _ = path.removeprefix(prefix).partition("/")
                    if tag not in found and _is_writing(pid, fd):
                        found.add(tag)
    return frozenset(found)


def _is_writing(pid: str, fd: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{fd}") as info:
        for line in info:
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False
