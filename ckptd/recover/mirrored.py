"""A checkpoint in a remote as source files, and its mirror for planning: no line of planning knows of it.

What planning reads of a shard is little (adr/0092): it is fetched into a sparse file of the shard's size.
Apart from ranged_source.py, which finds what a URL means, so that a remote's child loads no more than this.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.convert.companions import CONFIGS, MARKS, is_companion
from ckptd.core.layouts import parse_shard_name
from ckptd.core.manifest import EXTRA_FOLDER
from ckptd.errors import NotFoundError, SourceChanged
from ckptd.pages import write_at
from ckptd.torchfile import mirror

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckptd.core.manifest import ManifestFile
    from ckptd.remote.access import Access
    from ckptd.remote.store import Store

PARALLEL = 4
_COMPANION_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One source: `path` in the mirror, `key` below the store's root; `crc64` hex where a manifest has it.

    `local`: where it lay below the save_dir of the node that shipped it, and `fingerprint`, where a manifest
    says that.
    """

    path: str
    key: str
    bytes: int
    mtime_ns: int = 0
    crc64: str | None = None
    mode: int | None = None
    local: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource:
    """A checkpoint's folder `name` in a remote; paths of `files` begin with it, those beside it have none."""

    url: str
    access: Access
    store: Store
    name: str
    files: tuple[RemoteFile, ...]
    folders: tuple[str, ...]
    """Names of folders in it."""

    @property
    def is_proven(self) -> bool:
        """Manifests say what its bytes are."""
        return any(file.crc64 is not None for file in self.files)


def of_commit(
    url: str,
    access: Access,
    store: Store,
    folder: str,
    tag: str,
    objects: Collection[ManifestFile],
) -> RemoteSource:
    """The checkpoint that a COMMIT's manifests list: shards in `folder`, or one level below it.

    Raises:
        NotFoundError: they list no shards there.
    """
    top = folder.split("/")[0]
    prefix = f"{folder.removeprefix(top).strip('/')}/" if folder != top else ""
    inside = [f for f in objects if not f.path.startswith(f"{EXTRA_FOLDER}/")]
    if not prefix and not any(parse_shard_name(f.path) for f in inside):
        roots = sorted({f.path.rpartition("/")[0] for f in inside if parse_shard_name(Path(f.path).name)})
        prefix = f"{roots[0]}/" if roots else ""
    name = prefix.rstrip("/").rpartition("/")[2] or top
    above = [f for f in objects if f.path.startswith(f"{EXTRA_FOLDER}/")] if not prefix else inside
    cut = len(prefix)
    found = [of_manifest(f, f"{name}/{f.path[cut:]}", tag) for f in inside if f.path.startswith(prefix)]
    found += [of_manifest(f, Path(f.path).name, tag) for f in _beside(above, prefix)]
    return source_of(url, access, store, name, found)


def _beside(above: Iterable[ManifestFile], prefix: str) -> list[ManifestFile]:
    """Files of the folder above the shards: those that travelled along, or lie there in the checkpoint."""
    head = prefix.rstrip("/").rpartition("/")[0]
    return [f for f in above if not prefix or f.path.rpartition("/")[0] == head]


def of_manifest(file: ManifestFile, path: str, tag: str) -> RemoteFile:
    """One that a manifest lists, under the path that planning knows it by."""
    return RemoteFile(
        path=path,
        key=file.key,
        bytes=file.bytes,
        crc64=file.checksums.crc64nvme,
        mode=file.mode & 0o777,
        local="" if file.path.startswith(f"{EXTRA_FOLDER}/") else f"{tag}/{file.path}",
        fingerprint=file.fingerprint,
    )


def source_of(url: str, access: Access, store: Store, name: str, found: list[RemoteFile]) -> RemoteSource:
    """Of what was found, the files that a conversion reads.

    Raises:
        NotFoundError: there are no shards among them.
    """
    inside = [f for f in found if f.path.startswith(f"{name}/")]
    folders = sorted({f.path.split("/")[1] for f in inside if f.path.count("/") > 1})
    kept = [f for f in found if f.path.count("/") <= 1 and _matters(f.path)]
    if not any(parse_shard_name(Path(f.path).name) for f in kept):
        raise NotFoundError(f"{url} holds no shards", hint="name the folder of a checkpoint")
    return RemoteSource(
        url=url, access=access, store=store, name=name, files=tuple(kept), folders=tuple(folders)
    )


def _matters(path: str) -> bool:
    head, _, name = path.rpartition("/")
    if head and parse_shard_name(name):
        return True
    return is_companion(name) or (not head and name in MARKS)


# --- its mirror ------------------------------------------------------------------------------------------


def make_mirror(source: RemoteSource, place_fd: int, *, companions: bool) -> None:
    """Below the open folder `place_fd`: `<name>/` with sparse shards, and small files whole where wanted.

    Raises:
        TornArchiveError, RefusedError: see `ckptd.torchfile.mirror.fill`.
        SourceChanged: a file is gone. RemoteError: it does not answer.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    folder = files.open_dir_beneath(place_fd, source.name, create_mode=0o777 & ~umask)
    try:
        for name in source.folders:
            os.close(files.open_dir_beneath(folder, name, create_mode=0o700))
    finally:
        os.close(folder)
    if companions and any(file.path in CONFIGS for file in source.files):
        files.create_exclusive(place_fd, MARKS[0], b"")  # the mark of a folder whose configuration counts
    wanted = [f for f in source.files if f.path not in MARKS]
    wanted = [f for f in wanted if companions or parse_shard_name(Path(f.path).name)]
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="mirror") as pool:
        futures = [pool.submit(_mirror, source.store, file, place_fd, 0o666 & ~umask) for file in wanted]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _mirror(store: Store, file: RemoteFile, place_fd: int, mode: int) -> None:
    def fetch(offset: int, nbytes: int) -> bytes:
        try:
            data = store.read_at(file.key, offset, nbytes)
        except FileNotFoundError as error:
            raise SourceChanged(f"{file.key} is gone from {store.url}") from error
        if len(data) != nbytes:
            raise SourceChanged(f"{file.key} in {store.url} ends before byte {offset + nbytes}")
        return data

    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = files.open_beneath(place_fd, file.path, flags, 0o600)
    try:
        os.fchmod(fd, file.mode if file.mode is not None else mode)
        os.ftruncate(fd, file.bytes)
        if parse_shard_name(Path(file.path).name):
            mirror.fill(fd, file.path, fetch)
        elif 0 < file.bytes <= _COMPANION_LIMIT_BYTES:
            write_at(fd, fetch(0, file.bytes), 0)
    finally:
        os.close(fd)
