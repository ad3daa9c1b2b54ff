"""Prove that a remote is the one that is meant, its identity, place and rights, before anything is written.

An unmounted share is an empty directory on the root disk: a checkpoint "uploaded" there would be on the same
machine. So a directory becomes a remote only on a file system of its own, and only once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.names import IDENTITY_KEY, ROOT
from ckptd.core.model.manifest import RemoteIdentity, to_bytes
from ckptd.errors import (
    CkptdError,
    NoSpaceError,
    RemoteNotInitialised,
    RemoteNotOurs,
    RemoteUnreachable,
    from_os_error,
)
from ckptd.storage.remote.documents import now_utc, read_identity
from ckptd.storage.remote.heartbeats import live_nodes
from ckptd.storage.remote.messages import Attached
from ckptd.storage.remote.runs import newest_run
from ckptd.storage.stores.directory import explained
from ckptd.storage.stores.fsspec_store import FilesStore
from ckptd.storage.stores.open import directory_path

if TYPE_CHECKING:
    from ckptd.core.model.heartbeat import SeenNode
    from ckptd.storage.remote.messages import RemoteSettings
    from ckptd.storage.stores.base import Abilities, Store

_MOVED = (
    "is it mounted? a new, empty place that is meant: give this remote another name in the job file; "
    "see `ckptd check`"
)
"""Another name, because what was known by this one would still be missed there."""
_NEW_PLACE = (
    "write that url again; a new, empty place that is meant needs another name: `name` in the job file, "
    "CKPTD_REMOTE_NAME without one"
)
_OBJECT_STORES = ("s3://", "gs://", "gcs://", "az://", "abfs://", "abfss://")
_SFTP = ("sftp://", "ssh://")


def attach(store: Store, settings: RemoteSettings) -> Attached:
    """Prove that the remote is there, ours and writable; create `remote.json` where that is right.

    Raises:
        RemoteUnreachable: the directory or its mount is not there.
        RemoteNotOurs: no identity though one is known, another job's, or a place that may not become one.
        RemoteNotInitialised: it has none, could get one, and `settings` forbid that.
        NotPermitted, StorageError: it cannot be written. NoSpaceError: it is full, and was never probed.
    """
    path = directory_path(settings.url)
    if path is not None:
        _check_apart(path, settings)
        _prepare_root(path, store, settings)
    found = read_identity(store)
    initialised = False
    if found is None:
        _may_initialise(store, settings, path)
        ours = RemoteIdentity(
            remote_id=secrets.token_hex(16),
            job_id=settings.job_id or settings.proposed_job_id or secrets.token_hex(16),
            job=settings.job,
            created=now_utc(),
        )
        initialised = store.put_if_absent(IDENTITY_KEY, to_bytes(ours))
        found = read_identity(store)
    if found is None:
        msg = f"{store.url} lost {IDENTITY_KEY} right after it was created"
        raise RemoteNotOurs(msg)
    _check_owner(found, store, settings)
    if settings.only_looks:
        raise RemoteNotOurs(f"{store.url} became a remote just now", hint="call it again")
    return Attached(
        identity=found,
        abilities=_abilities(store, settings, found),
        initialised=initialised,
        free_bytes=store.free_bytes(),
        place=_place_in(store, settings.url) if path is None else _place_of(path),
        living=_living(store, settings, is_first=settings.job_id is None and not initialised),
        newest=newest_run(store) if settings.asks_who_lives else None,
    )


def _abilities(store: Store, settings: RemoteSettings, found: RemoteIdentity) -> Abilities:
    """Probe what the store can do; on a full remote return the abilities known from before.

    A full remote refuses the probe's small objects, and retiring saves there is what frees the space.
    """
    try:
        return store.probe()
    except NoSpaceError:
        if settings.abilities is None or settings.remote_id != found.remote_id:
            raise
        return settings.abilities


def _living(store: Store, settings: RemoteSettings, *, is_first: bool) -> tuple[SeenNode, ...]:
    """Words alone: what keeps them from being read keeps nobody from attaching."""
    if not (is_first or settings.asks_who_lives):
        return ()
    with contextlib.suppress(CkptdError):
        if settings.asks_who_lives:
            return live_nodes(store)
        return live_nodes(store, but_node=settings.node, but_node_id=settings.node_id)
    return ()


def _place_of(root: Path) -> str:
    """Alike for all paths to one directory, bind mounts too; a copy got its identity at another time.

    The roots of mounts have one inode number everywhere, and devices are numbered anew by each boot.
    """
    try:
        status, mark = root.stat(), (root / IDENTITY_KEY).stat()
    except OSError as error:
        raise from_os_error(error, f"looking at {root}") from error
    return f"{status.st_dev}:{status.st_ino}.{mark.st_ctime_ns}"


def _place_in(store: Store, url: str) -> str | None:
    """Alike for all URLs of one bucket and prefix, or of one directory of an SFTP server: when its identity
    was written, by the service's clock.

    Who copies a bucket creates that object anew; a replica that the service keeps has its time, and what is
    removed from the one goes from the other. Who copies a directory may keep the times: of SFTP the server's
    file system counts too, so that a copy on another disk is another place. None: this kind of store tells
    times that a copy may have, too.
    """
    if not url.startswith((*_OBJECT_STORES, *_SFTP)):
        return None
    info = store.stat(IDENTITY_KEY)
    if info is None or not info.mtime_ns:
        return None
    if isinstance(store, FilesStore) and url.startswith(_SFTP):
        return f"sftp:{store.disk()}:{info.mtime_ns}"
    return f"object:{info.mtime_ns}"


def _check_owner(found: RemoteIdentity, store: Store, settings: RemoteSettings) -> None:
    owner = f"job {found.job} ({found.job_id})"
    if settings.job_id is not None and found.job_id != settings.job_id:
        msg = f"{store.url} belongs to {owner}, this is job {settings.job} ({settings.job_id})"
        raise RemoteNotOurs(msg, hint="give this job a url of its own, or `ckptd takeover JOB`")
    if settings.job_id is None and found.job != settings.job:
        msg = f"{store.url} belongs to {owner}, this is job {settings.job}"
        raise RemoteNotOurs(msg, hint="give this job a url of its own, or `ckptd takeover JOB`")
    if settings.remote_id is not None and found.remote_id != settings.remote_id:
        msg = f"{store.url} is remote {found.remote_id} of {owner}, known was {settings.remote_id}"
        hint = "another share is mounted there? else it was made again: stop the daemon, `ckptd takeover JOB`"
        raise RemoteNotOurs(msg, hint=hint)


def _may_initialise(store: Store, settings: RemoteSettings, path: Path | None) -> None:
    """Raise unless a root without identity may become this job's remote."""
    if next(iter(store.list(f"{ROOT}/commits/")), None) is not None:
        # it is mounted, and a new identity would make strangers of all that is committed there
        msg = f"{store.url} holds commits but no {IDENTITY_KEY}"
        raise RemoteNotOurs(msg, hint="write that file again (docs/recovery.md); nothing was written")
    if settings.remote_id is not None:
        if _is_elsewhere(settings):
            raise RemoteNotOurs(f"{store.url} has no {IDENTITY_KEY}: {_known_at(settings)}", hint=_NEW_PLACE)
        msg = f"{store.url} has no {IDENTITY_KEY}, though it had one before"
        raise RemoteNotOurs(msg, hint=_MOVED)
    if path is not None:
        _check_outer(path)
    if path is not None and not settings.same_filesystem:
        _check_place(path, settings)
    if not settings.may_initialise:
        msg = f"{store.url} has no {IDENTITY_KEY}"
        hint = "is it mounted? `ckptd check --init-remote` makes it this job's remote"
        raise _kind_of_new(store, settings, path)(msg, hint=hint)


