"""Words from the trainer: "I have just saved", as a datagram that says no more than "look now" (ADR 0109).

File events tell the same, but not everywhere: none where the inotify limits are used up, none from other
machines or sandboxes. An abstract socket is no file: nothing is written, no rights are needed, nothing is
left behind, and the containers of a pod share it. What a datagram holds is never read, nothing decided by it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """A socket of that name which says who sends to it."""
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
