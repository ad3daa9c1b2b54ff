"""Compare the files in a folder with a committed form: every file by size and CRC64.

A second `restore` fetches only what is missing or bad. A folder under the same name that is another save is
never mixed with this one: shards of two saves load without a warning and train wrongly (docs/design.md §3).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptd.base import extents, files
from ckptd.base.names import DESCRIPTION
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.model.generation import files_here
from ckptd.core.model.layouts import Role, parse_shard_name
from ckptd.core.model.other_layouts import below, is_single_file
from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotPermitted,
    RefusedError,
    RemoteError,
    StorageError,
    TargetExists,
)
from ckptd.recover.fetch import BUFFER_BYTES, PARALLEL, Fetcher
from ckptd.recover.select.choose import views_by_save
from ckptd.recover.select.copies import Copy, Nodes, files_for_node
from ckptd.recover.select.steps import DERIVED_UNIVERSAL, name_of_extra
from ckptd.storage.local.fs import ASIDE, STAGING, closing, ensure_ours, names_in, open_tag, remove_ours
from ckptd.storage.local.scan import has_open_writer, scan_folder
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.sources import CheckedSource, FileSource, crc64_of, records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from ckptd.base.identity import FileIdentity
    from ckptd.core.model.listing import FolderListing, ListedFile
    from ckptd.core.model.manifest import ManifestFile
    from ckptd.recover.select.inventory import RemoteInventory


_SHARDS = (Role.OPTIM, Role.MODEL, Role.LAYER, Role.EXPERT)


def compare_folder(
    root: Path,
    dir_fd: int | None,
    target: str,
    whole: Copy,
    wanted: Copy,
    compare: Callable[[int, ManifestFile], bool] | None = None,
) -> tuple[ManifestFile, ...] | None:
    """Return what of the wanted files of the form `whole` is absent from `target` below `root` (open as
    `dir_fd`), or other bytes; None: the folder is not there. `compare`: instead of `same_bytes`.

    Raises:
        TargetExists: there is something else under that name (73).
    """
    if dir_fd is None:
        return None
    is_file = is_single_file(target, [file.path for file in whole.files])
    if is_file and files.stat_beneath(dir_fd, target) is None:
        return None
    try:
        folder = os.dup(dir_fd) if is_file else files.open_dir_beneath(dir_fd, target)
    except FileNotFoundError:
        return None
    except (NotADirectoryError, RefusedError) as error:
        msg = f"{root / target} is there and is no folder of its own"
        raise TargetExists(msg) from error
    try:
        known = {file.path: file for file in whole.files}
        present = [file for file in known.values() if _is_something(folder, file.path)]
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="compare") as pool:
            found = dict(
                zip(
                    (f.path for f in present),
                    pool.map(lambda f: (compare or same_bytes)(folder, f), present),
                    strict=True,
                )
            )
    finally:
        os.close(folder)
    if not _is_this_save(root if is_file else root / target, whole, found):
        commit = whole.view.commit
        msg = f"{root / target} is there and is not the {commit.form} form of {commit.tag} that was committed"
        raise TargetExists(msg)
    return tuple(f for f in wanted.files if not found.get(f.path, False))


def _is_this_save(folder: Path, whole: Copy, found: Mapping[str, bool]) -> bool:
    """Whether a folder with these files (path → as committed) is the save, perhaps with bad files in it.

    A shard whose bytes differ is a bad copy if it cannot be read or bears the committed fingerprint; a whole
    archive with another one is another save. A universal form is known by its `ckptd.json`.
    """
    if whole.view.commit.form != ZERO:
        top = [same for path, same in found.items() if "/" not in path]
        return found.get(DESCRIPTION, any(top) or not found)
    shards = {f.path: f.fingerprint for f in whole.files if f.role in _SHARDS and f.path in found}
    if not shards:
        return all(found.values())
    other = [path for path in shards if not found[path]]
    same_save = len(other) < len(shards)
    for row in inspect_files(folder, other):
        if row.fingerprint and row.fingerprint != shards[row.path]:
            return False
        same_save = same_save or bool(row.fingerprint)
    return same_save


def _is_something(folder: int, path: str) -> bool:
    try:
        return files.stat_beneath(folder, path) is not None
    except RefusedError:
        return True


def same_bytes(folder: int, file: ManifestFile) -> bool:
    """Whether a file has the committed size and CRC64; pages are dropped after reading."""
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
            extents.drop_pages(fd, offset, len(data))
            offset += len(data)
        return to_hex(crc) == file.checksums.crc64nvme
    except OSError as error:
        # bytes that the disk has lost are as bad as other ones
        if error.errno in files.ROTTEN:
            return False
        raise
    finally:
        os.close(fd)


# --- repairing files of a folder -------------------------------------------------------------------------
# Committed files are fetched beside and swapped in: at every instant a name holds the old bytes or the
# committed ones, and the bad file ends up in `_ckptd/aside/` (docs/adr/0091).

Seen = Mapping[str, "FileIdentity"]
"""The files of a folder by path."""
QUIET_SECONDS = 60.0
FETCHED = "repair."
_NOT_SWAPPED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def why_busy(save_dir: str, save_dir_fd: int, tag: str) -> str | None:
    """Return why a folder must be left alone: somebody writes in it, or removes it; None: it is quiet."""
    listing = scan_folder(save_dir_fd, tag)
    if listing is None:
        return "it vanished"
    times_ns = [f.identity.mtime_ns for f in listing.files]
    if not listing.is_single_file:
        with files.opened_dir(tag, save_dir_fd) as fd:
            times_ns.append(os.fstat(fd).st_mtime_ns)
    newest_ns = max(times_ns)
    if time.time() - newest_ns / 1e9 < QUIET_SECONDS:
        return f"it changed less than {QUIET_SECONDS:.0f} s ago"
    return "it is being written" if has_open_writer(save_dir, tag) else None


def file_identities(save_dir_fd: int, tag: str) -> Seen:
    """Return the identities of the files of a folder, by path; nothing where it is not there."""
    listing = scan_folder(save_dir_fd, tag)
    return {} if listing is None else {file.path: file.identity for file in listing.files}


class FileRepairer:
    """Mends one folder of a save, by its path below save_dir; the caller holds the locks. `copies`: the same
    form on each remote; `seen`: the folder when it was found to be that save."""

    def __init__(
        self,
        save_dir_fd: int,
        folder: str,
        copies: Sequence[Copy],
        seen: Seen,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._seen = seen
        self._fd = save_dir_fd
        self._folder = folder
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
            msg = f"{self._folder}/{file.path}: {error.strerror}"
            raise StorageError(msg) from error
        self._seen = file_identities(self._fd, self._folder)
        return copy.remote.name

    def end(self) -> None:
        """Remove what was staged."""
        remove_ours(self._fd, STAGING, self._staging)

    # --- inside ----------------------------------------------------------------------------------------

    def _refuse_if_changed(self) -> None:
        if file_identities(self._fd, self._folder) != self._seen:
            msg = f"{self._folder} was written in since it was compared"
            raise RefusedError(msg, hint="call it again when it is quiet")

    def _fetch(self, file: ManifestFile) -> Copy:
        last: CkptdError = DamagedError(f"no remote holds {self._folder}/{file.path} as it was committed")
        with closing(ensure_ours(self._fd, f"{STAGING}/{self._staging}")) as staging:
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
        raise last

    def _told(self, copy: Copy, file: ManifestFile) -> Callable[[int, int], None] | None:
        tell, what = self._on_progress, f"{copy.remote.name}: {self._folder}/{file.path}"
        return (lambda done, total: tell(what, done, total)) if tell else None

    def _swap(self, file: ManifestFile) -> None:
        head, _, base = file.path.rpartition("/")
        with (
            closing(files.open_dir_beneath(self._fd, f"{STAGING}/{self._staging}")) as staging,
            opened_parent(staging, head) as source,
            closing(open_tag(self._fd, self._folder)) as folder,
        ):
            status = os.fstat(folder)
            mode = stat.S_IMODE(status.st_mode) & 0o777
            with opened_parent(folder, head, create_mode=mode, is_durable=True) as into:
                _own_like(source, base, status)
                with _times_kept(folder, into):
                    if files.stat_beneath(into, base) is None:
                        files.rename_new(source, base, into, base)
                    else:
                        self._aside(source, into, base)
                    files.fsync_dir(into)
                    files.fsync_dir(source)

    def _aside(self, source: int, into: int, base: str) -> None:
        """Move the bad file aside: the good one is put there under a name of its own, then the two are
        swapped.
        """
        label = self._folder.rpartition("/")[2]
        with closing(ensure_ours(self._fd, ASIDE)) as aside:
            name = rename_numbered(source, base, aside, f"{label}.{base}")
            try:
                files.rename_exchange(aside, name, into, base)
            except OSError as error:
                if error.errno not in _NOT_SWAPPED:
                    raise
                # a file system that cannot swap: for a moment the name is free
                rename_numbered(into, base, aside, f"{label}.{base}")
                files.rename_new(aside, name, into, base)
            files.fsync_dir(aside)


def is_same_file(one: ManifestFile, other: ManifestFile) -> bool:
    """Whether two manifests speak of the same content under the same path."""
    return (one.path, one.bytes, one.checksums) == (other.path, other.bytes, other.checksums)


def drop_fetched(save_dir_fd: int) -> None:
    """Remove what killed repairs staged; the caller holds `one_at_a_time`."""
    for name in names_in(save_dir_fd, STAGING):
        if name.startswith(FETCHED):
            remove_ours(save_dir_fd, STAGING, name)


def opened_parent(
    fd: int, head: str, *, create_mode: int | None = None, is_durable: bool = False
) -> contextlib.AbstractContextManager[int]:
    """Open the folder `head` below `fd`, which may be empty: `fd` itself."""
    if not head:
        return closing(os.dup(fd))
    return closing(files.open_dir_beneath(fd, head, create_mode=create_mode, is_durable=is_durable))


def rename_numbered(source: int, base: str, aside: int, label: str) -> str:
    """Rename to the first free `label.<n>`; returns it."""
    for number in range(1, 1_000_000):
        name = f"{label}.{number}"
        with contextlib.suppress(FileExistsError):
            files.rename_new(source, base, aside, name)
            return name
    msg = f"{ASIDE} holds too many files of {label}"
    raise StorageError(msg, hint="`ckptd gc JOB --aside` removes what was moved aside")


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


# --- finding what lies intact or damaged in save_dir -----------------------------------------------------

_COMPARED = (Role.OPTIM, Role.MODEL, Role.LAYER, Role.EXPERT, Role.WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFault:
    """One file of a committed save that is absent from its folder here, or other bytes; or an empty folder
    that is absent: NVMe offload loads no save without it.
    """

    tag: str
    folder: str
    """Path of the form's folder below save_dir; the tag itself for the ZeRO form."""
    path: str
    """Below that folder."""
    file: ManifestFile | None
    """None: it is an empty folder."""
    copies: tuple[Copy, ...]
    """The very save on each remote that holds it."""
    is_there: bool
    seen: Seen
    """Every file of the folder as it was before the first of them was compared."""
    left: str | None = None
    """Reason why it is not repaired; None: it may be."""


