"""Choose where a job's journal, status.json and audit.jsonl lie (docs/contract.md *On the node*).

SQLite and flock need a local file system, and a home directory is often a network one: then the state goes to
/var/tmp, into a directory that only its owner can enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ckptd.base import files
from ckptd.base.identity import Model
from ckptd.base.owned_dirs import lies_in_ours, opened_ours, path_of
from ckptd.core.model.listing import OURS
from ckptd.errors import CkptdError, ConfigError, NotPermitted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptd.config.schema import JobConfig

_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "fuse.",
    "9p",
    "afs",
    "wekafs",
)
NODE_ID = "node_id"
NODE_PLACE = "node_place"
"""Inode of the save_dir in which the state lay when the id was made."""
REPAIR_UPLOADS = "repair-uploads.json"
"""File that lists the uploads that a repair has begun (maintenance/repair.py)."""
_NODE_ID_LIMIT_BYTES = 256
_NODE_PLACE_LIMIT_BYTES = 64
JOB = "job.json"
"""File that says how the job was started: its job file, or its arguments and settings (docs/contract.md)."""
_JOB_LIMIT_BYTES = 1 << 20
_LOCAL_FUSE = ("fuse.fuse-overlayfs",)


class _Memory(Model):
    """`job.json`."""

    schema_version: int = 1
    save_dir: str
    file: str | None
    given: str | None


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that `path`, or its nearest existing parent, lies on; "" when
    unknown.
    """
    real = Path(os.path.realpath(path))
    best, kind = "", ""
    for mount in psutil.disk_partitions(all=True):
        point = mount.mountpoint
        if len(point) >= len(best) and (real == Path(point) or Path(point) in real.parents):
            best, kind = point, mount.fstype
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system type is served by another machine."""
    return kind not in _LOCAL_FUSE and kind.startswith(_NETWORK)


def state_dir_of(
    save_dir: Path, job: str, configured: Path | None, environ: Mapping[str, str], *, jobs_in_daemon: int = 1
) -> Path:
    """Return the state directory of one job; nothing is created.

    `<state_dir>/<job>`, else `<$STATE_DIRECTORY>/<job>`, else `<save_dir>/_ckptd/state` (single job); when
    that is on a network file system or under $HOME, `/var/tmp/ckptd-<uid>/<sha of save_dir>`.

    Raises:
        ConfigError: several jobs in one daemon and neither `state_dir` nor $STATE_DIRECTORY.
    """
    base = state_base(configured, environ, jobs_in_daemon)
    found = base / job if base is not None else path_of(save_dir, f"{OURS}/state")
    if is_network(filesystem_type(found)) or _is_under_home(found, environ):
        return private_place(save_dir)
    return found


def state_base(configured: Path | None, environ: Mapping[str, str], jobs_in_daemon: int) -> Path | None:
    """Return the directory for the state of a daemon's jobs; None: that of its only one lies in save_dir.

    Raises:
        ConfigError: as `state_dir_of`.
    """
    base = configured or next(iter(_paths(environ.get("STATE_DIRECTORY", ""))), None)
    if base is None and jobs_in_daemon > 1:
        msg = "state_dir is missing: several jobs in one daemon, or a glob in save_dir, need one"
        raise ConfigError(msg, hint='set state_dir = "/var/lib/ckptd" in ckptd.toml')
    return base


def read_node_id(state_dir_fd: int) -> str | None:
    """Return the random id of this node, where a daemon made one; nothing is created.

    Raises:
        OSError, CkptdError, UnicodeDecodeError: it is there and cannot be read.
    """
    with contextlib.suppress(FileNotFoundError):
        return files.read_beneath(state_dir_fd, NODE_ID, limit_bytes=_NODE_ID_LIMIT_BYTES).decode().strip()
    return None


def awaits_checkpoint(state_dir: Path, save_dir: Path) -> bool:
    """Tell whether a job begins with its first checkpoint only: nothing of ours lies in save_dir until then
    (P11).

    One whose save_dir was emptied goes on: what it has in the remotes and misses here is to be said.
    """
    if not state_dir.is_relative_to(save_dir):
        return False
    with contextlib.suppress(OSError), opened_ours(state_dir) as fd:
        return files.stat_beneath(fd, "journal.db") is None
    return True


def is_default_state(state_dir: Path, save_dir: Path) -> bool:
    """Tell whether the state directory lies in save_dir, or where ours does: it moves and goes with it."""
    return state_dir.is_relative_to(save_dir) or state_dir == path_of(save_dir, f"{OURS}/state")


def own_state(state_dir: Path | None, save_dir: Path) -> Path | None:
    """Return a state directory whose node id and journal are of this save_dir; None: there is none.

    None too where it came with a copy of save_dir in which no daemon has begun since: then they are of the
    original, which may be at work, and so are the uploads of which they tell.
    """
    if state_dir is None or not is_default_state(state_dir, save_dir):
        return state_dir
    with contextlib.suppress(OSError, CkptdError), opened_ours(state_dir) as fd:
        return None if is_of_another(fd, save_dir.stat().st_ino) else state_dir
    return state_dir


def own_node_id(state_dir: Path | None, save_dir: Path) -> str | None:
    """Return this node's id, where a daemon has run here and it can be read."""
    own = own_state(state_dir, save_dir)
    if own is not None:
        with contextlib.suppress(OSError, ValueError, CkptdError), opened_ours(own) as fd:
            return read_node_id(fd)
    return None


