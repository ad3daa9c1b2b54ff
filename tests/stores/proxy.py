"""A TCP proxy before an S3 server: counts requests, and makes a network that fails in chosen ways.

It forwards bytes as they are; what it knows of HTTP is the request line, and a canned answer where a test
asks for one that no server here gives (a clock that is off, a full bucket).
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_REQUEST = re.compile(rb"(?:^|\r\n)(GET|PUT|POST|HEAD|DELETE) (/[^ \r\n]*) HTTP/1\.1\r\n")
_PART = re.compile(r"^PUT (/[^?]*)\?.*partNumber=(\d+)")
_SMALL_BYTES = 1 << 14


@dataclass
class Proxy:
    """Listens on 127.0.0.1; `away`: connections are refused; `canned`: every request gets these bytes."""

    target_port: int
    away: bool = False
    hang: bool = False
    canned: bytes | None = None
    canned_for: str = ""
    """A pattern: only requests whose line matches get the canned answer."""
    flip_in: str | None = None
    """One bit of the body of the next request whose line contains this flips on its way."""
    lose_answers_to: str | None = None
    """Requests whose line contains this reach the server, their answers do not come back."""
    rewrite: Callable[[bytes], bytes] | None = None
    """Applied to each piece of both directions but large ones; must keep the length."""
    cuts: list[int] = field(default_factory=list)
    """The next connections break once that many bytes of answers came back on each."""
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def parts(self) -> Counter[tuple[str, int]]:
        """How often each part of each key was sent, as far as a request line tells."""
        found: Counter[tuple[str, int]] = Counter()
        for line in list(self.requests):
            match = _PART.match(line)
            if match:
                found[match[1], int(match[2])] += 1
        return found

    def count(self, method: str, containing: str = "") -> int:
        """Requests of a method whose path contains some text."""
        return sum(line.startswith(f"{method} ") and containing in line for line in list(self.requests))

    def cut(self) -> None:
        """Break every open connection."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.away:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target_port))
        except OSError:
            client.close()
            return
        self._open |= {client, server}
        answers_lost = threading.Event()
        flips = False
        back = threading.Thread(target=self._answers, args=(server, client, answers_lost), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                for method, path in _REQUEST.findall(data):
                    line = f"{method.decode()} {path.decode()}"
                    self.requests.append(line)
                    if self.lose_answers_to and self.lose_answers_to in line:
                        answers_lost.set()
                    if self.flip_in and self.flip_in in line:
                        flips, self.flip_in = True, None
                if flips and b"HTTP/1.1" not in data and len(data) > 1000:
                    data = data[:500] + bytes([data[500] ^ 1]) + data[501:]
                    flips = False
                data = self._rewritten(data)
                if self.hang:
                    continue
                if self.canned is not None and self._is_meant(data):
                    if _REQUEST.search(data):
                        client.sendall(self.canned)
                    continue
                server.sendall(data)
        for one in (client, server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open -= {client, server}

    def _rewritten(self, data: bytes) -> bytes:
        return self.rewrite(data) if self.rewrite is not None and len(data) < _SMALL_BYTES else data

    def _is_meant(self, data: bytes) -> bool:
        lines = [f"{method.decode()} {path.decode()}" for method, path in _REQUEST.findall(data)]
        return not self.canned_for or any(re.search(self.canned_for, line) for line in lines)

    def _answers(self, server: socket.socket, client: socket.socket, lost: threading.Event) -> None:
        done = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                done += len(data)
                if self.cuts and done > self.cuts[0]:
                    self.cuts.pop(0)
                    lost.set()
                if lost.is_set():
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(self._rewritten(data))
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(target_port: int) -> Iterator[Proxy]:
    """A proxy that ends with the test."""
    made = Proxy(target_port)
    try:
        yield made
    finally:
        made.close()


def answer(status: str, code: str, *, message: str = "", region: str = "") -> bytes:
    """An error as S3 words it, dated long ago; the connection ends after it."""
    where = f"<Region>{region}</Region>" if region else ""
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message or code}</Message>{where}</Error>"
    )
    date = "Thu, 01 Jan 2026 00:00:00 GMT"
    head = f"HTTP/1.1 {status}\r\nDate: {date}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
