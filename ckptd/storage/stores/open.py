"""Open the store that a URL names: the one place that knows which kinds of remote this version speaks to."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import ckptd
from ckptd.base.names import IDENTITY_KEY
from ckptd.config.schemes import scheme_of
from ckptd.errors import ConfigError, RefusedError
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.base import WINDOW_BYTES

if TYPE_CHECKING:
    from ckptd.storage.stores.base import Store


_DEFAULT = Access()
_ASKED_AS = (
    *("client", "storage_options", "endpoint", "region", "credentials"),
    *("role_arn", "external_id", "sts_endpoint_url"),
)
"""Fields of `Access` that say which server is asked, and as whom."""


def directory_path(url: str) -> Path | None:
    """Return the path of a directory remote (`/path` or `file:///path`); None for every other kind."""
    if url.startswith("file://"):
        parts = urlsplit(url)
        return Path(unquote(parts.path)) if parts.netloc in ("", "localhost") else None
    return Path(url) if url.startswith("/") else None


def is_s3(url: str) -> bool:
    """True for what the S3 store speaks to."""
    return url.startswith("s3://")


def is_same_server(one: tuple[str, Access], other: tuple[str, Access]) -> bool:
    """Tell whether one S3 server, asked as the same user, holds both places (URL, access)."""
    (url, access), (other_url, other_access) = one, other
    is_same = all(getattr(access, key) == getattr(other_access, key) for key in _ASKED_AS)
    return is_s3(url) and is_s3(other_url) and is_same


def ancestors(url: str) -> list[str]:
    """Return the URL, or absolute path, and those above it that can be the root of a remote."""
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


def within_remote(place: str, root: str) -> RefusedError:
    """Return the error for a destination in a remote of ckptd, where nothing is made."""
    msg = f"{place} lies in the remote of ckptd {root}, which its daemons keep"
    return RefusedError(msg, hint="choose a place outside it")


def open_store(
    url: str,
    *,
    access: Access = _DEFAULT,
    owner: str = "",
    read_back: bool = True,
    window_bytes: int = WINDOW_BYTES,
) -> Store:
    """Return the store of a remote; touches nothing yet.

    `owner` (a node id) keeps the partial uploads of two nodes apart; `window_bytes` is how much a directory
    or an SFTP server is sent between two flushes.

    Raises:
        ConfigError: a kind of URL that no installed package speaks, or a relative path.
    """
    path = directory_path(url)
    if path is not None:
        from ckptd.storage.stores.directory import DirectoryStore
        from ckptd.storage.stores.retrying import tried_again

        return tried_again(
            DirectoryStore(str(path), owner=owner, read_back=read_back, window_bytes=window_bytes)
        )
    if is_s3(url):
        from ckptd.storage.stores.s3.store import S3Store

        if access.client == "s3fs" and find_spec("s3fs") is None:
            msg = f'{url}: client = "s3fs" needs a package that is not installed (s3fs)'
            raise ConfigError(msg, hint='pip install "ckptd[s3]", or leave client out')
        return S3Store(url, access, owner=owner, read_back=read_back)
    if "://" in url:
        from ckptd.storage.stores.fsspec_protocol import open_files

        return open_files(url, access, owner=owner, read_back=read_back, window_bytes=window_bytes)
    msg = f"url {url!r} is no absolute path"
    raise ConfigError(msg, hint="write the whole path, e.g. /mnt/nas/llama-7b")


# --- environment of a remote's processes -----------------------------------------------------------------
# A child gets the credentials of its own remotes alone. This is apart from the client because conversions and
# commands start such processes too.


S3_VARIABLES = ("AWS_", "FSSPEC_S3", "FSSPEC_CONFIG_DIR")
"""Beginnings of the variables that S3's clients read: the AWS chain, and fsspec's settings for s3fs."""
_PASSED_ON = ("PATH", "LANG")
FOR_SERVERS = (
    "HOME",
    "CREDENTIALS_DIRECTORY",
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_ADDED = {
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""No third-party code at start; one heap, of which large blocks are given back: it spares memory (P12)."""


def clean_environment(*urls: str) -> dict[str, str]:
    """Return the environment of a child: paths of programs and of this package, credentials of its own
    remotes.

    The usual AWS chain, ssh-agent and the drivers of fsspec read variables and files of the user, so a child
    gets those of its schemes; nothing secret passes through a message, a log or the journal.
    """
    wanted = [name for name in os.environ if name in _PASSED_ON]
    for url in urls:
        if directory_path(url) is None:
            prefixes = S3_VARIABLES if is_s3(url) else scheme_of(url).variables
            wanted += [n for n in os.environ if n.startswith(prefixes) or n in FOR_SERVERS]
    environment = _ADDED | {name: os.environ[name] for name in wanted}
    package = str(Path(ckptd.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([package, inherited] if inherited else [package])
    return environment
