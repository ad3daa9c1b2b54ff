"""Read a checkpoint in a remote as the source of a conversion: resolve its URL, list and mirror its files.

SRC may name a checkpoint's folder, or a folder with `latest`. Below the root of a remote of ckptd only
committed checkpoints exist, and their manifests say what every byte must be.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.extents import write_at
from ckptd.base.names import IDENTITY_KEY
from ckptd.config.loader import remote_from_arguments
from ckptd.conversion.engine.staging import MARKS, PlanOrigin, is_companion, is_config, list_source
from ckptd.conversion.engine.supervisor import plan_request, write_plan
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.plan import ARCHIVES
from ckptd.core.model.generation import choose_pointers, objects_of, order_of
from ckptd.core.model.layouts import parse_shard_name
from ckptd.core.model.manifest import EXTRA_FOLDER
from ckptd.core.model.other_layouts import METADATA, SUFFIX
from ckptd.core.model.swap_paths import is_state
from ckptd.errors import CkptdError, DamagedError, NotFoundError, RefusedError, SourceChanged
from ckptd.formats.torchfile import skeleton
from ckptd.formats.torchfile.archive import DEFAULT_LIMITS
from ckptd.formats.torchfile.fingerprint import raw_samples
from ckptd.formats.torchfile.skeleton import END_BYTES, joined
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.storage.child.apart import open_apart
from ckptd.storage.stores.access import Access, access_of
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.open import ancestors
from ckptd.storage.stores.parallel import FailFastPool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from ckptd.core.model.manifest import ManifestFile
    from ckptd.recover.select.copies import Copy
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.storage.stores.base import ObjectInfo, Store


# --- The checkpoint as source files ----------------------------------------------------------------------
# Planning reads little of a shard: that is fetched into a sparse file of the shard's size, the mirror (ADR
# 0092), so that the code of planning is the same as for local files.

PARALLEL = 4
_COMPANION_LIMIT_BYTES = 64 << 20
_AT_ONCE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One source: `path` in the mirror, `key` below the store's root; `crc64` hex where a manifest has it.

    `local`: where it lay below the save_dir of the node that uploaded it, and `fingerprint`, where a manifest
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
    tag: str = ""
    """Tag of the COMMIT that lists it, by which retention may delete it; "": outside every remote."""


def of_commit(
    url: str,
    access: Access,
    store: Store,
    folder: str,
    tag: str,
    objects: Collection[ManifestFile],
) -> RemoteSource:
    """Return the checkpoint that a COMMIT's manifests list: shards in `folder`, or one level below it.

    Raises:
        NotFoundError: they list no shards there.
    """
    top = folder.split("/")[0]
    prefix = f"{folder.removeprefix(top).strip('/')}/" if folder != top else ""
    inside = [f for f in objects if not f.path.startswith(f"{EXTRA_FOLDER}/")]
    if not prefix and not any(_is_part(f.path) for f in inside if "/" not in f.path):
        roots = sorted({f.path.rpartition("/")[0] for f in inside if parse_shard_name(Path(f.path).name)})
        prefix = f"{roots[0]}/" if roots else ""
    name = prefix.rstrip("/").rpartition("/")[2] or top
    above = [f for f in objects if f.path.startswith(f"{EXTRA_FOLDER}/")] if not prefix else inside
    cut = len(prefix)
    found = [of_manifest(f, f"{name}/{f.path[cut:]}", tag) for f in inside if f.path.startswith(prefix)]
    found += [of_manifest(f, path, tag) for path, f in _beside(above, prefix)]
    return replace(source_of(url, access, store, name, found), tag=tag)


def _beside(above: Iterable[ManifestFile], prefix: str) -> Iterator[tuple[str, ManifestFile]]:
    """Yield the files of the folder above the shards, with their path there: those that travelled along, or
    lie there in the checkpoint; of its folders what configures an adapter.
    """
    head = prefix.rstrip("/").rpartition("/")[0] if prefix else EXTRA_FOLDER
    for file in above:
        path = file.path.removeprefix(f"{head}/") if head else file.path
        is_below = not head or path != file.path
        is_shards = bool(prefix) and file.path.startswith(prefix)
        if is_below and not is_shards and _lies_beside(path):
            yield path, file


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
    """Select from the found files those that a conversion reads.

    Raises:
        NotFoundError: there are no shards among them.
    """
    inside = [f for f in found if f.path.startswith(f"{name}/")]
    folders = sorted({f.path.split("/")[1] for f in inside if f.path.count("/") > 1})
    kept = [f for f in found if (f.path.count("/") <= 1 and _matters(f.path)) or is_state(f.path)]
    if not any(_is_part(f.path) for f in kept):
        raise NotFoundError(f"{url} holds no shards", hint="name the folder of a checkpoint")
    return RemoteSource(
        url=url, access=access, store=store, name=name, files=tuple(kept), folders=tuple(folders)
    )


def _is_part(path: str) -> bool:
    """Tell whether a file's name is that of a shard, or of a part of torch.distributed.checkpoint."""
    name = Path(path).name
    return parse_shard_name(name) is not None or name == METADATA or name.endswith(SUFFIX)


