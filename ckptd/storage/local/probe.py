"""Prove what the node allows by doing it: read, create, rename, unlink, clone, free space.

`ckptd check` prints it before a job is trusted with deleting anything. Everything made here is removed again;
`_ckptd/` too, if it was not there before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptd.base import extents, files
from ckptd.base import names as base_names
from ckptd.base.humanize import size_of, user_in_words
from ckptd.base.owned_dirs import list_dir
from ckptd.core.model.listing import OURS
from ckptd.core.model.other_layouts import NOTHING_DECLARED, below
from ckptd.core.model.unprotected import warn_unprotected
from ckptd.core.policy.view import next_save_bytes
from ckptd.errors import CkptdError, ConfigError, NotPermitted, RefusedError, from_os_error
from ckptd.storage.local.fs import STAGING, TRASH, closing, ensure_ours, remove_empty
from ckptd.storage.local.scan import scan
from ckptd.storage.local.state_dir import filesystem_type, is_network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.config.quantities import Share
    from ckptd.core.model.listing import SaveDirListing
    from ckptd.core.model.other_layouts import DeclaredSave


# --- rights, proved by using them below `_ckptd` ---------------------------------------------------------

_NOBODYS_SECONDS = 3600.0
"""Older temporary names than this are of no proof that is under way, on whatever host."""


def new_mark() -> str:
    """Return a name for the proofs of one process in one save_dir.

    Of what a disk refuses to let go there is one, and the next proof of that mark takes it along.
    """
    return secrets.token_hex(6)


def can_clone(save_dir_fd: int, mark: str) -> bool:
    """Try to share extents between two small files of ours on the file system of save_dir."""
    names = [f"{base_names.TEMPORARY_PREFIX}{mark}-{end}" for end in ("a", "b")]
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with closing(ensure_ours(save_dir_fd, STAGING)) as fd, ExitStack() as undo:
        opened: list[int] = []
        for name in names:
            files.remove_file(fd, name)  # a disk may have refused to let it go
            opened.append(os.open(name, flags, 0o600, dir_fd=fd))
            undo.callback(files.remove_file, fd, name)
            undo.callback(os.close, opened[-1])
        extents.write_all(opened[0], b"\0" * 65536)
        os.fsync(opened[0])
        return extents.clone_file(opened[0], opened[1])


def prove_rights(save_dir_fd: int, save_dir: str, mark: str) -> None:
    """Create, rename and remove in `_ckptd`, and ask the kernel whether we may do so in save_dir (P19, P11).

    One that fails takes back what it made, or the next one does; what a killed one left goes once it is old,
    since hosts that share the directory prove theirs at the same time.

    Raises:
        NotPermitted: with who owns the directory and who we are.
    """
    name, aside = f"{base_names.TEMPORARY_PREFIX}{mark}", f"ours.{mark}"
    try:
        with (
            closing(ensure_ours(save_dir_fd, STAGING)) as staging,
            closing(ensure_ours(save_dir_fd, TRASH)) as trash,
        ):
            _sweep(staging, mark)
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=staging)
            try:
                os.rename(name, aside, src_dir_fd=staging, dst_dir_fd=trash)
            except OSError:
                with suppress(OSError):
                    os.rmdir(name, dir_fd=staging)
                raise
            os.rmdir(aside, dir_fd=trash)
    except PermissionError as error:
        raise _who(save_dir_fd, save_dir) from error
    ask_kernel(save_dir_fd, save_dir)


def _sweep(staging_fd: int, mark: str) -> None:
    for left in [n for n in list_dir(staging_fd) if n.startswith(base_names.TEMPORARY_PREFIX)]:
        with suppress(FileNotFoundError):
            if mark in left or _is_old(staging_fd, left):
                _remove(staging_fd, left)


def ask_kernel(save_dir_fd: int, save_dir: str) -> None:
    """Whether we may rename and remove in save_dir itself, where nothing is tried out (P11).

    Raises:
        NotPermitted: with who owns the directory and who we are.
    """
    status = os.fstat(save_dir_fd)
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and os.geteuid() not in (0, status.st_uid)
    if is_sticky or not os.access(".", os.W_OK | os.X_OK, dir_fd=save_dir_fd, effective_ids=True):
        raise _who(save_dir_fd, save_dir)


def _is_old(dir_fd: int, name: str) -> bool:
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    return time.time() - status.st_mtime > _NOBODYS_SECONDS


def _remove(dir_fd: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except NotADirectoryError:
        files.remove_file(dir_fd, name)


def _who(save_dir_fd: int, save_dir: str) -> NotPermitted:
    status = os.fstat(save_dir_fd)
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if owner == os.geteuid():
        msg = f"{save_dir} is owned by {user_in_words(owner)}, as whom ckptd runs, mode {mode:o}: "
        msg += "it may not write there"
        may = (mode & stat.S_IWUSR) and (mode & stat.S_IXUSR)
        cure = "look at its _ckptd, and how it is mounted" if may else f"chmod u+wx {shlex.quote(save_dir)}"
        return NotPermitted(msg, hint=f"{cure}; until then nothing is deleted")
    msg = f"{save_dir} is owned by {user_in_words(owner)}, ckptd runs as {user_in_words(os.geteuid())}"
    return NotPermitted(msg, hint=f"run ckptd as {user_in_words(owner)}; until then nothing is deleted")


# --- the checks of a save_dir ----------------------------------------------------------------------------

Verdict = Literal["ok", "note", "fail"]
_SEE = "see `ckptd check`"
"""The end of hints elsewhere; whoever reads a finding did that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was proved or not; `exit_code` of a failure as in docs/contract.md."""

    what: str
    verdict: Verdict
    text: str
    hint: str = ""
    exit_code: int = 0
    rows: tuple[tuple[str, str], ...] = ()
    """Rows of a table of its own."""


def failed(what: str, error: CkptdError) -> Finding:
    """Return a finding from an error of the tree."""
    hint = error.hint.removesuffix(_SEE).rstrip(" ,;")
    return Finding(what=what, verdict="fail", text=error.message, hint=hint, exit_code=error.exit_code)


def probe_save_dir(
    save_dir: Path,
    min_free: Share,
    *,
    writes: bool,
    trainer: str = "auto",
    declared: DeclaredSave = NOTHING_DECLARED,
) -> Iterator[Finding]:
    """Yield the findings about a save_dir; with `writes` by really creating, renaming and removing below
    `_ckptd/`.
    """
    try:
        fd = os.open(save_dir, files.DIR_FLAGS)
    except FileNotFoundError:
        yield _not_yet(save_dir)
        return
    except PermissionError as error:
        yield _closed(save_dir, error)
        return
    except OSError as error:
        yield failed("save_dir", from_os_error(error, f"opening {save_dir}"))
        return
    try:
        kind = filesystem_type(save_dir)
        yield Finding(
            what="save_dir", verdict="ok", text=f"{save_dir} is there ({kind or 'unknown'} file system)"
        )
        yield _owner(fd, save_dir)
        try:
            listing = scan(fd, trainer, declared=declared)
        except OSError as error:
            yield failed("read", from_os_error(error, f"listing {save_dir}"))
            return
        yield _readable(fd, listing, save_dir)
        yield from _unprotected(listing, save_dir)
        yield from _writable(fd, save_dir, listing, writes=writes)
        yield _room(fd, listing, min_free)
        if is_network(kind):
            yield Finding(
                what="events",
                verdict="note",
                text=f"{kind} does not tell of other machines' files; ckptd looks by itself",
            )
    finally:
        os.close(fd)


def _not_yet(save_dir: Path) -> Finding:
    if save_dir.parent.is_dir():
        text = f"{save_dir} is not there yet; the job waits for it (nothing else can be proved until then)"
        return Finding(what="save_dir", verdict="note", text=text)
    return failed(
        "save_dir",
        ConfigError(
            f"{save_dir}: its parent {os.path.realpath(save_dir.parent)} does not exist",
            hint="is the disk mounted?",
        ),
    )


def _closed(save_dir: Path, error: PermissionError) -> Finding:
    """Say which folder may not be entered: save_dir or one above it."""
    above = reversed(save_dir.parents)
    at = next((path for path in above if not os.access(path, os.X_OK, effective_ids=True)), save_dir)
    try:
        status = os.stat(at)
    except OSError:
        return failed("save_dir", from_os_error(error, f"opening {save_dir}"))
    owner, mode = user_in_words(status.st_uid), stat.S_IMODE(status.st_mode)
    text = f"{at} is owned by {owner}, mode {mode:o}; ckptd runs as {user_in_words(os.geteuid())}"
    return failed("save_dir", NotPermitted(text, hint=f"run ckptd as {owner}"))


def _owner(fd: int, save_dir: Path) -> Finding:
    owner, us = os.fstat(fd).st_uid, os.geteuid()
    if owner == us:
        return Finding(
            what="owner", verdict="ok", text=f"owned by {user_in_words(owner)}, as whom ckptd runs"
        )
    hint = f"run ckptd as {user_in_words(owner)}"
    if us == 0:
        hint += "; root is not needed"
    text = f"owned by {user_in_words(owner)}, ckptd runs as {user_in_words(us)}"
    may_write = os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True)
    if may_write:
        return Finding(what="owner", verdict="note", text=text, hint=hint)
    return failed("owner", NotPermitted(f"{save_dir} is {text}", hint=hint))


def _unprotected(listing: SaveDirListing, save_dir: Path) -> Iterator[Finding]:
    """Name the checkpoints that the job would leave alone; newer ones than it protects are a failure."""
    tags = [folder.tag for folder in listing.folders if not folder.is_model_only]
    for one in warn_unprotected(listing.unprotected, str(save_dir), listing.latest, tags):
        if one.is_urgent:
            yield failed("layout", RefusedError(one.text, hint=one.next_step))
        else:
            yield Finding(what="layout", verdict="note", text=one.text, hint=one.next_step)


def _readable(fd: int, listing: SaveDirListing, save_dir: Path) -> Finding:
    """Open one file of every checkpoint that is there."""
    opened = 0
    for folder in listing.folders:
        for file in folder.shards:
            try:
                with files.reading(fd, below(folder.tag, file.path)):
                    opened += 1
            except OSError as error:
                return failed(
                    "read", from_os_error(error, f"reading {save_dir}/{below(folder.tag, file.path)}")
                )
            except CkptdError as error:
                return failed("read", error)
    if not opened:
        text = (
            "lists; it holds no ZeRO checkpoint"
            if listing.unprotected
            else "lists; it holds no checkpoint yet"
        )
        return Finding(what="read", verdict="ok", text=text)
    checkpoints = f"{len(listing.folders)} checkpoint{'s' if len(listing.folders) > 1 else ''}"
    return Finding(what="read", verdict="ok", text=f"opened {opened} shards of {checkpoints}")


def _writable(fd: int, save_dir: Path, listing: SaveDirListing, *, writes: bool) -> Iterator[Finding]:
    if not writes:
        yield Finding(what="write", verdict="note", text="not tried (--no-probe)")
        return
    with _traceless(fd):
        try:
            mark = new_mark()
            prove_rights(fd, str(save_dir), mark)
            clones = can_clone(fd, mark)
        except OSError as error:
            problem = from_os_error(error, f"writing in {save_dir}/{OURS}")
            if "read-only" in (error.strerror or "").lower():
                problem.hint = f"under systemd add ReadWritePaths={save_dir} to the unit"
            yield failed("write", problem)
            return
        except CkptdError as error:
            yield failed("write", error)
            return
    yield Finding(what="write", verdict="ok", text=f"created, renamed and removed below {OURS}/")
    yield _deletable(fd, listing, save_dir)
    if clones:
        text = "extents clone: universal forms and holds cost almost nothing"
    else:
        text = "no extent cloning (XFS and btrfs do): universal forms are copied; "
        text += "the trainer's own rotation may outrun the upload"
    yield Finding(what="clone", verdict="ok" if clones else "note", text=text)


def _deletable(fd: int, listing: SaveDirListing, save_dir: Path) -> Finding:
    """Whether the trainer's folders may be renamed away and emptied (by permission bits, not by doing)."""
    sticky = bool(os.fstat(fd).st_mode & stat.S_ISVTX)
    us = os.geteuid()
    for folder in listing.folders:
        status = os.stat(folder.tag, dir_fd=fd, follow_symlinks=False)
        # a single file is removed by who may write in save_dir
        where = folder.place or "."
        allowed = os.access(where, os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True)
        foreign = sticky and us not in (0, status.st_uid, os.fstat(fd).st_uid)
        if not allowed or foreign:
            owner = user_in_words(status.st_uid)
            text = f"{save_dir}/{folder.tag} is owned by {owner}, ckptd runs as {user_in_words(us)}"
            return failed(
                "delete", NotPermitted(text, hint=f"run ckptd as {owner}; until then nothing is deleted")
            )
    return Finding(what="delete", verdict="ok", text="may rename and remove the trainer's folders")


def _room(fd: int, listing: SaveDirListing, min_free: Share) -> Finding:
    status = os.fstatvfs(fd)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    reserve = min_free.of(total) + next_save_bytes(folder.total_bytes for folder in listing.folders)
    text = f"{size_of(free)} free; reserve {size_of(reserve)} (min_free {min_free} + the next save)"
    if free < reserve:
        hint = "ckptd will not write here until there is room; free space, or lower min_free"
        return Finding(what="room", verdict="note", text=text, hint=hint)
    return Finding(what="room", verdict="ok", text=text)


@contextlib.contextmanager
def _traceless(fd: int) -> Iterator[None]:
    """Remove `_ckptd/` at the end if it was not there before and is empty (P11)."""
    was_there = {name: files.stat_beneath(fd, name) is not None for name in (STAGING, TRASH, OURS)}
    try:
        yield
    finally:
        for name, existed in was_there.items():
            if not existed:
                remove_empty(fd, name)