def _kind_of_new(store: Store, settings: RemoteSettings, path: Path | None) -> type[RemoteNotOurs]:
    """Return the error for a place that could become the remote and may not be made it now.

    Raises:
        NotPermitted, NoSpaceError, StorageError: nothing could be written there.
    """
    if settings.only_looks:
        return RemoteNotInitialised if _is_surely_new(store, settings, path) else RemoteNotOurs
    if path is not None:
        place = path if path.is_dir() else path.parent
        if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
            denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise explained(denied, f"{place}: making a folder there", str(path))
    elif settings.url.startswith(_OBJECT_STORES):
        store.probe()
    return RemoteNotInitialised


def _is_surely_new(store: Store, settings: RemoteSettings, path: Path | None) -> bool:
    """Tell whether the place itself was reached, and holds nothing.

    An empty folder on the root file system may be one on which a share is not mounted, whatever the job file
    says of same_filesystem; so may any folder of a file server, whose disks nobody sees from here.
    """
    if path is None and not settings.url.startswith(_OBJECT_STORES):
        return False
    if path is not None:
        if _device_of(path) == _device_of(Path("/")):
            return False
        try:
            path.lstat()
        except FileNotFoundError:
            return True  # its parent is there, on that other file system
    return next(iter(store.list("")), None) is None


def _check_apart(path: Path, settings: RemoteSettings) -> None:
    """Refuse a root that lies in a local directory of ckptd, or around one, once symlinks are resolved (H6).

    The configuration compared the spellings; only this process may touch the path of a remote.
    """
    root = Path(os.path.realpath(path))
    for local in (settings.save_dir, *settings.apart_from):
        other = Path(os.path.realpath(local))
        if root == other or other in root.parents or root in other.parents:
            msg = f"{path} is {root}, and {local} lies there too: one lies inside the other"
            raise RemoteNotOurs(msg, hint="no URL, save_dir or state directory may lie inside another")


def _check_outer(path: Path) -> None:
    """Refuse to begin a remote inside another one: that one's daemon keeps what lies there (H6)."""
    root = Path(os.path.realpath(path))
    for outer in root.parents:
        if os.path.lexists(outer / IDENTITY_KEY):
            msg = f"{path} lies inside the remote {outer}"
            raise RemoteNotOurs(msg, hint="no URL, save_dir or state directory may lie inside another")


