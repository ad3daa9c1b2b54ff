"""Read committed files again, slowly, in a remote's own child, so that rot is found while it can be repaired.

Objects of the remote, or the same files on this node, are compared with the size and CRC64 of the manifests.
What differs is read a second time before it is called bad (docs/adr/0091, 0213).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptd.base import files
from ckptd.core.model.generation import files_here, objects_of
from ckptd.core.model.manifest import side_key, stem
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotPermitted,
    RefusedError,
    SourceUnreadable,
    StorageError,
)
from ckptd.storage.remote.documents import (
    manifests_of_commit,
    read_commit,
    read_supplements,
    stem_of_key,
)
from ckptd.storage.remote.kept import (
    audited,
    heal_documents,
    heal_side_documents,
    is_proven,
    keep_documents,
)
from ckptd.storage.remote.messages import BadCopy, Scrub, Scrubbed
from ckptd.storage.remote.observe import confirm, still_ours
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.rate_limit import RateLimiter
from ckptd.storage.stores.sources import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ckptd.core.model.layouts import Role
    from ckptd.core.model.manifest import ManifestFile, NodeManifest
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.kept import KeptDocuments
    from ckptd.storage.remote.messages import CommitView, RemoteSettings
    from ckptd.storage.remote.observe import AttachedRemote
    from ckptd.storage.stores.base import Store

_STEP_BYTES = 4 << 20
HERE_BYTES_PER_SECOND = 64 << 20
"""This node's files are read no faster, whatever the day's amount: training reads there too."""
Read = Callable[[int, int], bytes]
"""(offset, length) → bytes; fewer at the end."""


class _Place(Protocol):
    """Open the files of a COMMIT where they lie."""

    def opened(self, name: str) -> AbstractContextManager[tuple[int | None, Read]]:
        """Open a file: its size in bytes, None where it is gone, and how it is read."""
        ...

    def is_judged(self, name: str, file: ManifestFile) -> bool:
        """Tell whether a difference would be damage."""
        ...


def scrub(
    attached: AttachedRemote,
    order: Scrub,
    pacer: RateLimiter,
    check: Callable[[], None],
    settings: RemoteSettings | None,
) -> Scrubbed:
    """Compare the next files; `check` may raise between two steps.

    What rights or I/O keep from being read is neither good nor bad: it is named, and the rest is compared.

    Raises:
        RemoteUnreachable, RemoteNotOurs: the remote is not there, or another one.
    """
    store = attached.store
    still_ours(store, attached.identity)
    where = stem_of_key(order.commit_key)
    if where is None:
        return Scrubbed(is_gone=True)
    repaired: list[str] = []
    try:
        read = _healed_documents(attached, order, where, settings, repaired)
        found = read if isinstance(read, Scrubbed) else _files(attached, read, order, pacer, check, settings)
    except CkptdError as error:
        is_of_commit = isinstance(error, DamagedError | RefusedError | NotPermitted | StorageError)
        if is_of_commit and order.place == "remote":
            # it is named, and the others are read
            found = Scrubbed(unread=order.only or (order.commit_key,))
        elif repaired:
            # what was written again is told now; the next order compares, or meets the same error
            found = Scrubbed(next_after=order.after, unread=order.only)
        else:
            raise
    return found.model_copy(update={"repaired": tuple(repaired)})


@dataclass(frozen=True, slots=True)
class _Documents:
    """A COMMIT, then its SUPPLEMENTs, and the manifests of all of them."""

    commits: list[CommitView]
    manifests: list[NodeManifest]


def _healed_documents(
    attached: AttachedRemote, order: Scrub, where: Stem, settings: RemoteSettings | None, repaired: list[str]
) -> _Documents | Scrubbed:
    """Read what an order is about, after what is kept was written again; its keys are added to `repaired`."""
    store, kept = attached.store, attached.kept
    read = _documents(attached, order, where)
    if order.place == "remote" and kept is not None and settings is not None:
        repaired += _side_documents(kept, store, settings)
        if isinstance(read, Scrubbed) and not read.unread:
            repaired += _repaired(kept, store, where, settings)
            return _documents(attached, order, where)  # a second time, whether or not it was repaired
        if isinstance(read, _Documents) and not order.after:
            keep_documents(kept, store, read.commits, attached.manifests, settings.node)
    return read


def _documents(attached: AttachedRemote, order: Scrub, where: Stem) -> _Documents | Scrubbed:
    """Read what an order is about, or answer why nothing can be compared."""
    store, key = attached.store, order.commit_key
    try:
        view = read_commit(store, where)
        if view is None:
            return Scrubbed(is_gone=True)
        if view.sha256 == order.commit_sha256:
            commits = [view, *read_supplements(store, where)]
            known = [one for commit in commits for one in manifests_of_commit(store, commit.commit)]
            return _Documents(commits, [one.manifest for one in known])
        if is_proven(store, view.commit):
            return Scrubbed(is_gone=True)
        why = f"SHA-256 {view.sha256}"
    except (DamagedError, RefusedError, NotPermitted, StorageError) as error:
        if order.place == "here":
            # nobody knows what the files here should be: what was bad stays bad
            return Scrubbed(unread=order.only)
        if isinstance(error, NotPermitted | StorageError):
            return Scrubbed(unread=(key,))
        why = error.message
    if order.place == "here" or store.stat(side_key("retired", stem(*where))) is not None:
        return Scrubbed(is_gone=True)
    expected = f"SHA-256 {order.commit_sha256}, and its manifests"
    return Scrubbed(bad=(BadCopy(key=key, expected=expected, found=why),))


def _repaired(kept: KeptDocuments, store: Store, where: Stem, settings: RemoteSettings) -> tuple[str, ...]:
    """Write again what is kept of the documents; without that the COMMIT is named as it was found."""
    with contextlib.suppress(CkptdError):
        return audited(Path(settings.state_dir), settings.name, heal_documents(kept, store, where))
    return ()


def _side_documents(kept: KeptDocuments, store: Store, settings: RemoteSettings) -> tuple[str, ...]:
    """Compare the side documents once a day: a look asks nothing that it has read before."""
    if not kept.is_comparison_due():
        return ()
    repaired = heal_side_documents(kept, store)
    kept.note_comparison()
    return audited(Path(settings.state_dir), settings.name, repaired)


def _files(
    attached: AttachedRemote,
    read: _Documents,
    order: Scrub,
    pacer: RateLimiter,
    check: Callable[[], None],
    settings: RemoteSettings | None,
) -> Scrubbed:
    view, manifests = read.commits[0], read.manifests
    if order.place == "remote":
        place = _Objects(attached.store)
        return _answer(attached, view, _compare_all(place, objects_of(manifests), order, pacer, check))
    assert settings is not None
    with _folder(settings, view, manifests) as folder:
        if folder is None:
            return Scrubbed()
        slow = RateLimiter(HERE_BYTES_PER_SECOND)
        return _answer(attached, view, _compare_all(folder, folder.listed, order, slow, check))


def _answer(attached: AttachedRemote, view: CommitView, found: Scrubbed) -> Scrubbed:
    """Say nothing of a COMMIT that retention deleted meanwhile."""
    if found.bad and not confirm(attached.store, ((view.key, view.sha256),), attached.identity).ok:
        return Scrubbed(read_bytes=found.read_bytes, is_gone=True)
    return found


def _compare_all(
    place: _Place,
    listed: dict[str, ManifestFile],
    order: Scrub,
    pacer: RateLimiter,
    check: Callable[[], None],
) -> Scrubbed:
    """Compare files by their names in a place."""
    bad: list[BadCopy] = []
    unread: list[str] = []
    read, last, is_whole = 0, order.after, True
    for name in sorted(listed):
        if name <= order.after or (order.only and name not in order.only):
            continue
        if read >= order.limit_bytes:
            is_whole = False
            break
        file, last = listed[name], name
        if not place.is_judged(name, file):
            continue
        try:
            found = _compare(place, name, file, pacer, check)
            if found is not None:
                read += file.bytes
                found = _compare(place, name, file, pacer, check)
        except (NotPermitted, StorageError):
            found = None
            unread.append(name)
        if found is not None:
            bad.append(found)
        read += file.bytes
    return Scrubbed(
        read_bytes=read, next_after=None if is_whole else last, bad=tuple(bad), unread=tuple(unread)
    )


def _compare(
    place: _Place, name: str, file: ManifestFile, pacer: RateLimiter, check: Callable[[], None]
) -> BadCopy | None:
    expected = f"{file.bytes} bytes"
    with place.opened(name) as (size, read):
        if size != file.bytes:
            found = "nothing" if size is None else f"{size} bytes"
        else:
            crc = done = 0
            while done < file.bytes:
                step = pacer.chunk_bytes(min(_STEP_BYTES, file.bytes - done))
                pacer.take(step, check)
                data = read(done, step)
                if not data:
                    break
                crc = crc64(data, crc)
                done += len(data)
            if done == file.bytes and to_hex(crc) == file.checksums.crc64nvme:
                return None
            expected = f"CRC64 {file.checksums.crc64nvme}"
            found = f"CRC64 {to_hex(crc)} over {done} bytes"
    # nothing is said where somebody wrote while it was read
    return BadCopy(key=name, expected=expected, found=found) if place.is_judged(name, file) else None


class _Objects:
    """The objects of a remote, by key: whatever differs is damage."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[int | None, Read]]:
        """See `_Place.opened`."""
        held = self._store.stat(name)

        def read(offset: int, length: int) -> bytes:
            with contextlib.suppress(FileNotFoundError, RefusedError, DamagedError):
                return self._store.read_at(name, offset, length)
            return b""

        yield None if held is None else held.bytes, read

    def is_judged(self, _name: str, _file: ManifestFile) -> bool:
        """See `_Place.is_judged`."""
        return True


