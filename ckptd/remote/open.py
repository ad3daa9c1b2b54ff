"""From a URL to a store: the one place that knows which kinds of remote this version speaks to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ckptd.errors import ConfigError
from ckptd.remote.access import Access

if TYPE_CHECKING:
    from ckptd.remote.store import Store

WINDOW_BYTES = 64 << 20
_DEFAULT = Access()


def directory_path(url: str) -> Path | None:
    """The path of a directory remote (`/path` or `file:///path`); None for every other kind."""
    if url.startswith("file://"):
        parts = urlsplit(url)
        return Path(unquote(parts.path)) if parts.netloc in ("", "localhost") else None
    return Path(url) if url.startswith("/") else None


def is_s3(url: str) -> bool:
    """True for what the S3 store speaks to."""
    return url.startswith("s3://")


def open_store(
    url: str,
    *,
    access: Access = _DEFAULT,
    owner: str = "",
    read_back: bool = True,
    window_bytes: int = WINDOW_BYTES,
) -> Store:
    """The store of a remote; touches nothing yet.

    `owner` (a node id) keeps the partial uploads of two nodes apart; `window_bytes` is how much a directory
    or an SFTP server is sent between two flushes.

    Raises:
        ConfigError: a kind of URL that no installed package speaks, or a relative path.
    """
    path = directory_path(url)
    if path is not None:
        from ckptd.remote.again import tried_again
        from ckptd.remote.directory import DirectoryStore

        return tried_again(
            DirectoryStore(str(path), owner=owner, read_back=read_back, window_bytes=window_bytes)
        )
    if is_s3(url):
        from ckptd.remote.s3 import S3Store

        return S3Store(url, access, owner=owner, read_back=read_back)
    if "://" in url:
        from ckptd.remote.fsspec_open import open_files

        return open_files(url, access, owner=owner, read_back=read_back, window_bytes=window_bytes)
    msg = f"url {url!r} is no absolute path"
    raise ConfigError(msg, hint="write the whole path, e.g. /mnt/nas/llama-7b")