def _prepare_root(path: Path, store: Store, settings: RemoteSettings) -> None:
    """Create the root where only its last component is missing and that is right."""
    try:
        parent = path.parent
        if path.is_dir():
            _flush_names(parent)  # whoever made it may have been killed before that
            return
        if _is_elsewhere(settings):
            raise RemoteUnreachable(f"{path} is not there: {_known_at(settings)}", hint=_NEW_PLACE)
        if not parent.is_dir():
            msg = f"{path} is not there: its parent {parent} does not exist"
            make = shlex.join(["mkdir", "-p", str(parent)])
            raise RemoteUnreachable(msg, hint=f"is the disk or share mounted? else `{make}`")
        if settings.remote_id is not None:
            raise RemoteUnreachable(f"{path} is not there, though it was before", hint=_MOVED)
        _check_outer(path)
        if not settings.same_filesystem:
            _check_place(parent, settings)
        if not settings.may_initialise:
            kind = _kind_of_new(store, settings, path)
            raise kind(f"{path} is not there", hint="is it mounted? `ckptd check --init-remote` creates it")
        path.mkdir(mode=0o755 & parent.stat().st_mode, exist_ok=True)
        _flush_names(parent)
    except OSError as error:
        raise explained(error, f"creating {path}", str(path)) from error


def _is_elsewhere(settings: RemoteSettings) -> bool:
    """Whether the remote of this name was known at another URL: the job was changed, not the place."""
    is_known = settings.remote_id is not None and settings.known_url is not None
    return is_known and settings.known_url != settings.url


def _known_at(settings: RemoteSettings) -> str:
    return f"this job knows its remote {settings.name} at {settings.known_url}, its url was changed"


def _flush_names(folder: Path) -> None:
    """Fsync a folder where that is possible; some network file systems and unreadable folders refuse it."""
    with contextlib.suppress(OSError), files.opened_dir(folder) as fd:
        files.fsync_dir(fd)


def _check_place(path: Path, settings: RemoteSettings) -> None:
    """Refuse a directory on the file system of save_dir or of `/` (H5)."""
    device = path.stat().st_dev
    beside = {"save_dir": _device_of(Path(settings.save_dir)), "the root file system": _device_of(Path("/"))}
    for name, other in beside.items():
        if device == other:
            msg = f"{path} lies on the same file system as {name}"
            raise RemoteNotOurs(
                msg,
                hint="is it mounted? a copy there dies with this disk; if that is meant: --same-filesystem, "
                "or same_filesystem = true in the job file",
            )


def _device_of(path: Path) -> int | None:
    """Return the device of the path or of its nearest ancestor that exists."""
    for candidate in (path, *path.parents):
        try:
            return candidate.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None


# --- taking a remote over for another job ----------------------------------------------------------------
# The job id stays, so that COMMITs stay valid; the remote id is new. Daemons that knew the remote by its old
# id find another one there and stop writing.


def identity_of(store: Store) -> RemoteIdentity:
    """Read which job and run a remote belongs to.

    Raises:
        RemoteNotOurs: it has no identity.
    """
    found = read_identity(store)
    if found is None:
        msg = f"{store.url} has no {IDENTITY_KEY}"
        hint = "is it mounted? nothing is there to be taken over: a remote of another name in the job file "
        raise RemoteNotOurs(msg, hint=hint + "begins anew there, with `ckptd check --init-remote`")
    return found


def take_over(store: Store, found: RemoteIdentity, job: str) -> RemoteIdentity:
    """Write `job` into remote.json, with a new remote id; returns what stands there then.

    Raises:
        RemoteNotOurs: somebody else wrote it at the same moment.
    """
    wanted = found.model_copy(update={"job": job, "remote_id": secrets.token_hex(16)})
    at = now_utc()
    before = {"job": found.job, "remote_id": found.remote_id, "at": at}
    document = {**wanted.model_dump(mode="json"), "taken_from": before}
    store.put(IDENTITY_KEY, json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    now = identity_of(store)
    if now != wanted:
        msg = f"{store.url} was taken over by job {now.job} at the same moment"
        raise RemoteNotOurs(msg, hint="agree on who it belongs to, then call it again")
    return now


# --- two remotes that are one place ----------------------------------------------------------------------
# One directory by two paths, or one bucket by two URLs, holds one copy, not two (docs/adr/0166).

NEXT_STEP = "remove one of the two from the job file: what both hold is one copy"


def are_one(first: Attached, second: Attached) -> bool:
    """Whether two remotes are one directory or one bucket; a copy of a remote keeps its identity, too."""
    is_alike = first.identity.remote_id == second.identity.remote_id
    return is_alike and first.place is not None and _root(first.place) == _root(second.place)


def _root(place: str | None) -> str:
    """`device:inode` of it."""
    return "" if place is None else place.partition(".")[0]


def one_place(url: str, other: str, other_url: str) -> str:
    """Say that two remotes are one place, for the one that does not count."""
    kind = "bucket and prefix" if url.startswith(_OBJECT_STORES) else "directory"
    return f"{url} is the same {kind} as remote {other} ({other_url})"
