"""Speak to any service that an installed driver of fsspec knows (gs://, abfs://, hf:// …), as a drive.

Objects appear whole when their upload is completed, so there are no temporaries and no folders. Caches of
instances and of listings are off: what another node wrote a moment ago must be seen.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ckptd.config.schemes import scheme_of, url_fault
from ckptd.errors import CkptdError, ConfigError, NotPermitted, RemoteUnreachable, StorageError, from_os_error
from ckptd.storage.stores.access import credentials_path
from ckptd.storage.stores.base import WINDOW_BYTES, Abilities
from ckptd.storage.stores.fsspec_store import CONNECTIONS, Entry, FilesStore, quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.storage.stores.access import Access
    from ckptd.storage.stores.fsspec_store import FileConnection, Rights

_BLOCK_BYTES = 8 << 20
_BUGS = (TypeError, AttributeError, NameError, AssertionError)
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "last_commit", "created")
_UNANSWERED = ("Timeout", "Connect", "ServerDisconnected", "ClientOS", "IncompleteRead", "ProtocolError")
_UNTRUSTED = ("Credential", "Authentication", "Unauthorized", "RefreshError", "LocalTokenNotFound")


def connection(url: str, access: Access) -> tuple[Callable[[], FsspecConnection], str]:
    """Return how to connect to a URL, and the path of its root in the driver's words.

    Raises:
        ConfigError: the driver is not installed, or takes no such credentials.
    """
    from fsspec import get_filesystem_class

    scheme, known = urlsplit(url).scheme, scheme_of(url)
    try:
        driver: Any = get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise missing(url, error) from error
    options = dict(driver._get_kwargs_from_urls(url))
    kind, _, rest = access.credentials.partition(":")
    if kind == "file" and known.takes_key_file:
        options["token"] = credentials_path(rest)
    elif kind != "env":
        msg = f'credentials = "{access.credentials}" means nothing to {scheme}://'
        raise ConfigError(msg, hint='its driver looks for credentials itself: credentials = "env"')

    def connect() -> FsspecConnection:
        try:
            fs = driver(**options, skip_instance_cache=True, use_listings_cache=False)
        except Exception as error:
            raise explain(error, f"{url}: connecting") from error
        return FsspecConnection(url, fs, is_create_only=known.creates_only)

    return connect, str(driver._strip_protocol(url))


class FsspecConnection:
    """A driver's file system; `is_create_only`: it sends a condition that the service heeds."""

    is_usable = True

    def __init__(self, url: str, fs: Any, *, is_create_only: bool) -> None:
        self._url = url
        self._fs = fs
        self._is_create_only = is_create_only

    def find_entry(self, path: str) -> Entry | None:
        """Return an object; None when absent."""
        try:
            found = self._fs.info(path)
        except FileNotFoundError:
            return None
        return None if found["type"] != "file" else _entry(found)

    def entries(self, folder: str) -> list[Entry]:
        """Return the objects and prefixes right below; marks of consoles are left out."""
        try:
            found = self._fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        here = folder.strip("/")
        return [
            _entry(entry)
            for entry in found
            if entry["name"].strip("/") != here
            and (entry["type"] == "directory" or not entry["name"].endswith("/"))
        ]

    def get(self, path: str) -> bytes | None:
        """Read an object, whole."""
        try:
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None

    @contextmanager
    def reading(self, path: str) -> Iterator[_Reader]:
        """Open for ranges."""
        size = int(self._fs.info(path)["size"])
        yield _Reader(self._fs, path, size)

    def put(self, path: str, data: bytes) -> None:
        """Write an object by one request."""
        self._fs.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Create with the driver's condition; without one look before and read again after."""
        if self.find_entry(path) is not None:
            return False
        if not self._is_create_only:
            self._fs.pipe_file(path, data)
            return self.get(path) == data
        try:
            self._fs.pipe_file(path, data, mode="create")
        except Exception as error:
            if isinstance(error, _BUGS) or (
                not isinstance(error, FileExistsError) and self.find_entry(path) is None
            ):
                raise
            return False
        return True

    def sink(self, path: str, partial: str, rights: Rights, resume_bytes: int) -> tuple[_Sink, int]:
        """Begin an upload; an unfinished one cannot be gone on with."""
        del partial, rights, resume_bytes
        mode = "xb" if self._is_create_only else "wb"
        return _Sink(self._fs, self._fs.open(path, mode, block_size=_BLOCK_BYTES, autocommit=False)), 0

    def remove(self, path: str) -> None:
        """Remove an object."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def remove_folder(self, path: str) -> bool:
        """Do nothing: a prefix is no folder."""
        del path
        return False

    def free_bytes(self, path: str) -> int | None:
        """Return None: services do not tell."""
        del path
        return None

    def disk(self, path: str) -> str:
        """Return nothing: services do not tell."""
        del path
        return ""

    def probe(self, path: str) -> Abilities:
        """Create twice, replace, remove."""
        try:
            kept = self.create(path, b"1")
            if self._is_create_only:
                with suppress(FileExistsError, OSError):
                    self._fs.pipe_file(path, b"2", mode="create")
                kept = kept and self.get(path) == b"1"
            self.put(path, b"3")
            if self.get(path) != b"3":
                msg = f"{self._url} does not give back what was written to it"
                raise StorageError(msg, hint="the service lies; do not trust it with checkpoints")
        finally:
            quietly(lambda: self.remove(path))
        notes = ["uploads that were cut short start over, each is read back"]
        self._is_create_only = self._is_create_only and kept
        if not self._is_create_only:
            notes.append("nothing is create-only: one writing node only, each creation is read again")
        return Abilities(create_only=self._is_create_only, checksum=None, resumable=False, notes=tuple(notes))

    def explain(self, error: Exception, what: str) -> Exception:
        """Translate an exception into the error tree."""
        return explain(error, f"{self._url}: {what}")

    def close(self) -> None:
        """Do nothing: drivers end their connections themselves."""


class _Reader:
    def __init__(self, fs: Any, path: str, size_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._size_bytes = size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Read a range by one request."""
        end = min(offset + length, self._size_bytes)
        return bytes(self._fs.cat_file(self._path, start=offset, end=end)) if end > offset else b""


