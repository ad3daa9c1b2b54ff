"""Stand-ins for the metadata services of AWS, GCP and Azure, as their documentation says they behave."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

HANGS_SECONDS = 600.0


@dataclass
class Metadata:
    """One service; a test sets what it knows, and `fault`: hang, drop-token, 500, malformed, trickle-head
    or trickle-body (a byte each tenth of a second)."""

    cloud: str
    url: str = ""
    fault: str = ""
    documents: dict[str, str] = field(default_factory=dict)
    """Path → answer."""
    delays: dict[str, float] = field(default_factory=dict)
    """Path → seconds that its first answer takes."""
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path and status of each."""
    tokens: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    ends: threading.Event = field(default_factory=threading.Event)

    def say(self, path: str, document: Any) -> None:
        """Answer this from now on; who waits for a change gets it."""
        with self.changed:
            self.documents[path] = document if isinstance(document, str) else json.dumps(document)
            self.changed.notify_all()


@contextmanager
def metadata(cloud: str) -> Iterator[Metadata]:
    """A service on a port of 127.0.0.1."""
    service = Metadata(cloud)
    handler = type("Handler", (_Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield service
    finally:
        service.ends.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    service: Metadata

    def do_PUT(self) -> None:
        """IMDSv2: a token for who names its lifetime; across too many hops the answer never arrives."""
        if self._is_faulty():
            return
        if self.service.fault == "drop-token":
            self.service.ends.wait(HANGS_SECONDS)
            return
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.service.cloud != "aws" or self.path != "/latest/api/token":
            self._answer(404, "")
        elif not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            self._answer(400, "")
        else:
            token = f"token-{len(self.service.requests)}=="
            self.service.tokens.add(token)
            self._answer(200, token)

    def do_GET(self) -> None:
        """A document, for who proves that it is no forged request."""
        if self._is_faulty():
            return
        cloud, path = self.service.cloud, urlsplit(self.path).path
        if cloud == "aws" and self.headers.get("X-aws-ec2-metadata-token") not in self.service.tokens:
            self._answer(401, "")
        elif cloud == "gcp" and self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403, "")
        elif cloud == "azure" and (
            self.headers.get("Metadata") != "true" or "api-version" not in parse_qs(urlsplit(self.path).query)
        ):
            self._answer(400, '{"error": "Bad request"}')
        else:
            self.service.ends.wait(self.service.delays.pop(path, 0.0))
            self._wait_for_change(path)
            text = self.service.documents.get(path)
            self._answer(404 if text is None else 200, text or "")

    def _wait_for_change(self, path: str) -> None:
        """Google's wait_for_change: until the value has another ETag, or the time is over."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if query.get("wait_for_change") != "true":
            return
        end = time.monotonic() + float(query.get("timeout_sec", HANGS_SECONDS))
        with self.service.changed:
            while query.get("last_etag") == self._etag(path) and (left := end - time.monotonic()) > 0:
                self.service.changed.wait(left)

    def _etag(self, path: str) -> str:
        return f"{abs(hash(self.service.documents.get(path))):x}"

    def _is_faulty(self) -> bool:
        if self.service.fault == "hang":
            self.service.ends.wait(HANGS_SECONDS)
            return True
        if self.service.fault in ("trickle-head", "trickle-body"):
            self._trickle(self.service.fault)
            return True
        if self.service.fault in ("500", "malformed"):
            self._answer(500 if self.service.fault == "500" else 200, "<html>out of order</html>")
            return True
        return False

    def _trickle(self, fault: str) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n"
        self.wfile.write(f"{head}X-Long: ".encode() if fault == "trickle-head" else f"{head}\r\n".encode())
        end = time.monotonic() + HANGS_SECONDS
        with contextlib.suppress(OSError):
            while time.monotonic() < end and not self.service.ends.wait(0.1):
                self.wfile.write(b"a")

    def _answer(self, status: int, text: str) -> None:
        self.service.requests.append((self.command, self.path, status))
        self.send_response(status)
        if self.service.cloud == "gcp":
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("ETag", self._etag(urlsplit(self.path).path))
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""