def is_of_another(state_dir_fd: int, inode: int) -> bool:
    """Whether a state directory was begun in another save_dir than the one with this inode, where it lies."""
    try:
        place = files.read_beneath(state_dir_fd, NODE_PLACE, limit_bytes=_NODE_PLACE_LIMIT_BYTES)
    except FileNotFoundError:
        return False
    return place != str(inode).encode()


def remember_job(state_dir: Path, config: JobConfig) -> None:
    """Write down how the job was started, durably: commands find the remotes of its save_dir by it later.

    A state directory that takes nothing now costs those commands an argument, not the job its start.
    """
    known = _Memory(
        save_dir=str(config.save_dir),
        file=str(config.file) if config.file is not None else None,
        given=config.given,
    )
    text = known.model_dump_json().encode()
    with contextlib.suppress(OSError, CkptdError), opened_ours(state_dir) as fd:
        if _read_memory(fd) != text:
            files.write_atomic(fd, JOB, text)


def remembered_job(state_dirs: Iterable[Path], save_dir: Path) -> tuple[str | None, str | None]:
    """Return (job file, what arguments said) by which the job of `save_dir` was started last, or two None."""
    for place in state_dirs:
        known = _memory_in(place)
        if known is not None and os.path.realpath(known.save_dir) == os.path.realpath(save_dir):
            return known.file, known.given
    return None, None


def remembered_save_dir(state_dir: Path) -> str | None:
    """Return the save_dir of the job that was started last with this state directory."""
    known = _memory_in(state_dir)
    return known.save_dir if known is not None else None


def _memory_in(place: Path) -> _Memory | None:
    """Read what a state directory says of its job; None: nothing that is believed.

    Only a file of this user, or of root, is: it names where credentials are sent.
    """
    with contextlib.suppress(OSError, CkptdError, ValueError), opened_ours(place) as fd:
        status = files.stat_beneath(fd, JOB)
        if status is not None and status.st_uid in (0, os.geteuid()):
            return _Memory.model_validate_json(_read_memory(fd) or b"")
    return None


def _read_memory(state_dir_fd: int) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return files.read_beneath(state_dir_fd, JOB, limit_bytes=_JOB_LIMIT_BYTES)
    return None


def private_place(save_dir: Path) -> Path:
    """`/var/tmp/ckptd-<uid>/<sha of save_dir>`; there lies the status of a job that has no checkpoint yet."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(save_dir))).hexdigest()[:16]
    return Path("/var/tmp") / f"ckptd-{os.getuid()}" / digest  # noqa: S108 — owner and mode are checked


def drop_status(place: Path, name: str) -> None:
    """Take a published file out of a private place, and the place with it if nothing else lies there."""
    with contextlib.suppress(OSError):
        with files.opened_dir(place) as fd:
            files.remove_file(fd, name)
        place.rmdir()


def prepare_state_dir(path: Path) -> None:
    """Create a state directory; below /var/tmp every level of ours is 0700 and our own.

    Raises:
        NotPermitted: somebody else owns it, or it is a symlink.
    """
    if lies_in_ours(path):
        with _explained(path), opened_ours(path, create_mode=0o755):
            return
    private = [p for p in (path, *path.parents) if p.parent == Path("/var/tmp") or p == path]  # noqa: S108
    is_shared_place = Path("/var/tmp") in path.parents  # noqa: S108
    for level in reversed(private if is_shared_place else [path]):
        level.mkdir(mode=0o700 if is_shared_place else 0o755, parents=not is_shared_place, exist_ok=True)
        status = os.lstat(level)
        if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
            raise _no_directory(level)
        mode = stat.S_IMODE(status.st_mode)
        if is_shared_place and (status.st_uid != os.getuid() or mode & 0o077):
            msg = f"state directory {level} belongs to uid {status.st_uid}, mode {mode:o}"
            raise NotPermitted(msg, hint=f"it must be ours alone (0700); we run as uid {os.getuid()}")
    _flush_names(path)


def _flush_names(path: Path) -> None:
    """The directory is there after a power cut: else decisions and node id went with it (P8)."""
    for folder in (path.parent.parent, path.parent):
        with contextlib.suppress(OSError), files.opened_dir(folder) as fd:
            files.fsync_dir(fd)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except NotADirectoryError as error:
        raise _no_directory(path) from error


def _no_directory(path: Path) -> NotPermitted:
    msg = f"state directory {path} is not a directory of ours"
    return NotPermitted(msg, hint="move it away, or set state_dir in ckptd.toml")


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(":") if part]


def _is_under_home(path: Path, environ: Mapping[str, str]) -> bool:
    home = environ.get("HOME", "")
    if not home or home == "/":
        return False
    return Path(os.path.realpath(home)) in Path(os.path.realpath(path)).parents