class _Sink:
    def __init__(self, fs: Any, file: Any) -> None:
        self._fs = fs
        self._file = file
        # the driver would complete it with its next transaction
        with suppress(ValueError):
            fs.transaction.files.remove(file)

    def write(self, data: memoryview) -> None:
        """Append; sent in blocks."""
        self._file.write(data)

    def copy(self, path: str, offset: int, length: int) -> bool:  # noqa: ARG002
        """Return False: services copy whole objects alone."""
        return False

    def flush(self) -> bool:
        """Return False: nothing is durable before the end."""
        return False

    def finish(self) -> bool:
        """Complete the upload."""
        try:
            self._file.close()
            self._file.commit()
        except FileExistsError:
            return False
        return True

    def abandon(self) -> None:
        """Give up; a file that is only dropped would complete itself."""
        quietly(self._file.discard)
        self._file.closed = True


def _entry(found: dict[str, Any]) -> Entry:
    """Return an entry of a driver's listing."""
    times = [found[key] for key in _MODIFIED if found.get(key) is not None]
    time = times[0] if times else 0
    seconds = time.timestamp() if isinstance(time, datetime) else time
    return Entry(
        name=found["name"].rstrip("/").rpartition("/")[2],
        is_folder=found["type"] == "directory",
        bytes=int(found["size"] or 0),
        mtime_ns=int(seconds * 1e9) if isinstance(seconds, int | float) else 0,
    )


def explain(error: Exception, where: str) -> Exception:
    """Translate an exception of a driver by its status, its class or its words; return a bug as it is."""
    if isinstance(error, (CkptdError, *_BUGS)):
        return error
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    text = f"{where}: {_words(error)}"
    status = _status(error)
    if status in (401, 403) or isinstance(error, PermissionError) or any(w in kinds for w in _UNTRUSTED):
        return NotPermitted(text, hint="the driver of fsspec found no credentials that may do this")
    if isinstance(error, TimeoutError | ConnectionError) or any(w in kinds for w in _UNANSWERED):
        return RemoteUnreachable(text)
    if status == 429 or status >= 500:
        return RemoteUnreachable(text, hint="the service is busy; ckptd tries again by itself")
    if isinstance(error, OSError) and error.errno:
        return from_os_error(error, where)
    return StorageError(text)


def _status(error: Exception) -> int:
    """Return the HTTP status, however the driver hides it; 0 when there is none."""
    holders = (error, getattr(error, "response", None), error.__cause__)
    for holder in holders:
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and str(value).isdigit():
                return int(value)
    return 0


def _words(error: Exception) -> str:
    """Return an error's message without the query of a URL, which may sign a request."""
    text = re.sub(r"\?\S+", "?…", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[0][:200]


# --- drivers ---------------------------------------------------------------------------------------------
# Nothing is imported before a remote needs it; a package that is missing is named with the command that
# installs it (docs/internals/stores.md).

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
    """Return the store of a URL; connects when it is first used.

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

    connect, root = connection(url, access)
    return FilesStore(
        url, root, connect, owner=owner, read_back=read_back, window_bytes=window_bytes, lanes=_SERVICE_LANES
    )


def _sftp(url: str, access: Access, *, owner: str, read_back: bool, window_bytes: int) -> FilesStore:
    try:
        from ckptd.storage.stores.sftp import SftpConnection
        from ckptd.storage.stores.sftp_session import place_of
    except ImportError as error:
        raise missing(url, error) from error
    place = place_of(url, access)

    def connect() -> FileConnection:
        return SftpConnection(place)

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
    """Return the error that names the package to install for a URL."""
    scheme, package = urlsplit(url).scheme, scheme_of(url).package
    name = getattr(error, "name", None)
    msg = f"{scheme}:// needs a package that is not installed ({name or error})"
    return ConfigError(msg, hint=f'pip install "{package}"' if package else "install the driver of fsspec")


def _shown(url: str) -> str:
    """Return a URL for a message, without what may be secret in it."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return unquote(parts._replace(netloc=host, query="", fragment="").geturl())
