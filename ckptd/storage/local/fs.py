"""Change what lies on the node: delete with a permit, holds, derived forms, pointers, trash.

Everything of ours lies below `<save_dir>/_ckptd` (or beside it: ckptd/base/owned_dirs.py). A trainer's file
is removed by `delete_checkpoint`, only under a permit whose every claim is checked again by descriptor,
before and after the folder is renamed aside (docs/design.md §5 *Permit*), and by `remove_incomplete`, which a
person asks for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from typing import TYPE_CHECKING

from ckptd.base import extents, files, names, owned_dirs
from ckptd.base.identity import FolderIdentity
from ckptd.base.owned_dirs import list_dir
from ckptd.core.model.layouts import LATEST_UNIVERSAL
from ckptd.core.model.listing import OURS
from ckptd.core.model.other_layouts import is_single_file
from ckptd.errors import CkptdError, RefusedError, SourceChanged, StorageError, from_os_error
from ckptd.storage.local.scan import scan_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptd.core.model.listing import ListedFile
    from ckptd.core.model.save import SealedFile
    from ckptd.core.policy.permit import DeletePermit


# --- folders that were renamed aside ---------------------------------------------------------------------
# A permit compares whole identities, before and after the rename. What lies in the trash later may have
# another owner or mode, and its disk another number since the boot, so that only the rest of an identity is
# compared there (docs/adr/0153).

_BY_HAND = "ckptd and trainer use nothing there: look at it, and move that folder away or remove it by hand"


def is_as_sealed(folder_fd: int, file: SealedFile, name: str = "") -> bool:
    """Whether a file has the inode, size and time of writing that were sealed; device and ctime may be
    others. `name`: its path now, where that is another than the one that was sealed.
    """
    status, sealed = files.stat_beneath(folder_fd, name or file.path), file.identity
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and (status.st_ino, status.st_size, status.st_mtime_ns)
        == (sealed.ino, sealed.size_bytes, sealed.mtime_ns)
    )


def everything_in(folder_fd: int) -> list[str]:
    """Return the names of all files below a folder, relative to it; what is mounted there is one name."""
    return [name for name, is_folder in _below(folder_fd) if not is_folder]


def folders_in(folder_fd: int) -> list[str]:
    """Return the names of all folders below a folder, on the same mount."""
    return [name for name, is_folder in _below(folder_fd) if is_folder]


def _below(folder_fd: int, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (name, whether it is a folder that may be entered)."""
    for name in list_dir(folder_fd):
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_dev != os.fstat(folder_fd).st_dev:
            yield prefix + name, False
            continue
        with files.opened_dir(name, folder_fd) as child:
            is_here = extents.mount_of(child) == extents.mount_of(folder_fd)
            yield prefix + name, is_here
            if is_here:
                yield from _below(child, f"{prefix}{name}/")


def stays_in_trash(name: str, left: Sequence[str], *, is_listed: bool) -> StorageError:
    """Return the error for a removal that could not end.

    `is_listed`: the file stands where a sealed file stood.
    """
    more = f" (with {len(left) - 1} more)" if len(left) > 1 else ""
    why = "is not the file that was committed" if is_listed else "was no part of what was committed"
    text = f"{min(left)}{more} in {OURS}/trash/{name} {why}, so the removal that was begun there stops"
    return StorageError(text, hint=_BY_HAND)


# --- changing what lies on the node ----------------------------------------------------------------------

TRASH = f"{OURS}/trash"
HOLD = f"{OURS}/hold"
DERIVED = f"{OURS}/derived"
STAGING = f"{OURS}/staging"
ASIDE = f"{OURS}/aside"


_OURS_IN_TRASH = re.compile(r"ours\.(?![0-9a-f]{8}$)[^.]+")

_STAYS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBUSY)
"""Errors with which a folder stays that need not be removed."""


