"""Watch save_dir by inotify, as a hint only: something moved there, so scan sooner (docs/design.md §3).

Watches are not recursive. An event that is lost (queue overflow, network file system, watch limit) costs at
most one rescan interval; nothing is ever decided from an event. Trainers may send hints themselves (`Hints`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

from ckptd.core.model.listing import OURS
from ckptd.storage.local.state_dir import filesystem_type, is_network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from watchdog.observers.api import ObservedWatch


# --- hints from the trainer ------------------------------------------------------------------------------
# The trainer says "I have just saved" in a datagram that means no more than "look now". File
# events tell the same, but not everywhere: none where the inotify limits are used up, none from other
# machines or sandboxes. An abstract socket is no file: nothing is written, no rights are needed, nothing is
# left behind, and the containers of a pod share it. The content of a datagram is never read, nothing decided
# by it.

log = logging.getLogger("ckptd.hints")

PAUSE_SECONDS = 0.2
"""After each hint: who sends thousands is heard five times a second."""
_CREDENTIALS = struct.Struct("3i")


def address_of(save_dir_fd_or_path: int | str) -> bytes:
    """Name of the socket for a save_dir: by device and inode, so that each path and mount of it is one.

    Raises:
        OSError: it is not there.
    """
    status = os.stat(save_dir_fd_or_path)
    return f"\0ckptd/saved/{status.st_dev:x}/{status.st_ino:x}".encode()


class Hints:
    """Hears hints about one save_dir; calls `on_hint` from its own thread."""

    def __init__(self, save_dir: str, on_hint: Callable[[], None]) -> None:
        self._save_dir = save_dir
        self._on_hint = on_hint
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begin to listen; where that cannot be, file events and rescans do the work."""
        try:
            made = _bound(address_of(self._save_dir))
        except OSError as error:
            log.info("no hints from the trainer of %s (%s)", self._save_dir, error.strerror)
            return
        self._socket = made
        self._thread = threading.Thread(target=self._listen, args=(made,), name="hints", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give the name back."""
        self._is_over.set()
        if self._socket is None or self._thread is None:
            return
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=2)
        self._socket.close()
        self._socket = None

    def _listen(self, heard: socket.socket) -> None:
        trusted = {0, os.geteuid()}
        while not self._is_over.is_set():
            try:
                _, ancillary, _, _ = heard.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return
            if not self._is_over.is_set() and _sender(ancillary) in trusted:
                log.debug("a hint from the trainer of %s", self._save_dir)
                self._on_hint()
                self._is_over.wait(PAUSE_SECONDS)


def _bound(address: bytes) -> socket.socket:
    """Return a socket of that name which says who sends to it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """User id of whoever sent a datagram, as the kernel vouches for it."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(data)[1])
    return None


# --- file events -----------------------------------------------------------------------------------------

_MEANT: list[type[FileSystemEvent]] = [
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]
"""Reading a file or a folder, as our own scans do, is no hint."""
_FOLDER_CAME = (DirCreatedEvent, DirMovedEvent)
_WRITES = (FileCreatedEvent, FileModifiedEvent, FileMovedEvent, FileClosedEvent)
"""In a folder of save_dir: what lies beside them (a log of each step) is no save."""


class OnHint(Protocol):
    """`is_writing`: a save may be under way."""

    def __call__(self, *, is_writing: bool = False) -> None:
        """Called in the watcher's threads."""


class Watcher:
    """Watches save_dir and its unfinished tag folders; calls `on_hint` from its own thread.

    It says whether something is written in a folder, or a folder came: a save may begin.
    """

    def __init__(self, save_dir: str, on_hint: OnHint) -> None:
        self._save_dir = save_dir
        self._gone: set[str] = set()
        """Paths of folders that went; what has such a name now is another one, which no watch is on."""
        self._handler = _Handler(save_dir, on_hint, self._gone.add)
        self._hints = Hints(save_dir, on_hint)
        self._observer = Observer()
        self._observer.daemon = True
        self._watches: dict[str, ObservedWatch] = {}
        self.problem: str | None = None
        """Reason why file events do not arrive (rescans still do the work)."""
        self._is_shared = is_network(filesystem_type(Path(save_dir)))

    def start(self) -> None:
        """Begin with save_dir itself."""
        self._hints.start()
        try:
            self._observer.start()
            self._schedule(self._save_dir)
        except OSError as error:
            self.problem = f"no file events ({error.strerror}); rescans find everything"

    @property
    def hears_all(self) -> bool:
        """No new folder appears without a hint: on a shared file system other nodes' would."""
        return self.problem is None and not self._is_shared

    def follow(self, folders: Iterable[str]) -> None:
        """Watch exactly these folders below save_dir beside save_dir itself."""
        wanted = set(folders)
        heard = self._gone.copy()
        self._gone.difference_update(heard)
        gone = {name for name in self._watches if f"{self._save_dir}/{name}" in heard}
        for name in (set(self._watches) - wanted) | gone:
            with contextlib.suppress(KeyError, OSError):
                self._observer.unschedule(self._watches.pop(name))
        for name in wanted - set(self._watches):
            try:
                watch = self._schedule(f"{self._save_dir}/{name}")
            except FileNotFoundError:
                continue
            except OSError as error:
                self.problem = f"no file events for {name} ({error.strerror}); rescans find everything"
            else:
                self._watches[name] = watch

    def _schedule(self, path: str) -> ObservedWatch:
        return self._observer.schedule(self._handler, path, recursive=False, event_filter=_MEANT)

    def stop(self) -> None:
        """End the threads."""
        self._hints.stop()
        with contextlib.suppress(RuntimeError):
            self._observer.stop()
            self._observer.join(timeout=2)


class _Handler(FileSystemEventHandler):
    def __init__(self, save_dir: str, on_hint: OnHint, on_gone: Callable[[str], None]) -> None:
        self._save_dir = save_dir
        self._ours = f"{save_dir}/{OURS}"
        self._on_gone = on_gone
        self._on_hint = on_hint

    def on_any_event(self, event: FileSystemEvent) -> None:
        path = os.fsdecode(event.src_path)
        if path.startswith(self._ours):
            return
        if isinstance(event, DirDeletedEvent | DirMovedEvent):
            self._on_gone(path)
        is_below = os.path.dirname(path) != self._save_dir
        self._on_hint(is_writing=isinstance(event, _FOLDER_CAME) or (is_below and isinstance(event, _WRITES)))
