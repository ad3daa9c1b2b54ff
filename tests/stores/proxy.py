"""A proxy before a real server: counts what is sent, and makes networks and servers that fail as chosen.

It forwards bytes as they are. It knows just enough of HTTP to tell requests, bodies and answers apart, so a
fault hits the request that is meant; before other servers the faults of connections alone work.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from tests.stores.proxy_http import Piece, Requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PART = re.compile(r"^PUT (/[^?]*)\?.*partNumber=(\d+)")
_CHUNK_BYTES = 1 << 16
_SMALL_BYTES = 1 << 14
_TICK_SECONDS = 0.02

Kind = Literal[
    "cut", "stall", "deaf", "busy", "lose-answer", "flip-up", "flip-down", "forget", "drip", "answer"
]

_COUNTING = threading.Lock()


@dataclass
class Fault:
    """What happens to the next `times` requests whose line contains a match of `where`.

    cut: the connection is reset after `after_bytes` of the body. stall: from there on nothing is read and
    nothing answered. deaf: all is taken, nothing answered. busy: 503 SlowDown with Retry-After. lose-answer:
    the server does it, its answer is lost. flip-up, flip-down: one bit of the body or of the answer flips.
    forget: 200, and the server never heard of it. drip: `bytes_per_second` of the body. answer: `answer`
    instead of the server's.
    """

    kind: Kind
    where: str
    times: int = 1
    after_bytes: int = 0
    answer: bytes = b""
    bytes_per_second: int = 0
    hits: int = 0

    def takes(self, line: str) -> bool:
        """Whether this request is meant; counts it."""
        with _COUNTING:  # requests that come at once
            if self.hits >= self.times or re.search(self.where, line) is None:
                return False
            self.hits += 1
            return True


_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>.</Message></Error>"
SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nRetry-After: 1\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)
FORGOTTEN = b'HTTP/1.1 200 OK\r\nETag: "0123456789abcdef0123456789abcdef"\r\nContent-Length: 0\r\n\r\n'


@dataclass
class Proxy:
    """Listens on 127.0.0.1; `away`: connections are refused; `canned`: every request gets these bytes."""

    target_port: int
    away: bool = False
    hang: bool = False
    latency_seconds: float = 0.0
    """Before each request goes on its way."""
    canned: bytes | None = None
    canned_for: str = ""
    """A pattern: only requests whose line matches get the canned answer."""
    flip_in: str | None = None
    """One bit of the body of the next request whose line contains this flips on its way."""
    flip_all_in: str | None = None
    """The same for each such request."""
    lose_answers_to: str | None = None
    """Requests whose line contains this reach the server, their answers do not come back."""
    rewrite: Callable[[bytes], bytes] | None = None
    """Applied to each piece of both directions but large ones; must keep the length."""
    cuts: list[int] = field(default_factory=list)
    """The next connections break once that many bytes of answers came back on each."""
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    body_bytes: Counter[str] = field(default_factory=Counter)
    """Path → bytes of bodies that were put there, again and again."""

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        # what a client has sent is not much more than what went through
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK_BYTES)
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def parts(self) -> Counter[tuple[str, int]]:
        """How often each part of each key but a probe's was sent, as far as a request line tells."""
        found: Counter[tuple[str, int]] = Counter()
        for line in list(self.requests):
            match = _PART.match(line)
            if match and "/_ckptd/probe~" not in match[1]:
                found[match[1], int(match[2])] += 1
        return found

    def count(self, method: str, containing: str = "") -> int:
        """Requests of a method whose path contains some text."""
        return sum(line.startswith(f"{method} ") and containing in line for line in list(self.requests))

    def sent_bytes(self, containing: str = "") -> int:
        """Bytes of bodies to paths that contain some text."""
        return sum(count for path, count in list(self.body_bytes.items()) if containing in path)

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
        both = {client, server}
        self._open |= both
        connection = _Connection(self, client, server)
        threading.Thread(target=connection.answers, daemon=True).start()
        with contextlib.suppress(OSError):
            connection.requests()
        for one in both:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open -= both

    def rewritten(self, data: bytes) -> bytes:
        """What `rewrite` makes of a small piece."""
        return self.rewrite(data) if self.rewrite is not None and len(data) < _SMALL_BYTES else data

    def fault_for(self, line: str) -> Fault | None:
        """The fault that the words of older tests and `faults` mean for this request."""
        if self.hang:
            return Fault("deaf", "")
        if self.lose_answers_to and self.lose_answers_to in line:
            return Fault("lose-answer", "")
        if self.flip_in and self.flip_in in line:
            self.flip_in = None
            return Fault("flip-up", "", after_bytes=500)
        if self.flip_all_in and self.flip_all_in in line:
            return Fault("flip-up", "", after_bytes=500)
        if self.canned is not None and re.search(self.canned_for, line):
            return Fault("answer", "", answer=self.canned)
        return next((fault for fault in self.faults if fault.takes(line)), None)

    @property
    def is_closed(self) -> bool:
        """It ends: whoever holds a connection back lets go."""
        return self._closed