def ensure_ours(save_dir_fd: int, relative: str) -> int:
    """Open a folder of ours, durably made with save_dir's own mode (never wider); caller closes it."""
    mode = stat.S_IMODE(os.fstat(save_dir_fd).st_mode) & 0o777
    owned_dirs.make_beside(save_dir_fd, mode)
    return files.open_dir_beneath(save_dir_fd, relative, create_mode=mode, is_durable=True)


def trash_name(tag: str) -> str:
    """Return a name in the trash that nothing else has."""
    return f"{tag}.{secrets.token_hex(4)}"


def is_ours_in_trash(name: str) -> bool:
    """Whether a name in the trash was ours when it came there; a folder of the tag `ours.x` was not."""
    return name.startswith(names.TEMPORARY_PREFIX) or _OURS_IN_TRASH.fullmatch(name) is not None


def check_identities(folder_fd: int, sealed: Sequence[SealedFile], *, only_listed: bool) -> None:
    """Compare an open folder with what was sealed, by descriptor.

    Raises:
        SourceChanged: a file differs or is gone; with `only_listed`, or if there is one that was not sealed.
    """
    for file in sealed:
        status = files.stat_beneath(folder_fd, file.path)
        if status is None or files.identity_of(status) != file.identity:
            msg = f"{file.path} changed since its save was committed"
            raise SourceChanged(msg, hint="it stays; the next turn looks again")
    if only_listed:
        listed = {file.path for file in sealed}
        for path in everything_in(folder_fd):
            if path not in listed:
                msg = f"{path} was not part of the committed save"
                raise SourceChanged(
                    msg, hint="the folder stays; move that file away to have the folder deleted"
                )


def delete_checkpoint(save_dir_fd: int, permit: DeletePermit, name_in_trash: str) -> None:
    """Remove a checkpoint: check, rename aside, check again (else rename back), remove its files.

    Raises:
        RefusedError: the permit is too old, or rests on nothing.
        SourceChanged: the folder is not the one that was sealed; nothing was removed.
        NotPermitted, StorageError: as the kernel says; what was removed by then shows in the trash.
    """
    if not permit.is_grounded or not permit.is_valid_at(time.monotonic()):
        msg = f"the permit to remove {permit.tag} is not valid"
        raise RefusedError(msg, hint="a new one is made from a fresh read of the COMMITs")
    is_file = is_single_file(permit.tag, [file.path for file in permit.files])
    folder_fd = open_tag(save_dir_fd, permit.tag)
    trash_fd = ensure_ours(save_dir_fd, TRASH)
    try:
        # of a single file it is the identity of save_dir
        if files.folder_identity(folder_fd) != permit.folder:
            msg = f"{permit.tag} is another folder than the committed one"
            raise SourceChanged(msg)
        check_identities(folder_fd, permit.files, only_listed=not is_file)
        files.rename_new(save_dir_fd, permit.tag, trash_fd, name_in_trash)
        try:
            _check_moved(trash_fd, name_in_trash, permit, is_file=is_file)
            if not is_file:
                check_identities(folder_fd, permit.files, only_listed=True)
        except (CkptdError, OSError):
            files.rename_new(trash_fd, name_in_trash, save_dir_fd, permit.tag)
            raise
        files.fsync_dir(save_dir_fd)
        files.fsync_dir(trash_fd)
        finish_deletion(trash_fd, name_in_trash, permit.files)
    except OSError as error:
        raise from_os_error(error, f"removing {permit.tag}") from error
    finally:
        os.close(trash_fd)
        os.close(folder_fd)


def _check_moved(trash_fd: int, name: str, permit: DeletePermit, *, is_file: bool) -> None:
    """Compare what was renamed aside with what was to be; renaming changes a file's ctime.

    Raises:
        SourceChanged: something else had its name by then.
    """
    moved = os.stat(name, dir_fd=trash_fd, follow_symlinks=False)
    if is_file:
        is_same = moved.st_dev == permit.folder.dev and is_as_sealed(trash_fd, permit.files[0], name)
    else:
        is_same = FolderIdentity(dev=moved.st_dev, ino=moved.st_ino) == permit.folder
    if not is_same:
        msg = f"{permit.tag} was swapped for another {'file' if is_file else 'folder'}"
        raise SourceChanged(msg)