def _matters(path: str) -> bool:
    head, _, name = path.rpartition("/")
    if head and _is_part(name):
        return True
    return is_companion(name) or (not head and name in MARKS)


# --- The mirror ------------------------------------------------------------------------------------------


def make_mirror(source: RemoteSource, place_fd: int, *, companions: bool) -> None:
    """Below the open folder `place_fd`: `<name>/` with sparse shards, and small files whole where wanted.

    Raises:
        TornArchiveError, RefusedError: see `ckptd.formats.torchfile.skeleton.fill`.
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
    if companions and any(is_config(file.path) for file in source.files):
        files.create_exclusive(place_fd, MARKS[0], b"")  # the mark of a folder whose configuration counts
    wanted = [f for f in source.files if f.path not in MARKS]
    wanted = [f for f in wanted if companions or is_state(f.path) or _is_part(f.path)]
    mode = 0o666 & ~umask
    FailFastPool().run(
        PARALLEL, wanted, lambda file: _mirror(source.store, file, place_fd, mode), name="mirror"
    )


def _fetch(store: Store, file: RemoteFile, offset: int, nbytes: int) -> bytes:
    try:
        data = store.read_at(file.key, offset, nbytes)
    except FileNotFoundError as error:
        raise SourceChanged(f"{file.key} is gone from {store.url}") from error
    if len(data) != nbytes:
        raise SourceChanged(f"{file.key} in {store.url} ends before byte {offset + nbytes}")
    return data


def _mirror(store: Store, file: RemoteFile, place_fd: int, mode: int) -> None:
    def fetch(offset: int, nbytes: int) -> bytes:
        return _fetch(store, file, offset, nbytes)

    if is_state(file.path) or (is_config(file.path) and "/" in file.path):
        os.close(files.open_dir_beneath(place_fd, file.path.rpartition("/")[0], create_mode=0o700))
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = files.open_beneath(place_fd, file.path, flags, 0o600)
    try:
        os.fchmod(fd, file.mode if file.mode is not None else mode)
        os.ftruncate(fd, file.bytes)
        if parse_shard_name(Path(file.path).name):
            skeleton.fill(fd, file.path, fetch)
        elif Path(file.path).name == METADATA:
            _copy_metadata(fd, file, fetch)
        elif is_state(file.path) or file.path.endswith(SUFFIX):
            for offset, nbytes in raw_samples(file.bytes):
                write_at(fd, fetch(offset, nbytes), offset)
        elif 0 < file.bytes <= _COMPANION_LIMIT_BYTES:
            write_at(fd, fetch(0, file.bytes), 0)
    finally:
        os.close(fd)


def _copy_metadata(fd: int, file: RemoteFile, fetch: Callable[[int, int], bytes]) -> None:
    """Copy a `.metadata`, which is planned by, and compare it with its manifest.

    Raises:
        RefusedError: it is larger than planning reads. DamagedError: it is not what was committed.
    """
    if file.bytes > DEFAULT_LIMITS.pickle_bytes:
        raise RefusedError(f"{file.path} has {file.bytes} bytes, more than a .metadata may have")
    data = fetch(0, file.bytes) if file.bytes else b""
    if file.crc64 is not None and to_hex(crc64(data)) != file.crc64:
        raise DamagedError(
            f"{file.key} is not what was committed",
            hint="see `ckptd verify`, and convert an older checkpoint",
        )
    write_at(fd, data, 0)


def mirror_archives(source: RemoteSource, mirror: Path) -> None:
    """Add to the mirror of a folder of torch.distributed.checkpoint the headers of its archives.

    They are thousands in a file, and which there are a restricted child reads in the `.metadata`. Their ends
    lie beside each other, and are fetched together.

    Raises:
        as `make_mirror`; DamagedError, RefusedError: the `.metadata` cannot be read.
    """
    parts = {file.path: file for file in source.files if file.path.endswith(SUFFIX)}
    if not parts or all(Path(file.path).name != METADATA for file in source.files):
        return
    archives: dict[str, list[tuple[int, int]]] = {}
    folder = replace(list_source(mirror / source.name), partial=True)
    with tempfile.TemporaryFile() as listed:
        request = plan_request(folder, PlanOrigin(folder.path, "", ()), ConvertOptions(), block=False)
        write_plan(request | {"form": ARCHIVES}, listed)
        listed.seek(0)
        try:
            for line in listed:
                path, offset, nbytes = json.loads(line)
                archives.setdefault(f"{source.name}/{path}", []).append((int(offset), int(nbytes)))
        except (ValueError, TypeError) as error:
            raise DamagedError(f"the {METADATA} of {source.url} cannot be read") from error
    wanted = [file for path, file in parts.items() if path in archives]
    with files.opened_dir(str(mirror)) as fd:
        FailFastPool().run(
            PARALLEL,
            wanted,
            lambda file: _mirror_part(source.store, file, archives[file.path], fd),
            name="parts",
        )


def _mirror_part(store: Store, file: RemoteFile, archives: list[tuple[int, int]], place_fd: int) -> None:
    """Fetch what planning reads of the archives (offset, bytes) in one file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(files.open_beneath(place_fd, file.path, flags), "r+b") as part:
        fd = part.fileno()

        def fetch(offset: int, nbytes: int) -> bytes:
            known = bisect_right(held, (offset, file.bytes)) - 1
            if known >= 0 and offset + nbytes <= held[known][1]:
                return os.pread(fd, nbytes, offset)
            data = _fetch(store, file, offset, nbytes)
            write_at(fd, data, offset)
            return data

        inside = [(at, n) for at, n in archives if at >= 0 and n > 0 and at + n <= file.bytes]
        heads = ((at, min(n, END_BYTES)) for at, n in inside)
        tails = ((at + max(0, n - END_BYTES), min(n, END_BYTES)) for at, n in inside)
        held: list[tuple[int, int]] = []
        for begin, end in joined(chain(heads, tails)):
            for at in range(begin, end, _AT_ONCE_BYTES):
                fetch(at, min(_AT_ONCE_BYTES, end - at))
            held.append((begin, end))
        for at, nbytes in inside:
            _fill_archive(f"{file.path} at {at}", nbytes, partial(_shifted, fetch, at))


