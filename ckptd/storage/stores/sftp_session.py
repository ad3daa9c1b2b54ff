"""Open an SSH connection that we trust, and keep SFTP requests in flight on it.

Host keys come from known_hosts and nowhere else: a checkpoint sent to whoever answers is a checkpoint given
away. Every wait has a limit, so that a dead server is an error within a minute (docs/internals/stores.md).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import paramiko
from paramiko import sftp as wire

from ckptd.errors import (
    CkptdError,
    NotPermitted,
    RemoteNotOurs,
    RemoteUnreachable,
    StorageError,
    from_os_error,
)
from ckptd.storage.stores.access import credentials_path
from ckptd.storage.stores.fsspec_store import ConnectionLost

if TYPE_CHECKING:
    from ckptd.storage.stores.access import Access

CONNECT_SECONDS = 12
ANSWER_SECONDS = 30
_ALIVE_SECONDS = 15
_PORT = 22
_LOG = "ckptd.sftp"
_SYSTEM_HOSTS = "/etc/ssh/ssh_known_hosts"
_SILENT = ("No existing session", "SSH protocol banner", "Timeout opening channel")
"""Words by which paramiko says that time ran out."""
_STATUS = {
    wire.SFTP_NO_SUCH_FILE: errno.ENOENT,
    wire.SFTP_PERMISSION_DENIED: errno.EACCES,
    wire.SFTP_FAILURE: errno.EIO,
    wire.SFTP_OP_UNSUPPORTED: errno.ENOTSUP,
    # statuses of later drafts that some servers send
    11: errno.EEXIST,
    12: errno.EROFS,
    14: errno.ENOSPC,
    15: errno.EDQUOT,
    18: errno.ENOTEMPTY,
}


@dataclass(slots=True)
class SftpPlace:
    """Hold where a remote lies, and what all connections learned of its server."""

    url: str
    host: str
    port: int
    user: str | None
    root: str
    key_file: str | None
    is_seen: bool = False
    """The root was there: should it vanish, it is not made again (its disk is not mounted)."""
    has_links: bool = True
    has_fsync: bool = True
    has_copy: bool = True

    @property
    def login(self) -> str:
        """user@host and the port where it is not 22, as for ssh."""
        name = f"{self.user}@{self.host}" if self.user else self.host
        return name if self.port == _PORT else f"-p {self.port} {name}"


def place_of(url: str, access: Access) -> SftpPlace:
    """Read sftp://user@host:port/path and where the key lies."""
    parts = urlsplit(url)
    kind, _, rest = access.credentials.partition(":")
    return SftpPlace(
        url=url,
        host=parts.hostname or "",
        port=parts.port or _PORT,
        user=unquote(parts.username) if parts.username else None,
        root=unquote(parts.path).rstrip("/"),
        key_file=credentials_path(rest) if kind == "file" else None,
    )


class Session(paramiko.SFTPClient):  # type: ignore[misc]
    """SFTP on one channel; statuses become OSErrors that say which."""

    is_broken = False
    """A packet was cut off or did not come in time: no answer belongs to its question any more."""

    def _send_packet(self, kind: int, packet: Any) -> None:
        try:
            super()._send_packet(kind, packet)
        except BaseException:
            self.is_broken = True
            raise

    def _read_packet(self) -> tuple[int, bytes]:
        try:
            kind, data = super()._read_packet()
        except BaseException:
            self.is_broken = True
            raise
        return kind, data

    def _convert_status(self, msg: Any) -> None:
        code, text = msg.get_int(), msg.get_text()
        if code == wire.SFTP_OK:
            return
        if code == wire.SFTP_EOF:
            raise EOFError(text)
        raise OSError(_STATUS.get(code, errno.EIO), text or f"status {code}")

    def ask(self, kind: int, *words: Any) -> Any:
        """One request and its answer."""
        _, answer = self._request(kind, *words)
        return answer

    def close_file(self, handle: bytes) -> None:
        """Close a file whatever became of it; a dead server is not waited for."""
        if not self.is_broken:
            with suppress(Exception):
                self.ask(wire.CMD_CLOSE, handle)

    def extended(self, name: str, *words: Any) -> Any:
        """A request that not every server knows; OSError ENOTSUP where it does not."""
        return self.ask(wire.CMD_EXTENDED, f"{name}@openssh.com", *words)