class LocalFiles:
    """save_dir as a source of intact bytes, and what in it is damaged. `node_id`: whose files ours are."""

    def __init__(self, save_dir: Path, fd: int, node_id: str | None, say: Callable[[str], None]) -> None:
        self._save_dir = save_dir
        self._fd = fd
        self._node_id = node_id
        self._say = say
        self._good: dict[tuple[str, str], bool] = {}
        self._only: Collection[str] | None = None

    def find(self, tag: str, form: str, file: ManifestFile) -> str | None:
        """Return the path below save_dir of a file with exactly those bytes; None: there is none."""
        for path in _candidates(tag, form, file):
            mark = (path, file.checksums.crc64nvme)
            if mark not in self._good:
                self._good[mark] = same_bytes(self._fd, file.model_copy(update={"path": path}))
            if self._good[mark]:
                return path
        return None

    def is_good_now(self, folder: str, file: ManifestFile) -> None:
        """Note that a file was repaired."""
        self._good[below(folder, file.path), file.checksums.crc64nvme] = True

    def faults(
        self,
        remotes: Sequence[RemoteInventory],
        tag: str | None,
        only: Collection[str] | None = None,
    ) -> list[LocalFault]:
        """Return damaged files and lost folders of committed saves whose folder is here; oldest first.

        A folder that holds another save than the newest committed one of its tag is left alone, and so are
        files beside the shards, or of a universal form, that somebody changed on purpose (another time).
        `only`: paths below save_dir; other files are believed by their size and time.
        """
        self._only = only
        found: list[LocalFault] = []
        for form in (ZERO, UNIVERSAL):
            for name, copies in _newest_by_tag(remotes, tag, form, self._say).items():
                found += self._faults_of(name, form, copies)
        return found

    def _faults_of(self, tag: str, form: str, copies: Sequence[Copy]) -> list[LocalFault]:
        folder = tag if form == ZERO else f"{DERIVED_UNIVERSAL}/{tag}"
        if files.stat_beneath(self._fd, folder) is None:
            return []
        if form != ZERO:
            copies = [_as_made_here(copy, folder) for copy in copies]
        whole = self._ours(copies[0], folder)
        seen = file_identities(self._fd, folder)
        held = self._lacking(folder, whole)
        if held is None:
            self._say(f"{folder}: the folder here is another save than the committed one; left alone")
            return []
        lacking = [file for file in held if self._is_damage(folder, file)]
        faults = [*((file.path, file) for file in lacking), *self._lost(folder, copies[0])]
        if self._only is not None:
            faults = [row for row in faults if below(folder, row[0]) in self._only]
        if not faults:
            return []
        reason = why_busy(str(self._save_dir), self._fd, folder)
        return [
            LocalFault(
                tag=tag,
                folder=folder,
                path=path,
                file=file,
                copies=(whole, *(other for other in copies[1:] if _is_of_save(other, whole))),
                is_there=self._is_there(folder, path),
                seen=seen,
                left=reason,
            )
            for path, file in faults
        ]

    def _same(self, folder: int, file: ManifestFile, path: str) -> bool:
        """Compare a file, `path` below save_dir; of those that nobody asked for only size and time."""
        if self._only is not None and path not in self._only:
            with contextlib.suppress(RefusedError, OSError):
                status = files.stat_beneath(folder, file.path)
                if status is not None and (status.st_size, status.st_mtime_ns) == (file.bytes, file.mtime_ns):
                    return True
        return same_bytes(folder, file)

    def _lost(self, folder: str, copy: Copy) -> list[tuple[str, None]]:
        """Return the empty folders of this node's part of a save that are not there; of no file."""
        is_alone = len(copy.manifests) == 1
        mine = (m for m in copy.manifests if is_alone or m.node_id == self._node_id)
        paths = {path for manifest in mine for path in manifest.empty_folders}
        return [(path, None) for path in sorted(paths) if not self._is_there(folder, path)]

    def _lacking(self, folder: str, whole: Copy) -> list[ManifestFile] | None:
        """Return the files of a committed form that are bad or absent here; None: it is another save's.

        Where fingerprints tell nothing any more (rot in a zip directory), sizes and times do: whoever saves
        again changes the time of what it writes.
        """

        def compare(dir_fd: int, file: ManifestFile) -> bool:
            return self._same(dir_fd, file, below(folder, file.path))

        try:
            found = compare_folder(self._save_dir, self._fd, folder, whole, whole, compare)
            return list(whole.files if found is None else found)
        except TargetExists:
            lacking = []
        try:
            for file in whole.files:
                path = below(folder, file.path)
                status = files.stat_beneath(self._fd, path)
                is_same = status is None or (status.st_size, status.st_mtime_ns) == (
                    file.bytes,
                    file.mtime_ns,
                )
                if file.role in _COMPARED and not is_same:
                    return None
                placed = file.model_copy(update={"path": path})
                if status is None or not self._same(self._fd, placed, path):
                    lacking.append(file)
        except (CkptdError, OSError):
            return None
        return lacking

    def _is_there(self, folder: str, path: str) -> bool:
        return files.stat_beneath(self._fd, below(folder, path)) is not None

    def _is_damage(self, folder: str, file: ManifestFile) -> bool:
        if file.role in _COMPARED:
            return True
        status = files.stat_beneath(self._fd, below(folder, file.path))
        if status is None or status.st_mtime_ns == file.mtime_ns:
            return True
        self._say(f"{folder}/{file.path} was changed since the save; left alone")
        return False

    def _ours(self, copy: Copy, folder: str) -> Copy:
        """Return this node's part of a copy; where that is not known, the part that lies here."""
        whole = files_for_node(copy, Nodes())
        if len(copy.manifests) == 1:
            return whole
        mine = tuple(m for m in copy.manifests if m.node_id == self._node_id)
        if mine:
            return files_for_node(replace(copy, manifests=mine), Nodes())
        here = tuple(file for file in whole.files if self._is_there(folder, file.path))
        return replace(whole, files=here)


