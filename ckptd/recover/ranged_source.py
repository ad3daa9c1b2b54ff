"""A checkpoint in a remote as the source of a conversion: which one a URL means, and what lies there.

SRC may name a checkpoint's folder, or a folder with `latest`. Below the root of a remote of ckptd only what
is committed exists (P3), and its manifests say what every byte must be (P2).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.config import remote_from_arguments
from ckptd.convert.companions import CONFIGS, MARKS
from ckptd.core.coverage import choose_pointers, objects_of, order_of
from ckptd.core.layouts import parse_shard_name
from ckptd.errors import CkptdError, NotFoundError, RefusedError
from ckptd.recover.mirrored import RemoteFile, RemoteSource, of_commit, of_manifest, source_of
from ckptd.recover.sight import look_at_remote
from ckptd.remote.access import Access, access_of
from ckptd.remote.apart import open_apart
from ckptd.remote.documents import IDENTITY_KEY
from ckptd.remote.open import is_s3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.recover.choose import Copy
    from ckptd.recover.sight import RemoteSight
    from ckptd.remote.store import ObjectInfo, Store

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
            sight = look_at_remote("remote", root, None, access)
            return _committed(sight, access, url[len(root) :].strip("/"))
    return _plain(url, access)


def of_copy(copy: Copy) -> RemoteSource:
    """A committed copy whose shards lie directly in its folder."""
    name, remote = Path(copy.view.commit.tag).name, copy.remote
    found = [of_manifest(file, f"{name}/{file.path}", copy.view.commit.tag) for file in copy.files]
    return source_of(remote.url, remote.access, remote.store, name, found)


def ancestors(url: str) -> list[str]:
    """The URL, or absolute path, and those above it that can be the root of a remote."""
    if "://" not in url:
        return [url, *map(str, Path(url).parents)]
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    least = 2 if is_s3(url) else 1
    return [f"{scheme}://{'/'.join(parts[:n])}" for n in range(len(parts), least - 1, -1)]


def directory_remote(folder: Path) -> str | None:
    """The root of the directory remote that a folder, there or yet to be made, lies in; None: in none."""
    roots = ancestors(os.path.realpath(folder))[:4]
    return next((root for root in roots if os.path.lexists(os.path.join(root, IDENTITY_KEY))), None)


def is_root(url: str, access: Access, *, must_answer: bool) -> bool:
    """True when a remote of ckptd has its root there."""
    try:
        return open_apart(url, url, access).get(IDENTITY_KEY) is not None
    except CkptdError:
        if must_answer:
            raise
        return False


# --- what lies there -------------------------------------------------------------------------------------


def _committed(sight: RemoteSight, access: Access, folder: str) -> RemoteSource:
    """The committed ZeRO checkpoint in `folder` (its shards may lie one level deeper)."""
    zero = [view for view in sight.commits if view.commit.form == "zero"]
    if not folder:
        if not zero:
            raise NotFoundError(f"{sight.url} holds no committed checkpoint")
        newest = max(zero, key=lambda v: order_of(v.commit)).commit.folder
        # not what `latest` names there: a put that came late may have left it at an older one
        folder = choose_pointers(v.commit for v in zero).latest or newest
    top = folder.split("/")[0]
    view = next((v for v in zero if v.commit.folder.rstrip("/") == top), None)
    if view is None:
        known = ", ".join(v.commit.folder for v in zero[-5:]) or "none"
        hint = f"what has no COMMIT does not count; committed: {known}"
        raise RefusedError(f"{sight.url} holds no committed checkpoint in {folder}", hint=hint)
    return of_commit(
        sight.url,
        access,
        sight.store,
        folder,
        view.commit.tag,
        objects_of(sight.manifests(view.commit)).values(),
    )


def _plain(url: str, access: Access) -> RemoteSource:
    """Any folder of shards, or one with `latest`."""
    above = ancestors(url)[1:2]
    store = open_apart(url, above[0] if above else url, access)
    head = f"{url.rpartition('/')[2]}/" if above else ""
    listed = {info.key[len(head) :]: info for info in store.list(head)}
    name = url.rpartition("/")[2]
    if not any(parse_shard_name(key) for key in listed):
        pointer = listed.get("latest")
        small = pointer is not None and pointer.bytes <= _POINTER_LIMIT_BYTES
        tag = (store.get(f"{head}latest") or b"").decode(errors="replace").strip() if small else ""
        if not tag:
            hint = "name the folder of a checkpoint"
            raise NotFoundError(f"{url} holds no shards and no `latest`", hint=hint)
        files.check_relative(tag)
        name, cut = Path(tag).name, len(tag) + 1
        found = [_of_listing(i, f"{name}/{k[cut:]}") for k, i in listed.items() if k.startswith(f"{tag}/")]
        found += [_of_listing(info, key) for key, info in listed.items() if "/" not in key]
    else:
        found = [_of_listing(info, f"{name}/{key}") for key, info in listed.items()]
        found += _trainers_folder(store) if above else []
    return source_of(url, access, store, name, found)


def _trainers_folder(store: Store) -> list[RemoteFile]:
    """Files beside the folder of the shards, where a configuration and a mark lie among them."""
    if all(store.stat(name) is None for name in CONFIGS) or all(store.stat(mark) is None for mark in MARKS):
        return []
    return [_of_listing(info, info.key) for info in store.list("") if "/" not in info.key]


def _of_listing(info: ObjectInfo, path: str) -> RemoteFile:
    return RemoteFile(path=path, key=info.key, bytes=info.bytes, mtime_ns=info.mtime_ns)