def _finish_file(trash_fd: int, name: str, sealed: SealedFile) -> None:
    """Remove a checkpoint that is one file from the trash; another file of that name stays there."""
    with closing(files.open_beneath(trash_fd, name)) as fd:
        _check_still_there(trash_fd, name, fd)
        if not is_as_sealed(trash_fd, sealed, name):
            raise stays_in_trash(name, [sealed.path], is_listed=True)
        files.remove_file(trash_fd, name)
    files.fsync_dir(trash_fd)


def finish_deletion(trash_fd: int, name: str, sealed: Sequence[SealedFile]) -> None:
    """Remove the sealed files of a folder in the trash, then its empty folders; anything else stays there.

    Of one that is whole by name and holds another file than was sealed nothing goes (adr/0153).
    Durable when it returns: what a power cut gave back would look like a folder that nobody meant to remove.

    Raises:
        FileNotFoundError: it was moved back.
        StorageError: some of it stays.
    """
    try:
        folder_fd = files.open_dir_beneath(trash_fd, name)
    except NotADirectoryError:
        _finish_file(trash_fd, name, sealed[0])
        return
    try:
        _check_still_there(trash_fd, name, folder_fd)
        here = [file for file in sealed if files.stat_beneath(folder_fd, file.path) is not None]
        mine = [file for file in here if is_as_sealed(folder_fd, file)]
        if len(mine) == len(here) or len(here) < len(sealed):
            for file in mine:
                if is_as_sealed(folder_fd, file):
                    with _parent_of(folder_fd, file.path) as (parent, base):
                        files.remove_file(parent, base)
        for inner in sorted(folders_in(folder_fd), key=len, reverse=True):
            remove_empty(folder_fd, inner)
        files.fsync_dir(folder_fd)
        others = sorted({file.path for file in here} - {file.path for file in mine})
        left = others or everything_in(folder_fd)
    finally:
        os.close(folder_fd)
    remove_empty(trash_fd, name)
    files.fsync_dir(trash_fd)
    if left:
        raise stays_in_trash(name, left, is_listed=bool(others))