def _candidates(tag: str, form: str, file: ManifestFile) -> Iterable[str]:
    if file.role is Role.EXTRA:
        return [name_of_extra(file)]
    if form == ZERO:
        return [below(tag, file.path)]
    inside = file.path.partition("/")[2]
    return [f"{DERIVED_UNIVERSAL}/{tag}/{path}" for path in (file.path, inside) if path]


def _as_made_here(copy: Copy, folder: str) -> Copy:
    """Return a universal form with its files as they lie in the folder that it was made in."""
    here = files_here(copy.view.commit.tag, UNIVERSAL, copy.files)
    inside = (f.model_copy(update={"path": path.removeprefix(f"{folder}/")}) for path, f in here.items())
    return replace(copy, files=tuple(inside))


def _newest_by_tag(
    remotes: Sequence[RemoteInventory], tag: str | None, form: str, say: Callable[[str], None]
) -> dict[str, list[Copy]]:
    """Return a form of the newest committed save of each tag, on every remote that has it; oldest first."""
    saves = views_by_save(remotes, (form,))
    newest = {name: order for order, name in sorted(saves) if tag in (None, name)}
    found: dict[str, list[Copy]] = {}
    for name, order in sorted(newest.items(), key=lambda row: (row[1], row[0])):
        for remote, view in saves[order, name]:
            try:
                whole = Copy(remote=remote, view=view, manifests=remote.manifests(view.commit), files=())
                copy = files_for_node(whole, Nodes())
            except CkptdError as error:
                say(f"{remote.name}: {name}: {error.message}")
            else:
                found.setdefault(name, []).append(copy)
    return found


