"""The only way from ckptd to the quickstart's S3 server: a door that can be shut, as networks do.

It forwards bytes as they are and knows nothing of HTTP. While it is shut, open connections break and new ones
are reset; what the server holds stays, and whoever goes to the server directly sees it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Self

PIECE_BYTES = 1 << 16
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset."""


class Gate:
    """Listens on a port of 127.0.0.1; a context manager."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_shut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.shut()

    def shut(self) -> None:
        """Break every connection, and let none through."""
        with self._lock:
            self._is_shut = True
            broken = list(self._open)
        for one in broken:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def reopen(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._is_shut = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            with self._lock:
                if self._is_shut:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return
                self._open.add(client)
            try:
                with socket.create_connection(("127.0.0.1", self._server_port)) as server:
                    back = threading.Thread(target=_forward, args=(server, client), daemon=True)
                    back.start()
                    _forward(client, server)
                    back.join()
            finally:
                with self._lock:
                    self._open.discard(client)


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Until `source` ends; then `target` hears that nothing more comes."""
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