# --- files of this node ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(
    settings: RemoteSettings, view: CommitView, manifests: list[NodeManifest]
) -> Iterator[_Folder | None]:
    """Open the folder of a committed form on this node; None: it is not there."""
    mine = [one for one in manifests if one.node_id == settings.node_id]
    is_own = bool(mine) or len(manifests) == 1
    try:
        fd = os.open(settings.save_dir, files.DIR_FLAGS)
    except OSError:
        yield None
        return
    try:
        listed = (file for manifest in mine or manifests for file in manifest.files)
        folder = _Folder(fd, files_here(view.commit.tag, view.commit.form, listed), is_own=is_own)
        yield folder if folder.is_there else None
    finally:
        os.close(fd)


class _Folder:
    """The files of a checkpoint on this node, by path, which its trainer may write again, or remove.

    Whoever writes a file changes its time: then it is another save's, or nobody's business here. A file that
    is gone is damage where one of its kind is left beside it; who removes a kind, or a checkpoint, means it.
    """

    def __init__(self, save_dir_fd: int, listed: dict[str, ManifestFile], *, is_own: bool) -> None:
        """`is_own`: this node had all of these files; else those that `resume` put here are all it has."""
        self._fd = save_dir_fd
        self._is_own = is_own
        self.listed = listed
        self._there = {_kind(path, file) for path, file in listed.items() if self._status(path) is not None}
        self.is_there = bool(self._there)

    def _status(self, path: str) -> os.stat_result | None:
        with contextlib.suppress(RefusedError, NotADirectoryError):
            return files.stat_beneath(self._fd, path)
        return None

    def is_judged(self, name: str, file: ManifestFile) -> bool:
        """See `_Place.is_judged`."""
        status = self._status(name)
        if status is None:
            return self._is_own and _kind(name, file) in self._there
        return status.st_mtime_ns == file.mtime_ns

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[int | None, Read]]:
        """See `_Place.opened`.

        Raises:
            SourceUnreadable: the disk refuses, for another reason than that bytes are lost.
        """
        try:
            fd = files.open_beneath(self._fd, name)
        except (FileNotFoundError, NotADirectoryError, RefusedError):
            yield None, lambda _offset, _length: b""
            return
        except OSError as error:
            raise SourceUnreadable(f"opening {name}: {error.strerror or error}") from error
        try:
            status = os.fstat(fd)
            source = FileSource(fd, name)
            try:
                is_file = stat.S_ISREG(status.st_mode)
                yield status.st_size if is_file else None, partial(_read, fd, source, name)
            finally:
                # what was read is not kept in memory, and the second reading asks the disk
                source.drop_all()
        finally:
            os.close(fd)


def _kind(path: str, file: ManifestFile) -> tuple[str, Role]:
    return path.rpartition("/")[0], file.role


def _read(fd: int, source: FileSource, path: str, offset: int, length: int) -> bytes:
    try:
        data = os.pread(fd, length, offset)
    except OSError as error:
        if error.errno in files.ROTTEN:
            return b""
        raise SourceUnreadable(f"reading {path} at {offset}: {error.strerror or error}") from error
    source.drop(offset, len(data))
    return data
