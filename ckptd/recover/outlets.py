"""Whether what ckptd.toml names beside the jobs can be used: who is told ([notify]), where metrics go.

An alarm that nobody hears is found out when it was needed. Nothing is sent and no program is run here.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError, ConfigError, NotPermitted, from_os_error
from ckptd.local.probe import Finding, failed
from ckptd.remote.access import credentials_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.config_model import DaemonConfig

_PROGRAMS = ("command", "on_complete", "on_committed", "on_converted", "on_pruned", "on_problem")
_URL_LIMIT_BYTES = 4096


def check_outlets(daemon: DaemonConfig, *, writes: bool) -> Iterator[Finding]:
    """A finding for each place, program and page that is set; with `writes` a port is opened for a moment."""
    notify = daemon.notify
    for key, place in (("webhook", notify.webhook), ("heartbeat", notify.heartbeat)):
        if place is not None and place.startswith("file:"):
            yield _url_in(key, place.removeprefix("file:"))
    for key in _PROGRAMS:
        argv: tuple[str, ...] = getattr(notify, key)
        if argv:
            yield _program(key, argv[0])
    if daemon.metrics is not None:
        yield _folder(daemon.metrics) if daemon.metrics.startswith("/") else _port(daemon.metrics, writes)


def _url_in(key: str, given: str) -> Finding:
    """The URL is a secret: it is looked at and never shown (P15)."""
    if not given.startswith("/") and not os.environ.get("CREDENTIALS_DIRECTORY"):
        return Finding(
            what=key, verdict="note", text=f"{given} is a credential that systemd gives the service"
        )
    try:
        path = credentials_path(given)
        with open(path, "rb") as source:
            is_url = source.read(_URL_LIMIT_BYTES).strip().startswith((b"http://", b"https://"))
    except CkptdError as error:
        return failed(key, error)
    except OSError as error:
        return failed(key, _wrong(error, f"reading {error.filename}"))
    if not is_url:
        return failed(key, ConfigError(f"{path} holds no URL", hint="one line: https://…"))
    return Finding(what=key, verdict="ok", text=f"{path} holds a URL (nothing was sent)")


def _program(key: str, path: str) -> Finding:
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return failed(key, _wrong(error, f"looking at {path}"))
    if not is_file or not os.access(path, os.X_OK, effective_ids=True):
        return failed(key, NotPermitted(f"{path} cannot be run", hint=f"chmod +x {path}, or correct {key}"))
    return Finding(what=key, verdict="ok", text=f"{path} can be run (it was not)")


def _folder(path: str) -> Finding:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return failed("metrics", ConfigError(f"{folder} is no directory", hint="make it, or correct metrics"))
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        hint = "let the user that ckptd runs as write there"
        return failed("metrics", NotPermitted(f"{folder} cannot be written", hint=hint))
    return Finding(what="metrics", verdict="ok", text=f"{folder} can be written")


def _port(where: str, writes: bool) -> Finding:
    if not writes:
        return Finding(what="metrics", verdict="note", text=f"{where}: not tried (--no-probe)")
    host, _, port = where.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            one.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"{where} is in use: by the daemon itself, if it runs"
            return Finding(what="metrics", verdict="note", text=text)
        return failed("metrics", _wrong(error, f"opening {where}"))
    return Finding(what="metrics", verdict="ok", text=f"{where} can be opened")


def _wrong(error: OSError, what: str) -> CkptdError:
    """What is not there is a wrong name in the file."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | socket.gaierror):
        return ConfigError(f"{what}: {error.strerror}", hint="make it, or correct ckptd.toml")
    wrong = from_os_error(error, what)
    wrong.hint = "let the user that ckptd runs as use it" if isinstance(wrong, NotPermitted) else wrong.hint
    return wrong