def _is_of_save(other: Copy, whole: Copy) -> bool:
    """Whether a copy holds the same content, file by file."""
    theirs = {file.path: file for file in other.files}
    return all(
        f.path in theirs and is_same_file(theirs[f.path], f) for f in whole.files if f.role in _COMPARED
    )


def opened_save_dir(path: Path) -> int | None:
    """Return a descriptor of save_dir; None where there is none."""
    try:
        return os.open(path, files.DIR_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return None


# --- bytes that are not those that were saved ------------------------------------------------------------
# An upload compares `torch.save`'s own CRCs; here that is proven anew for a person who gives a folder up.


def damage_in(save_dir_fd: int, listing: FolderListing) -> str | None:
    """Return the first shard whose bytes are not those that were saved, and how; None: none is known to be
    other.

    Raises:
        SourceChanged: somebody writes there. StorageError: the disk cannot read a shard.
    """
    for file in listing.own:
        # what memory holds of a file may be wrong where the disk is right: the second time it is read anew
        path = below(listing.tag, file.path)
        if _differs(save_dir_fd, path, file) and (reason := _differs(save_dir_fd, path, file)):
            return reason
    return None


def _differs(save_dir_fd: int, path: str, file: ListedFile) -> str | None:
    with files.reading(save_dir_fd, path, file.identity) as fd:
        source = FileSource(fd, path)
        is_shard = parse_shard_name(file.name) is not None
        try:
            checked = CheckedSource(source, records_of(fd, path, is_shard=is_shard), path)
            crc64_of(checked, 0, source.size_bytes, drops=True)
        except DamagedError as error:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return error.message
    return None