def _shifted(fetch: Callable[[int, int], bytes], by: int, offset: int, nbytes: int) -> bytes:
    return fetch(by + offset, nbytes)


def _fill_archive(name: str, nbytes: int, fetch: Callable[[int, int], bytes]) -> None:
    """Have `fetch` asked for what planning reads of one archive."""
    fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        skeleton.fill(fd, name, fetch, needs_crcs=False, is_one_of_many=True)
    finally:
        os.close(fd)


# --- Resolving a URL -------------------------------------------------------------------------------------

_POINTER_LIMIT_BYTES = 4096


def look_at(url: str, environ: Mapping[str, str]) -> RemoteSource:
    """Find the checkpoint that a URL, or the absolute path of a folder, means.

    Raises:
        NotFoundError: no shards and no `latest` there. RefusedError: in a remote of ckptd, and not committed.
        RemoteUnreachable, NotPermitted, ConfigError: it cannot be read.
    """
    url = url.rstrip("/")
    access = access_of(remote_from_arguments(url, environ))
    for root in ancestors(url)[:3]:
        if is_root(root, access, must_answer=root == url):
            inventory = read_remote_inventory("remote", root, None, access)
            return _committed(inventory, access, url[len(root) :].strip("/"))
    return _plain(url, access)


def of_copy(copy: Copy) -> RemoteSource:
    """Return a committed copy whose shards lie directly in its folder."""
    name, remote = Path(copy.view.commit.tag).name, copy.remote
    found = [of_manifest(file, f"{name}/{file.path}", copy.view.commit.tag) for file in copy.files]
    return source_of(remote.url, remote.access, remote.store, name, found)