def _check_still_there(trash_fd: int, name: str, folder_fd: int) -> None:
    """Lock what lies in the trash, where no trainer meets that (P11): moved back, nothing of it is removed.

    Raises:
        FileNotFoundError: it was moved back.
    """
    owned_dirs.lock(folder_fd, fcntl.LOCK_EX)
    status = files.stat_beneath(trash_fd, name)
    if status is None or not os.path.samestat(status, os.fstat(folder_fd)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


@contextlib.contextmanager
def _parent_of(dir_fd: int, relative: str) -> Iterator[tuple[int, str]]:
    """Yield the folder that holds `relative`, open, and the last component of the name."""
    head, _, base = relative.rpartition("/")
    fd = files.open_dir_beneath(dir_fd, head) if head else os.dup(dir_fd)
    try:
        yield fd, base
    finally:
        os.close(fd)


def remove_empty(dir_fd: int, relative: str) -> None:
    """Remove a folder if it is empty; what is in use, gone or behind a link stays as it is.

    Raises:
        OSError: the disk refuses; it is tried again.
    """
    try:
        with _parent_of(dir_fd, relative) as (fd, name):
            os.rmdir(name, dir_fd=fd)
    except RefusedError:
        pass
    except OSError as error:
        if error.errno not in _STAYS:
            raise


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of a block."""
    try:
        yield fd
    finally:
        os.close(fd)


def put_back(save_dir_fd: int, name: str, tag: str, sealed: Sequence[SealedFile]) -> bool:
    """Move a checkpoint back of which nothing was removed; False: something was, is being, or its place is
    taken.

    A worker of before the job began again may be about to remove its first file.
    """
    place = f"{TRASH}/{name}"
    is_file = files.is_file(save_dir_fd, place)
    try:
        moved_fd = (files.open_beneath if is_file else files.open_dir_beneath)(save_dir_fd, place)
    except FileNotFoundError:
        return False
    with closing(moved_fd):
        try:
            owned_dirs.lock(moved_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        is_whole = is_file or _is_whole(moved_fd, sealed)
        return is_whole and return_from_trash(save_dir_fd, name, tag)


def return_from_trash(save_dir_fd: int, name: str, tag: str) -> bool:
    """Move a folder back that was renamed aside without a permit's end; False when its place is taken."""
    trash_fd = ensure_ours(save_dir_fd, TRASH)
    try:
        files.rename_new(trash_fd, name, save_dir_fd, tag)
    except (FileExistsError, FileNotFoundError):
        return False
    finally:
        os.close(trash_fd)
    files.fsync_dir(save_dir_fd)
    return True


def is_whole_in_trash(save_dir_fd: int, name: str, sealed: Sequence[SealedFile]) -> bool:
    """Whether nothing was removed of a checkpoint that was renamed aside: every name is there, whatever it
    holds.
    """
    if files.is_file(save_dir_fd, f"{TRASH}/{name}"):
        return True
    try:
        with closing(files.open_dir_beneath(save_dir_fd, f"{TRASH}/{name}")) as folder:
            return _is_whole(folder, sealed)
    except FileNotFoundError:
        return False


def _is_whole(folder_fd: int, sealed: Sequence[SealedFile]) -> bool:
    return all(files.stat_beneath(folder_fd, file.path) is not None for file in sealed)


def names_in(save_dir_fd: int, folder: str) -> list[str]:
    """List a folder of ours; empty when it is not there."""
    try:
        with closing(files.open_dir_beneath(save_dir_fd, folder)) as fd:
            return sorted(list_dir(fd))
    except FileNotFoundError:
        return []


def trash_names(save_dir_fd: int) -> list[str]:
    """List the trash."""
    return names_in(save_dir_fd, TRASH)


def open_tag(save_dir_fd: int, tag: str) -> int:
    """Open the folder that a checkpoint's files lie in: its own, or save_dir for one that is a single file.

    Raises:
        SourceChanged: it is gone.
    """
    if files.is_file(save_dir_fd, tag):
        return os.dup(save_dir_fd)
    try:
        return files.open_dir_beneath(save_dir_fd, tag)
    except FileNotFoundError as error:
        msg = f"{tag} vanished"
        raise SourceChanged(msg, hint="the trainer removed it") from error


def remove_ours(save_dir_fd: int, folder: str, name: str) -> None:
    """Remove a hold, a derived form or staging of ours; into the trash first, so that it goes at once."""
    if not folder.startswith(f"{OURS}/"):
        msg = f"{folder} is not a folder of ckptd"
        raise RefusedError(msg)
    try:
        parent = files.open_dir_beneath(save_dir_fd, folder)
    except FileNotFoundError:
        return
    trash_fd, aside = ensure_ours(save_dir_fd, TRASH), f"ours.{secrets.token_hex(6)}"
    try:
        os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=trash_fd)
        files.remove_tree(trash_fd, aside)
    except FileNotFoundError:
        return
    finally:
        os.close(parent)
        os.close(trash_fd)


def remove_idle(save_dir_fd: int, folder: str, name: str) -> bool:
    """Remove the work folder of a conversion that nobody is at (`remove_ours`); False: somebody is."""
    try:
        folder_fd = files.open_dir_beneath(save_dir_fd, f"{folder}/{name}")
    except FileNotFoundError:
        return True
    with closing(folder_fd):
        try:
            owned_dirs.lock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        remove_ours(save_dir_fd, folder, name)
    return True


def empty_our_trash(save_dir_fd: int) -> None:
    """Finish what a crash left of `remove_ours`, and what it left of proving our rights."""
    for folder in (TRASH, STAGING):
        for name in names_in(save_dir_fd, folder):
            if is_ours_in_trash(name):
                with closing(ensure_ours(save_dir_fd, folder)) as folder_fd:
                    try:
                        files.remove_file(folder_fd, name)
                    except IsADirectoryError:
                        files.remove_tree(folder_fd, name)


