"""Putting committed files back into a checkpoint folder of save_dir: fetched beside, swapped in (adr/0091).

At every instant a name holds the old bytes or the committed ones; the bad file ends up in `_ckptd/aside/`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.errors import CkptdError, DamagedError, NotPermitted, RefusedError, RemoteError, StorageError
from ckptd.local.fs import ASIDE, STAGING, ensure_ours, names_in, remove_ours
from ckptd.local.scan import has_open_writer, scan_folder
from ckptd.recover.fetch import Fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptd.core.identity import FileIdentity
    from ckptd.core.manifest import ManifestFile
    from ckptd.recover.choose import Copy

Seen = Mapping[str, "FileIdentity"]
"""The files of a folder by path."""
QUIET_SECONDS = 60.0
FETCHED = "repair."
_NOT_SWAPPED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def unrest(save_dir: str, save_dir_fd: int, tag: str) -> str | None:
    """Why a folder is better left alone now: somebody writes in it, or removes it; None: it is quiet."""
    listing = scan_folder(save_dir_fd, tag)
    if listing is None:
        return "it vanished"
    with files.opened_dir(tag, save_dir_fd) as fd:
        newest_ns = max([os.fstat(fd).st_mtime_ns, *(f.identity.mtime_ns for f in listing.files)])
    if time.time() - newest_ns / 1e9 < QUIET_SECONDS:
        return f"it changed less than {QUIET_SECONDS:.0f} s ago"
    return "it is being written" if has_open_writer(save_dir, tag) else None


def seen_in(save_dir_fd: int, tag: str) -> Seen:
    """Identities of the files of a folder, by path; nothing where it is not there."""
    listing = scan_folder(save_dir_fd, tag)
    return {} if listing is None else {file.path: file.identity for file in listing.files}


class Mender:
    """Mends one tag's folder; the caller holds the locks. `copies`: the same save on each remote; `seen`: the
    folder when it was found to be that save."""

    def __init__(
        self,
        save_dir_fd: int,
        tag: str,
        copies: Sequence[Copy],
        seen: Seen,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._seen = seen
        self._fd = save_dir_fd
        self._tag = tag
        self._copies = copies
        self._on_progress = on_progress
        self._staging = f"{FETCHED}{copies[0].view.sha256[:16]}"

    def put_back(self, file: ManifestFile) -> str:
        """Fetch one file from the first remote that holds its committed bytes, and swap it in.

        Returns the remote's name.

        Raises:
            DamagedError: no remote holds those bytes.
            RefusedError: somebody wrote in the folder since it was compared; nothing was changed.
            RemoteError, NotPermitted, StorageError: what the last remote that was asked said.
        """
        self._refuse_if_changed()
        copy = self._fetch(file)
        # fetching takes its time, and the trainer may have saved this tag again: never a mix of two saves
        self._refuse_if_changed()
        try:
            self._swap(file)
        except OSError as error:
            msg = f"{self._tag}/{file.path}: {error.strerror}"
            raise StorageError(msg) from error
        self._seen = seen_in(self._fd, self._tag)
        return copy.remote.name

    def end(self) -> None:
        """Remove what was staged."""
        remove_ours(self._fd, STAGING, self._staging)

    # --- inside ----------------------------------------------------------------------------------------

    def _refuse_if_changed(self) -> None:
        if seen_in(self._fd, self._tag) != self._seen:
            msg = f"{self._tag} was written in since it was compared"
            raise RefusedError(msg, hint="call it again when it is quiet")

    def _fetch(self, file: ManifestFile) -> Copy:
        last: CkptdError = DamagedError(f"no remote holds {self._tag}/{file.path} as it was committed")
        staging = ensure_ours(self._fd, f"{STAGING}/{self._staging}")
        try:
            for copy in self._copies:
                same = [f for f in copy.files if is_same_file(f, file)]
                if not same:
                    continue
                try:
                    Fetcher(replace(copy, files=(same[0],)), staging, self._told(copy, file)).run()
                except (DamagedError, RemoteError, NotPermitted, StorageError) as error:
                    last = error
                else:
                    return copy
        finally:
            os.close(staging)
        raise last

    def _told(self, copy: Copy, file: ManifestFile) -> Callable[[int, int], None] | None:
        tell, what = self._on_progress, f"{copy.remote.name}: {self._tag}/{file.path}"
        return (lambda done, total: tell(what, done, total)) if tell else None

    def _swap(self, file: ManifestFile) -> None:
        head, _, base = file.path.rpartition("/")
        with contextlib.ExitStack() as closing:

            def opened(fd: int) -> int:
                closing.callback(os.close, fd)
                return fd

            staging = opened(files.open_dir_beneath(self._fd, f"{STAGING}/{self._staging}"))
            source = opened(files.open_dir_beneath(staging, head)) if head else staging
            folder = opened(files.open_dir_beneath(self._fd, self._tag))
            status = os.fstat(folder)
            mode = stat.S_IMODE(status.st_mode) & 0o777
            into = opened(files.open_dir_beneath(folder, head, create_mode=mode)) if head else folder
            _own_like(source, base, status)
            with _times_kept(folder, into):
                if files.stat_beneath(into, base) is None:
                    files.rename_new(source, base, into, base)
                else:
                    self._aside(source, into, base)
                files.fsync_dir(into)
                files.fsync_dir(source)

    def _aside(self, source: int, into: int, base: str) -> None:
        """The good file goes to the aside under a name of its own, then the two are swapped."""
        aside = ensure_ours(self._fd, ASIDE)
        try:
            name = _renamed(source, base, aside, f"{self._tag}.{base}")
            try:
                files.rename_exchange(aside, name, into, base)
            except OSError as error:
                if error.errno not in _NOT_SWAPPED:
                    raise
                # a file system that cannot swap: for a moment the name is free
                _renamed(into, base, aside, f"{self._tag}.{base}")
                files.rename_new(aside, name, into, base)
            files.fsync_dir(aside)
        finally:
            os.close(aside)


def is_same_file(one: ManifestFile, other: ManifestFile) -> bool:
    """Two manifests speak of the same content under the same path."""
    return (one.path, one.bytes, one.checksums) == (other.path, other.bytes, other.checksums)


def drop_fetched(save_dir_fd: int) -> None:
    """Remove what killed repairs staged; the caller holds `one_at_a_time`."""
    for name in names_in(save_dir_fd, STAGING):
        if name.startswith(FETCHED):
            remove_ours(save_dir_fd, STAGING, name)


def _renamed(source: int, base: str, aside: int, label: str) -> str:
    """Rename to the first free `label.<n>`; returns it."""
    for number in range(1, 1_000_000):
        name = f"{label}.{number}"
        with contextlib.suppress(FileExistsError):
            files.rename_new(source, base, aside, name)
            return name
    msg = f"{ASIDE} holds too many files of {label}"
    raise RefusedError(msg, hint="`ckptd gc JOB --aside` removes what was moved aside")


def _own_like(source: int, base: str, folder: os.stat_result) -> None:
    """Root mends for the trainer: the file belongs to whom its folder belongs to."""
    if os.geteuid() == 0:
        os.chown(base, folder.st_uid, folder.st_gid, dir_fd=source, follow_symlinks=False)


@contextlib.contextmanager
def _times_kept(*folders: int) -> Iterator[None]:
    """Trainers rotate by the times of folders."""
    times = [(fd, os.fstat(fd)) for fd in dict.fromkeys(folders)]
    yield
    for fd, status in times:
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