def is_root(url: str, access: Access, *, must_answer: bool) -> bool:
    """Tell whether a remote of ckptd has its root there."""
    try:
        return open_apart(url, url, access).get(IDENTITY_KEY) is not None
    except CkptdError:
        if must_answer:
            raise
        return False


# --- Listing a folder of the remote ----------------------------------------------------------------------


def _committed(inventory: RemoteInventory, access: Access, folder: str) -> RemoteSource:
    """Return the committed ZeRO checkpoint in `folder` (its shards may lie one level deeper)."""
    zero = [view for view in inventory.commits if view.commit.form == "zero"]
    if not folder:
        if not zero:
            raise NotFoundError(f"{inventory.url} holds no committed checkpoint")
        newest = max(zero, key=lambda v: order_of(v.commit)).commit.folder
        # not what `latest` names there: a put that came late may have left it at an older one
        folder = choose_pointers(v.commit for v in zero).latest or newest
    top = folder.split("/")[0]
    view = next((v for v in zero if v.commit.folder.rstrip("/") == top), None)
    if view is None:
        known = ", ".join(v.commit.folder for v in zero[-5:]) or "none"
        hint = f"what has no COMMIT does not count; committed: {known}"
        raise RefusedError(f"{inventory.url} holds no committed checkpoint in {folder}", hint=hint)
    return of_commit(
        inventory.url,
        access,
        inventory.store,
        folder,
        view.commit.tag,
        objects_of(inventory.manifests(view.commit)).values(),
    )


def _plain(url: str, access: Access) -> RemoteSource:
    """Open any folder of shards, or one with `latest`."""
    above = ancestors(url)[1:2]
    store = open_apart(url, above[0] if above else url, access)
    head = f"{url.rpartition('/')[2]}/" if above else ""
    listed = {info.key[len(head) :]: info for info in store.list(head)}
    name = url.rpartition("/")[2]
    if not any(_is_part(key) for key in listed if "/" not in key):
        pointer = listed.get("latest")
        small = pointer is not None and pointer.bytes <= _POINTER_LIMIT_BYTES
        tag = (store.get(f"{head}latest") or b"").decode(errors="replace").strip() if small else ""
        if not tag:
            hint = "name the folder of a checkpoint"
            raise NotFoundError(f"{url} holds no shards and no `latest`", hint=hint)
        files.check_relative(tag)
        name, cut = Path(tag).name, len(tag) + 1
        found = [_of_listing(i, f"{name}/{k[cut:]}") for k, i in listed.items() if k.startswith(f"{tag}/")]
        found += [_of_listing(info, key) for key, info in listed.items() if _lies_beside(key)]
    else:
        found = [_of_listing(info, f"{name}/{key}") for key, info in listed.items()]
        found += _trainers_folder(store) if above else []
    return source_of(url, access, store, name, found)


def _trainers_folder(store: Store) -> list[RemoteFile]:
    """Files beside the folder of the shards, where a configuration and a mark lie among them."""
    if all(store.stat(mark) is None for mark in MARKS):
        return []
    found = [_of_listing(info, info.key) for info in store.list("") if _lies_beside(info.key)]
    return found if any(is_config(file.path) for file in found) else []


def _lies_beside(path: str) -> bool:
    """Tell whether a file is one of the folder above the shards, or configures an adapter there."""
    return "/" not in path or is_config(path)


def _of_listing(info: ObjectInfo, path: str) -> RemoteFile:
    return RemoteFile(path=path, key=info.key, bytes=info.bytes, mtime_ns=info.mtime_ns)