def point_latest_universal(save_dir_fd: int, target: str | None) -> None:
    """Rewrite or remove the pointer `latest_universal`, atomically."""
    if target is None:
        files.remove_file(save_dir_fd, LATEST_UNIVERSAL)
        files.fsync_dir(save_dir_fd)
    else:
        files.write_atomic(save_dir_fd, LATEST_UNIVERSAL, target.encode())


def flush(save_dir_fd: int, tag: str, paths: Sequence[str]) -> None:
    """Make a complete save durable: fdatasync every file and the folder (trainers never do, H38)."""
    with closing(open_tag(save_dir_fd, tag)) as folder:
        for path in paths:
            with files.reading(folder, path) as fd:
                os.fdatasync(fd)
        files.fsync_dir(folder)
    files.fsync_dir(save_dir_fd)


def folder_is_intact(save_dir_fd: int, tag: str, sealed: Sequence[SealedFile]) -> bool:
    """Whether the folder still holds every sealed file with its identity."""
    listing = scan_folder(save_dir_fd, tag)
    if listing is None:
        return False
    now = {f.path: f.identity for f in listing.files}
    return all(now.get(f.path) == f.identity for f in sealed)


# --- One folder that a person gave up, compared before and after the rename ---------------------------


def remove_incomplete(save_dir_fd: int, tag: str, files_seen: Sequence[ListedFile]) -> None:
    """Remove a checkpoint that a person gave up: looked at before and after it is renamed aside.

    Killed in between, the next start of the daemon moves it back; once it is ours it goes for good.

    Raises:
        SourceChanged: it is another than was looked at; it stays where it was.
    """
    name = trash_name(tag)
    trash_fd = ensure_ours(save_dir_fd, TRASH)
    try:
        with closing(open_tag(save_dir_fd, tag)) as folder:
            is_file = is_single_file(tag, [file.path for file in files_seen])
            _check_listed(folder, tag, files_seen, [tag] if is_file else None)
            files.rename_new(save_dir_fd, tag, trash_fd, name)
            try:
                if not is_file:
                    _check_listed(folder, tag, files_seen)
                elif not _is_listed(trash_fd, name, files_seen[0]):
                    raise _changed(tag, tag)
            except (CkptdError, OSError):
                files.rename_new(trash_fd, name, save_dir_fd, tag)
                raise
        files.fsync_dir(save_dir_fd)
        aside = f"ours.{secrets.token_hex(6)}"
        files.rename_new(trash_fd, name, trash_fd, aside)
        (files.remove_file if is_file else files.remove_tree)(trash_fd, aside)
    except OSError as error:
        raise from_os_error(error, f"removing {tag}") from error
    finally:
        os.close(trash_fd)


def _check_listed(
    folder_fd: int, tag: str, seen: Sequence[ListedFile], paths: Sequence[str] | None = None
) -> None:
    """Compare what is in a folder, or only some `paths` there, with what was looked at."""
    known = {file.path: file.identity for file in seen}
    for path in everything_in(folder_fd) if paths is None else paths:
        status = files.stat_beneath(folder_fd, path)
        if status is None or known.get(path) != files.identity_of(status):
            raise _changed(path, tag)


def _is_listed(dir_fd: int, name: str, seen: ListedFile) -> bool:
    """Tell whether a file that was renamed is the one that was looked at: its ctime is another."""
    status, was = os.stat(name, dir_fd=dir_fd, follow_symlinks=False), seen.identity
    return (status.st_ino, status.st_size, status.st_mtime_ns) == (was.ino, was.size_bytes, was.mtime_ns)


def _changed(path: str, tag: str) -> SourceChanged:
    where = path if path == tag else f"{tag}/{path}"
    msg = f"{where} changed while {tag} was looked at"
    return SourceChanged(msg, hint="somebody writes there; it stays")
