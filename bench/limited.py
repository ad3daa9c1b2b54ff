"""A server that gives every connection the same share and no more: what one machine gets of a busy store.

A proxy on 127.0.0.1 that paces each connection in each direction by itself, and counts bytes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP_BYTES = 256 << 10


@dataclass(slots=True)
class Limited:
    """A running proxy; bytes since the last `reset`, heads of requests and answers among them."""

    port: int
    up_bytes: int = 0
    down_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Count from zero."""
        with self.lock:
            self.up_bytes = self.down_bytes = 0

    def add(self, *, up: int = 0, down: int = 0) -> None:
        """Count."""
        with self.lock:
            self.up_bytes += up
            self.down_bytes += down


@contextlib.contextmanager
def limited(target_port: int, bytes_per_second: float) -> Iterator[Limited]:
    """Before a server of this machine; each connection gets that much each way."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        made = Limited(listener.getsockname()[1])
        thread = threading.Thread(
            target=_accept, args=(listener, target_port, bytes_per_second, made), daemon=True
        )
        thread.start()
        try:
            yield made
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def _accept(listener: socket.socket, target_port: int, rate: float, made: Limited) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server = socket.create_connection(("127.0.0.1", target_port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink, is_up in ((client, server, True), (server, client, False)):
            threading.Thread(target=_pump, args=(source, sink, rate, made, is_up), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, rate: float, made: Limited, is_up: bool) -> None:
    free_at = time.monotonic()
    with contextlib.suppress(OSError):
        while data := source.recv(_STEP_BYTES):
            now = time.monotonic()
            free_at = max(now, free_at) + len(data) / rate
            if free_at - now > 0.002:
                time.sleep(free_at - now)
            sink.sendall(data)
            made.add(up=len(data) if is_up else 0, down=0 if is_up else len(data))
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
