"""One look at a save_dir: names and identities by descriptor, nothing opened for reading but pointers (P15).

The scanner never enters `_ckptd`, follows no symlink and crosses no mount; what is neither a folder nor a
regular file is reported, not touched (H8).
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core.identity import FolderIdentity
from ckptd.core.listing import OURS, POINTERS, FolderListing, ListedFile, SaveDirListing
from ckptd.core.names import name_problem, shown
from ckptd.core.resumed import RESUMED_PATH
from ckptd.core.trainers import WRITES_AS, Trainer, layout_of
from ckptd.core.unprotected import is_loose, is_trainers_checkpoint, of_listing
from ckptd.errors import CkptdError
from ckptd.local.links import leads_elsewhere, linked_shard, may_be_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_DEPTH = 8
EXTRA_LIMIT_BYTES = 16 << 20
LOST_AND_FOUND = "lost+found"
"""Root's, in every ext4 that is mounted at save_dir."""
_POINTER_LIMIT_BYTES = 4096
_WORD_LIMIT_BYTES = 4 << 20
"""It names every folder of save_dir."""


def scan(save_dir_fd: int, trainer: str = "auto", before: SaveDirListing | None = None) -> SaveDirListing:
    """List a save_dir, without entries that vanish meanwhile: the next scan sees the truth.

    With a `trainer` other than auto, folders that another one wrote are foreign. Folders that are as they
    were in `before` are given back as the same objects, so that comparing them is cheap.
    """
    known = {folder.tag: folder for folder in before.folders} if before else {}
    wanted = WRITES_AS.get(trainer, trainer)
    folders: list[FolderListing] = []
    extras: list[ListedFile] = []
    bare: dict[str, list[str]] = {}
    foreign, nameless, closed = list[str](), list[str](), list[str]()
    linked, names = list[str](), list[str]()
    latest = read_pointer(save_dir_fd, "latest")
    for entry in sorted(os.scandir(save_dir_fd), key=lambda e: e.name):
        if entry.name.startswith((OURS, files.TEMPORARY_PREFIX)):
            continue
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(entry.name, dir_fd=save_dir_fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                if entry.name not in known and _is_closed(save_dir_fd, entry.name, status):
                    foreign.append(entry.name)
                    closed += [shown(entry.name)] if entry.name != LOST_AND_FOUND else []
                    continue
                listing = scan_folder(save_dir_fd, entry.name, known.get(entry.name))
                linked += linked_shard(listing)
                is_one = listing is not None and listing.is_checkpoint and wanted in ("auto", listing.trainer)
                if listing is None or not is_one or shown(entry.name) != entry.name:
                    foreign.append(entry.name)
                    if is_one:
                        nameless.append(shown(entry.name))
                    elif listing is not None and not listing.shards and _is_fit(entry.name):
                        bare[entry.name] = [file.path for file in listing.files]
                else:
                    folders.append(listing)
            elif stat.S_ISREG(status.st_mode) and _is_fit(entry.name):
                names.append(entry.name)
                if entry.name not in POINTERS and status.st_size <= EXTRA_LIMIT_BYTES:
                    extras.append(_listed(entry.name, status))
            else:
                foreign.append(entry.name)
                if stat.S_ISLNK(status.st_mode) and may_be_checkpoint(entry.name, latest):
                    linked += [entry.name] if leads_elsewhere(save_dir_fd, entry.name) else []
    folders, loose = _without_loose(folders, names)
    return SaveDirListing(
        device=os.fstat(save_dir_fd).st_dev,
        folders=tuple(folders),
        extras=tuple(extras),
        latest=latest,
        latest_universal=read_pointer(save_dir_fd, "latest_universal"),
        resumed=read_pointer(save_dir_fd, RESUMED_PATH, limit_bytes=_WORD_LIMIT_BYTES),
        foreign=tuple(foreign + loose),
        nameless=tuple(nameless),
        bare=tuple(bare),
        closed=tuple(closed),
        linked=tuple(linked),
        unprotected=of_listing(bare, names, loose, latest),
    )


def _without_loose(
    folders: list[FolderListing], names: Iterable[str]
) -> tuple[list[FolderListing], list[str]]:
    """Split off the shards in global_stepN that lie beside a Trainer's checkpoints, or in one of them.

    `trainer.save_model` writes them where stage 3 gathers no weights. The Trainer loads checkpoint-N alone.
    """
    has_trainers = any(folder.trainer is Trainer.HUGGINGFACE for folder in folders)
    if not has_trainers and not is_trainers_checkpoint(names):
        return folders, []
    loose = [f.tag for f in folders if f.trainer is Trainer.DEEPSPEED and is_loose(f.tag)]
    return [folder for folder in folders if folder.tag not in loose], loose


def _is_closed(save_dir_fd: int, name: str, status: os.stat_result) -> bool:
    """Another user's folder that we may not enter; it stops nothing. Our own is waited for."""
    if status.st_uid == os.geteuid():
        return False
    return not os.access(name, os.R_OK | os.X_OK, dir_fd=save_dir_fd, effective_ids=True)


def scan_folder(save_dir_fd: int, tag: str, before: FolderListing | None = None) -> FolderListing | None:
    """List one folder with everything below it; None: it vanished; `before` itself: nothing changed."""
    try:
        fd = files.open_dir_beneath(save_dir_fd, tag)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(fd)
        found: list[tuple[str, os.stat_result]] = []
        irregular: list[str] = []
        for path, item in _walk(fd, "", status.st_dev, MAX_DEPTH):
            if item is not None and stat.S_ISREG(item.st_mode) and _is_fit(path):
                found.append((path, item))
            else:
                irregular.append(shown(path))
        if before is not None and _is_same(before, status, found, irregular):
            return before
        regular = [_listed(path, item) for path, item in found]
        trainer, roots = layout_of(tag, (file.path for file in regular))
        return FolderListing(
            tag=tag,
            trainer=trainer,
            roots=roots,
            folder=FolderIdentity(dev=status.st_dev, ino=status.st_ino),
            files=tuple(regular),
            irregular=tuple(irregular),
        )
    finally:
        os.close(fd)


def _is_fit(path: str) -> bool:
    """Whether a file may be shipped under its name; this runs for every file of a node at every look."""
    is_plain = path.isascii() and path.isprintable() and files.TEMPORARY_PREFIX not in path
    return is_plain or name_problem(path) is None


def _is_same(
    before: FolderListing,
    folder: os.stat_result,
    found: list[tuple[str, os.stat_result]],
    irregular: list[str],
) -> bool:
    """Compared on the numbers alone: this runs for every file of a node at every look."""
    if (before.folder.dev, before.folder.ino) != (folder.st_dev, folder.st_ino):
        return False
    if len(before.files) != len(found) or list(before.irregular) != irregular:
        return False
    for file, (path, status) in zip(before.files, found, strict=True):
        i = file.identity
        now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if file.path != path or (i.dev, i.ino, i.size_bytes, i.mtime_ns, i.ctime_ns) != now:
            return False
    return True


def _walk(fd: int, prefix: str, device: int, depth: int) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield (path, status) of everything but plain directories; None for what may not be entered."""
    for name in sorted(os.listdir(fd)):
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
                if files.mount_of(child) == files.mount_of(fd):
                    yield from _walk(child, path + "/", device, depth - 1)
                else:
                    yield path, None


def _listed(path: str, status: os.stat_result) -> ListedFile:
    return ListedFile(path=path, identity=files.identity_of(status), mode=stat.S_IMODE(status.st_mode))


def read_pointer(save_dir_fd: int, name: str, *, limit_bytes: int = _POINTER_LIMIT_BYTES) -> str | None:
    """Content of `latest` or `latest_universal`, stripped; None when absent, empty or unreadable."""
    try:
        data = files.read_beneath(save_dir_fd, name, limit_bytes=limit_bytes)
    except (OSError, CkptdError):
        return None
    return data.decode(errors="replace").strip() or None


def has_open_writer(save_dir: str, tag: str) -> bool:
    """True when a process that we may see holds a file of the folder open for writing (H32)."""
    prefix = f"{os.path.realpath(save_dir)}/{tag}/"
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(prefix) and _is_writing(pid, fd):
                        return True
    return False


def _is_writing(pid: str, fd: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{fd}") as info:
        for line in info:
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False