class _Connection:
    """One connection: two threads that pump, and the fault of the request under way."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._fault: Fault | None = None
        self._done_bytes = 0
        self._to_flip: SimpleQueue[None] = SimpleQueue()
        self._is_answer_lost = False

    def requests(self) -> None:
        """From the client to the server until one of them ends it."""
        parser = Requests()
        while data := self._client.recv(_CHUNK_BYTES):
            for piece in parser.feed(data):
                if piece.line:
                    self._begin(piece)
                else:
                    self._body(piece)

    def _begin(self, piece: Piece) -> None:
        proxy = self._proxy
        proxy.requests.append(piece.line)
        fault = self._fault = proxy.fault_for(piece.line)
        self._done_bytes = 0
        if proxy.latency_seconds:
            time.sleep(proxy.latency_seconds)
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind in ("busy", "answer"):
            said = SLOW_DOWN if kind == "busy" else fault.answer
            # an answer to HEAD has no body, and aiohttp takes none
            is_head = piece.line.startswith("HEAD ")
            self._client.sendall(said[: said.find(b"\r\n\r\n") + 4] if is_head else said)
        elif kind == "forget":
            self._client.sendall(FORGOTTEN if not piece.body_bytes else b"HTTP/1.1 100 Continue\r\n\r\n")
        elif kind == "cut" and fault is not None and not fault.after_bytes:
            self._reset()
        elif kind == "stall" and fault is not None and not fault.after_bytes:
            self._hold()
        elif kind != "deaf":
            self._is_answer_lost |= kind == "lose-answer"
            if kind == "flip-down":
                self._to_flip.put(None)
            self._server.sendall(proxy.rewritten(piece.data))

    def _body(self, piece: Piece) -> None:
        if self._proxy.hang:
            return
        data, fault, before = piece.data, self._fault, self._done_bytes
        self._done_bytes += len(data)
        if piece.path:
            self._proxy.body_bytes[piece.path] += len(data)
        kind = fault.kind if fault is not None else ""
        if fault is None or kind in ("lose-answer", "flip-down"):
            self._server.sendall(self._proxy.rewritten(data))
            return
        is_reached = before <= fault.after_bytes < self._done_bytes
        if kind == "forget" and piece.is_last:
            self._client.sendall(FORGOTTEN)
        elif kind == "flip-up":
            at = fault.after_bytes - before
            self._server.sendall(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if is_reached else data)
        elif kind == "drip":
            time.sleep(len(data) / fault.bytes_per_second)
            self._server.sendall(data)
        elif kind in ("cut", "stall"):
            self._server.sendall(data[: max(0, fault.after_bytes - before)] if is_reached else data)
            if is_reached:
                self._reset() if kind == "cut" else self._hold()

    def _reset(self) -> None:
        """RST, not FIN: what was on its way is gone."""
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._client.close()
        raise ConnectionResetError

    def _hold(self) -> None:
        """Neither read nor answer until somebody gives up."""
        while not self._proxy.is_closed and self._fault is not None and self._fault in self._proxy.faults:
            time.sleep(_TICK_SECONDS)
        raise ConnectionResetError

    def answers(self) -> None:
        """From the server to the client."""
        done, proxy = 0, self._proxy
        with contextlib.suppress(OSError):
            while data := self._server.recv(_CHUNK_BYTES):
                done += len(data)
                is_lost = self._is_answer_lost and not data.startswith(b"HTTP/1.1 100")
                if proxy.cuts and done > proxy.cuts[0]:
                    proxy.cuts.pop(0)
                    is_lost = True
                if is_lost:
                    self._client.shutdown(socket.SHUT_RDWR)
                    return
                if not self._to_flip.empty() and len(data) > 1000:
                    self._to_flip.get()
                    data = data[:-1] + bytes([data[-1] ^ 1])
                self._client.sendall(proxy.rewritten(data))
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)


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