class _KnownHostsOnly(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """Refuses a server that known_hosts does not name."""

    def __init__(self, place: SftpPlace) -> None:
        self._place = place

    def missing_host_key(self, _client: Any, hostname: str, key: Any) -> None:
        """Raise RemoteNotOurs."""
        msg = f"{self._place.url}: known_hosts does not name {hostname} (it shows {key.fingerprint})"
        raise RemoteNotOurs(
            msg, hint=f"as the user of ckptd run `ssh {self._place.login}` once and compare the fingerprint"
        )


def connect(place: SftpPlace) -> tuple[paramiko.SSHClient, Session]:
    """Connect, prove the host, log in by key.

    Raises:
        RemoteUnreachable: nothing answers in time.
        RemoteNotOurs: the host key is unknown or another one.
        NotPermitted: no key is accepted.
    """
    _silence()
    if place.key_file is not None and not os.access(place.key_file, os.R_OK):
        msg = f"{place.url}: the key file {place.key_file} is not there or cannot be read"
        raise NotPermitted(msg, hint="a private key; with systemd: LoadCredential= in the unit")
    client = paramiko.SSHClient()
    client.set_log_channel(_LOG)
    client.load_system_host_keys()
    with suppress(OSError):
        client.load_system_host_keys(_SYSTEM_HOSTS)
    client.set_missing_host_key_policy(_KnownHostsOnly(place))
    try:
        wire_socket = socket.create_connection((place.host, place.port), CONNECT_SECONDS)
        # small requests follow each other: waiting to fill a packet would cost 40 ms each
        wire_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.connect(
            place.host,
            place.port,
            username=place.user,
            key_filename=place.key_file,
            allow_agent=place.key_file is None,
            look_for_keys=place.key_file is None,
            sock=wire_socket,
            timeout=CONNECT_SECONDS,
            banner_timeout=CONNECT_SECONDS,
            auth_timeout=CONNECT_SECONDS,
            channel_timeout=CONNECT_SECONDS,
            transport_factory=_transport,
        )
        transport = client.get_transport()
        transport.set_keepalive(_ALIVE_SECONDS)
        session = Session.from_transport(transport)
        session.get_channel().settimeout(ANSWER_SECONDS)
    except CkptdError:
        client.close()
        raise
    except Exception as error:
        client.close()
        raise _refused(error, place) from error
    return client, session


def _transport(stream: socket.socket, **options: Any) -> paramiko.Transport:
    """paramiko's own, AES-GCM first: a third less time of the processor than CTR with a MAC."""
    transport = paramiko.Transport(stream, **options)
    wishes = transport.get_security_options()
    wishes.ciphers = sorted(wishes.ciphers, key=lambda name: "gcm" not in name)
    return transport


def _refused(error: Exception, place: SftpPlace) -> Exception:
    """Translate why there is no connection into the error tree."""
    where = f"{place.url}: {place.host}:{place.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        msg = f"{where} shows another host key than known_hosts has"
        return RemoteNotOurs(
            msg,
            hint="somebody is in between, or the server is new: ask its admin, then "
            f"`ssh-keygen -R` and `ssh {place.login}` once",
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        msg = f"{where}: the private key has a passphrase"
        return NotPermitted(msg, hint="add it to ssh-agent, or use a key of ckptd's own without one")
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in str(error):
        msg = f"{where} accepts no key of ours for {place.user or 'this user'}"
        return NotPermitted(
            msg, hint=f'test with `ssh {place.login}`; credentials = "file:PATH" names a private key'
        )
    if isinstance(error, socket.gaierror):
        return RemoteUnreachable(f"{where}: no such host name ({error.strerror})")
    if isinstance(error, TimeoutError) or any(words in str(error) for words in _SILENT):
        return RemoteUnreachable(f"{where} does not answer", hint="is sshd up, and is this its port?")
    if isinstance(error, OSError | EOFError | paramiko.SSHException):
        return RemoteUnreachable(f"{where}: {_words(error)}", hint="is sshd up, and SFTP allowed there?")
    return error


def explain(error: Exception, where: str, *, is_alive: bool) -> Exception:
    """Return a failed request as an error of the tree; a bug as it is."""
    if isinstance(error, TimeoutError):
        return RemoteUnreachable(f"{where}: the server gave no answer for {ANSWER_SECONDS} s")
    if isinstance(error, EOFError | paramiko.SSHException | ConnectionError) or not is_alive:
        return ConnectionLost(f"{where}: the connection was lost ({_words(error)})")
    if isinstance(error, wire.SFTPError):
        return StorageError(f"{where}: the server answers nonsense ({error})")
    if isinstance(error, UnicodeDecodeError):
        return StorageError(f"{where}: a name there is not UTF-8", hint="rename or remove it on the server")
    if isinstance(error, PermissionError):
        hint = "the files there must belong to the user that the url names"
        return NotPermitted(f"{where}: permission denied", hint=hint)
    return from_os_error(error, where) if isinstance(error, OSError) else error


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _silence() -> None:
    """paramiko logs tracebacks of its own; what matters is raised."""
    log = logging.getLogger(_LOG)
    log.addHandler(logging.NullHandler()) if not log.handlers else None
    log.propagate = False
