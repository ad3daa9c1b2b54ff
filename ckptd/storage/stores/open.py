"""Describe how a remote is reached, and open the store that its URL names.

This is the one place that knows which kinds of remote this version speaks to. Nothing in `Access` is a
secret: `credentials` names where they lie, the usual chain of the environment, a profile, or a file that
systemd's LoadCredential put there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote_plus, unquote, urlsplit

import ckptd
from ckptd.base.identity import Model
from ckptd.config.schemes import scheme_of
from ckptd.errors import ConfigError, NotPermitted
from ckptd.storage.stores.base import WINDOW_BYTES

if TYPE_CHECKING:
    from ckptd.config.schema import RemoteConfig
    from ckptd.storage.stores.base import Store


_CREDENTIALS_VARIABLE = "$CREDENTIALS_DIRECTORY"


class Access(Model):
    """Keys of `[[remote]]` that only object stores and servers need; their own defaults otherwise."""

    endpoint_url: str | None = None
    region: str | None = None
    credentials: str = "env"
    """env | profile:NAME | file:PATH."""
    part_size_bytes: int | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    role_arn: str | None = None
    external_id: str | None = None
    sts_endpoint_url: str | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    storage_class: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    sign_payload: bool | None = None
    verify: Literal["auto", "read-back", "none"] = "auto"
    """read-back: ETags are not looked at, what no checksum proves is read again."""

    @property
    def for_documents(self) -> dict[str, str]:
        """Return the arguments of each S3 request that begins one of our documents: encryption and tags.

        No storage class: they are small, read at every look and replaced or removed early, all of which the
        classes for rare access charge for.
        """
        given = {
            "ServerSideEncryption": self.sse,
            "SSEKMSKeyId": self.sse_kms_key_id,
            "Tagging": "&".join(f"{quote_plus(k)}={quote_plus(v)}" for k, v in self.tags),
        }
        return {name: value for name, value in given.items() if value}

    @property
    def for_data(self) -> dict[str, str]:
        """Return the arguments of each S3 request that begins an object of a checkpoint."""
        storage_class = {"StorageClass": self.storage_class} if self.storage_class else {}
        return self.for_documents | storage_class

    @property
    def endpoint(self) -> str | None:
        """Return the S3 server's URL; None: AWS, over TLS."""
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        return self.endpoint_url or next(filter(None, map(os.environ.get, names)), None)

    @property
    def is_tls(self) -> bool:
        """Whether the server is authenticated and nobody on the way can change a byte."""
        return self.endpoint is None or self.endpoint.startswith("https://")

    @property
    def signs_payload(self) -> bool:
        """Whether bodies are signed: by default where neither TLS nor this machine alone carries them."""
        if self.sign_payload is not None:
            return self.sign_payload
        host = urlsplit(self.endpoint or "").hostname or ""
        is_here = host in ("localhost", "::1") or host.endswith(".localhost") or host.startswith("127.")
        return not self.is_tls and not is_here

    def shown(self) -> tuple[tuple[str, str], ...]:
        """Key → value of what is set, in words, for `ckptd check`."""
        given: dict[str, str | None] = {
            "endpoint_url": self.endpoint_url,
            "region": self.region,
            "addressing": None if self.addressing == "auto" else self.addressing,
            "credentials": self.credentials,
            "role_arn": self.role_arn,
            "external_id": self.external_id,
            "sts_endpoint_url": self.sts_endpoint_url,
            "sse": self.sse,
            "sse_kms_key_id": self.sse_kms_key_id,
            "storage_class": self.storage_class and f"{self.storage_class}; documents in the default class",
            "tags": ", ".join(f"{k}={v}" for k, v in self.tags) or None,
            "sign_payload": None if self.sign_payload is None else str(self.sign_payload).lower(),
        }
        return tuple((name, value) for name, value in given.items() if value)


def access_of(remote: RemoteConfig) -> Access:
    """Return how a remote is reached, as its job file says."""
    return Access.model_validate({name: getattr(remote, name) for name in Access.model_fields})


def credentials_path(given: str) -> str:
    """Return the path of the file that `credentials = "file:GIVEN"` names; a bare name is a systemd
    credential.

    Raises:
        NotPermitted: a name, and no unit gave this process credentials.
    """
    if given.startswith("/"):
        return os.path.expandvars(given)
    name = given.removeprefix(f"{_CREDENTIALS_VARIABLE}/")
    place = os.environ.get(_CREDENTIALS_VARIABLE[1:])
    if not place:
        msg = f'credentials = "file:{given}" is a name in {_CREDENTIALS_VARIABLE}, which is not set here'
        raise NotPermitted(
            msg, hint=f"systemd sets it: LoadCredential={name}:PATH in the unit; by hand, set it to a folder"
        )
    return os.path.join(place, name)


_DEFAULT = Access()


def directory_path(url: str) -> Path | None:
    """Return the path of a directory remote (`/path` or `file:///path`); None for every other kind."""
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

        return S3Store(url, access, owner=owner, read_back=read_back)
    if "://" in url:
        from ckptd.storage.stores.fsspec_protocol import open_files

        return open_files(url, access, owner=owner, read_back=read_back, window_bytes=window_bytes)
    msg = f"url {url!r} is no absolute path"
    raise ConfigError(msg, hint="write the whole path, e.g. /mnt/nas/llama-7b")


# --- environment of a remote's processes -----------------------------------------------------------------
# A child gets the credentials of its own remotes alone. This is apart from the client because conversions and
# commands start such processes too.


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
            prefixes = ("AWS_",) if is_s3(url) else scheme_of(url).variables
            wanted += [n for n in os.environ if n.startswith(prefixes) or n in FOR_SERVERS]
    environment = _ADDED | {name: os.environ[name] for name in wanted}
    package = str(Path(ckptd.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([package, inherited] if inherited else [package])
    return environment
