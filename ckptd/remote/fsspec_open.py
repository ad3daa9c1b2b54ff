"""From a URL that is neither a path nor s3:// to its store: which package speaks it, and is it installed.

Nothing is imported before a remote needs it; a package that is missing is named with the command that brings
it (docs/adr/0042).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ckptd.config_schemes import scheme_of, url_fault
from ckptd.errors import ConfigError
from ckptd.remote.drive import CONNECTIONS
from ckptd.remote.fsspec_store import WINDOW_BYTES, FilesStore

if TYPE_CHECKING:
    from ckptd.remote.access import Access
    from ckptd.remote.drive import Drive

_SSH = ("sftp", "ssh")
_SERVICE_LANES = 3
"""A driver of fsspec holds one or two blocks of 8 MiB per object."""


def open_files(
    url: str,
    access: Access,
    *,
    owner: str = "",
    read_back: bool = True,
    window_bytes: int = WINDOW_BYTES,
) -> FilesStore:
    """The store of a URL; connects when it is first used.

    Raises:
        ConfigError: a scheme that no installed package speaks, or a URL that cannot be a remote.
    """
    parts = urlsplit(url)
    fault = "a secret does not belong in a URL" if parts.password is not None else url_fault(parts)
    if fault is not None:
        msg = f"url {_shown(url)!r}: {fault}"
        raise ConfigError(msg, hint="see url in `ckptd init`")
    if parts.scheme in _SSH:
        return _sftp(url, access, owner=owner, read_back=read_back, window_bytes=window_bytes)
    from ckptd.remote.fsspec_drive import connection

    connect, root = connection(url, access)
    return FilesStore(
        url, root, connect, owner=owner, read_back=read_back, window_bytes=window_bytes, lanes=_SERVICE_LANES
    )


def _sftp(url: str, access: Access, *, owner: str, read_back: bool, window_bytes: int) -> FilesStore:
    try:
        from ckptd.remote.sftp import SftpDrive
        from ckptd.remote.sftp_session import place_of
    except ImportError as error:
        raise missing(url, error) from error
    place = place_of(url, access)

    def connect() -> Drive:
        return SftpDrive(place)

    return FilesStore(
        url,
        place.root,
        connect,
        owner=owner,
        read_back=read_back,
        window_bytes=window_bytes,
        lanes=CONNECTIONS - 2,
    )


def missing(url: str, error: Exception) -> ConfigError:
    """What to install for a URL."""
    scheme, package = urlsplit(url).scheme, scheme_of(url).package
    name = getattr(error, "name", None)
    msg = f"{scheme}:// needs a package that is not installed ({name or error})"
    return ConfigError(msg, hint=f'pip install "{package}"' if package else "install the driver of fsspec")


def _shown(url: str) -> str:
    """A URL for a message, without what may be secret in it."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return unquote(parts._replace(netloc=host, query="", fragment="").geturl())
