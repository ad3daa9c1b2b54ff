"""Send small PUTs straight to a connection: signed by botocore, sent by http.client.

For each request botocore's client resolves an endpoint, validates, serialises and parses anew, a millisecond
that is the price of a small file. What its own PUTs show, place and region, holds for the next; whatever is
not answered with a plain success is left to the client, which tries again and names the failure
(docs/internals/stores.md).
"""

from __future__ import annotations

import http.client
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

from ckptd.storage.stores.s3.body import STEP_BYTES

if TYPE_CHECKING:
    import ssl

    from ckptd.storage.stores.s3.body import Body

CONNECT_SECONDS = 20
READ_SECONDS = 75
"""Limit of one call, as in client.py: longer than an upload may stand still."""
_REST_SECONDS = 30.0
_MOST_IDLE = 32
_SUM = "x-amz-checksum-crc64nvme"
_TAKEN = 412


class _Place(NamedTuple):
    """Hold where the client's own requests went."""

    scheme: str
    host: str
    port: int | None
    folder: str
    region: str
    user_agent: str


class Direct:
    """PUTs below one prefix; learns from the client where to, rests for a while after a failure.

    `credentials`: botocore's, renewed by themselves; `signs_payload`: bodies are signed, so none is streamed.
    """

    def __init__(
        self, client: Any, credentials: Any, bucket: str, prefix: str, *, signs_payload: bool, verify: Any
    ) -> None:
        self._client = client
        self._credentials = credentials
        self._bucket, self._prefix = bucket, prefix
        self._signs_payload = signs_payload
        self._verify = verify
        self._place: _Place | None = None
        self._rests_until = 0.0
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        weakref.finalize(self, _close, self._idle)
        self._tls: ssl.SSLContext | None = None
        self._names: dict[str, str] = {}
        if credentials is not None and client.meta.config.signature_version == "s3v4":
            client.meta.events.register("before-send.s3.PutObject", self._learn)

    @property
    def is_ready(self) -> bool:
        """Whether to try it now."""
        return self._place is not None and time.monotonic() >= self._rests_until

    @property
    def streams(self) -> bool:
        """Whether bodies that are no longer in memory when they are sent may be sent."""
        return self.is_ready and not self._signs_payload

    def begin(self, key: str, arguments: dict[str, Any], data: bytes | bytearray) -> Flight | None:
        """Send a whole object; its answer is waited for by `end`. None: leave it to the client."""
        if not self.is_ready:
            return None
        query, headers = self._said(arguments)
        flight = self._opened(key, query, headers | {"Content-Length": str(len(data))}, data)
        return flight if flight is not None and flight.send(data) else None

    def stream(
        self, key: str, arguments: dict[str, Any], body: Body, *, with_trailer: bool
    ) -> dict[str, Any] | None:
        """Send a part or an object as it is read, its CRC64NVME behind it if wanted.

        None: leave it to the client; the body is to be begun anew.
        """
        if not self.streams:
            return None
        (query, headers), size = self._said(arguments), len(body)
        if with_trailer:
            headers |= {
                "Content-Encoding": "aws-chunked",
                "X-Amz-Decoded-Content-Length": str(size),
                "X-Amz-Trailer": _SUM,
            }
        headers["Content-Length"] = str(framed_bytes(size) if with_trailer else size)
        flight = self._opened(key, query, headers, b"", has_trailer=with_trailer)
        if flight is None:
            return None
        try:
            is_sent = flight.stream(body, with_trailer=with_trailer)
        except BaseException:
            flight.abandon()
            raise
        return flight.end() if is_sent else None

    # --- inside ----------------------------------------------------------------------------------------

    def _learn(self, request: Any, **_: Any) -> None:
        """Learn where the client sends its PUTs and for which region it signs; give up behind a proxy or odd
        paths.
        """
        from botocore.utils import get_environ_proxies

        if self._place is not None:
            return
        url, said = urlsplit(request.url), request.headers.get("Authorization", "")
        said = said.decode() if isinstance(said, bytes) else said
        scope = said.partition("Credential=")[2].partition(",")[0].split("/")
        is_virtual = (url.hostname or "").startswith(f"{self._bucket}.")
        folder = "/" if is_virtual else f"/{quote(self._bucket, safe='')}/"
        below = folder + quote(self._prefix, safe="/~")
        if len(scope) < 5 or scope[-2:] != ["s3", "aws4_request"] or not url.path.startswith(below):
            return
        if get_environ_proxies(request.url) or url.scheme not in ("http", "https") or not url.hostname:
            return
        agent = str(self._client.meta.config.user_agent)
        self._place = _Place(url.scheme, url.hostname, url.port, folder, scope[-3], agent)

    def _said(self, arguments: dict[str, Any]) -> tuple[str, dict[str, str]]:
        """Return the arguments of PutObject and UploadPart as a query and headers, by the service's own
        model.
        """
        query, named = "", dict(arguments)
        if "UploadId" in named:
            upload_id = quote(str(named.pop("UploadId")), safe="-._~")
            query = f"?uploadId={upload_id}&partNumber={named.pop('PartNumber')}"
        for name in named.keys() - self._names.keys():
            shape = self._client.meta.service_model.operation_model("PutObject").input_shape.members[name]
            self._names[name] = shape.serialization["name"]
        return query, {self._names[name]: str(value) for name, value in named.items()}

    def _opened(
        self,
        key: str,
        query: str,
        headers: dict[str, str],
        data: bytes | bytearray,
        *,
        has_trailer: bool = False,
    ) -> Flight | None:
        """Return a connection to which the head of a signed request was written."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        place = self._place
        assert place is not None
        port = "" if place.port is None else f":{place.port}"
        host = f"[{place.host}]" if ":" in place.host else place.host
        target = place.folder + quote(self._prefix + key, safe="/~") + query
        signed = bytes(data) if self._signs_payload else b""
        asked = AWSRequest("PUT", f"{place.scheme}://{host}{port}{target}", headers, signed)
        asked.context["client_config"] = self._client.meta.config
        if has_trailer:
            asked.context["checksum"] = {"request_algorithm": {"in": "trailer", "name": _SUM}}
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", place.region).add_auth(asked)
        connection: http.client.HTTPConnection | None = None
        try:
            connection = self._taken(place)
            connection.putrequest("PUT", target, skip_accept_encoding=True)
            connection.putheader("User-Agent", place.user_agent)
            for name, value in asked.headers.items():
                connection.putheader(name, value)
        except (OSError, http.client.HTTPException, ValueError):
            if connection is not None:
                connection.close()
            self.failed()
            return None
        return Flight(self, connection)

    def _taken(self, place: _Place) -> http.client.HTTPConnection:
        """Return an open connection on which nothing is under way."""
        from urllib3.util import wait_for_read

        while True:
            with self._lock:
                held = self._idle.pop() if self._idle else None
            if held is None:
                break
            # the server has closed it, or says what nobody asked for
            if held.sock is not None and not wait_for_read(held.sock, timeout=0.0):
                return held
            held.close()
        made: http.client.HTTPConnection
        if place.scheme == "https":
            made = http.client.HTTPSConnection(
                place.host, place.port, timeout=CONNECT_SECONDS, context=self._context()
            )
        else:
            made = http.client.HTTPConnection(place.host, place.port, timeout=CONNECT_SECONDS)
        made.connect()
        made.sock.settimeout(READ_SECONDS)
        return made

    def _context(self) -> ssl.SSLContext:
        """Make a TLS context as botocore's session does: its ciphers, the same authorities."""
        from botocore.httpsession import create_urllib3_context, get_cert_path

        with self._lock:
            if self._tls is None:
                made: ssl.SSLContext = create_urllib3_context()
                made.check_hostname = True
                path = get_cert_path(self._verify)
                made.load_verify_locations(**({"capath": path} if os.path.isdir(path) else {"cafile": path}))
                self._tls = made
            return self._tls

    def wake(self) -> None:
        """End the rest after a failure that was caused on purpose."""
        self._rests_until = 0.0

    def failed(self) -> None:
        """The client has the word for a while; connections may all be of a server that is gone."""
        self._rests_until = time.monotonic() + _REST_SECONDS
        with self._lock:
            _close(self._idle)

    def close(self) -> None:
        """End idle connections."""
        with self._lock:
            _close(self._idle)

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request, its answer having been read to the end."""
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class Flight:
    """One request on its way."""

    def __init__(self, direct: Direct, connection: http.client.HTTPConnection) -> None:
        self._direct = direct
        self._connection = connection

    def send(self, data: bytes | bytearray) -> bool:
        """The head, and a body that lies in memory; False: the connection broke."""
        try:
            self._connection.endheaders(bytes(data))
        except (OSError, http.client.HTTPException):
            self._broke()
            return False
        return True

    def stream(self, body: Body, *, with_trailer: bool) -> bool:
        """The head, and a body as it is read, a MiB a chunk where something follows it; False: it broke."""
        connection, done, size = self._connection, 0, len(body)
        try:
            connection.endheaders()
            while done < size:
                room = STEP_BYTES - done % STEP_BYTES
                if with_trailer and room == STEP_BYTES:
                    connection.send(b"%x\r\n" % min(STEP_BYTES, size - done))
                data = body.take(room)
                connection.send(data)
                done += len(data)
                if with_trailer and (done % STEP_BYTES == 0 or done == size):
                    connection.send(b"\r\n")
            if with_trailer:
                connection.send(b"0\r\n%s:%s\r\n\r\n" % (_SUM.encode(), body.encoded_crc))
        except (OSError, http.client.HTTPException):
            self._broke()
            return False
        return True

    def end(self) -> dict[str, Any] | None:
        """Return what the client would have answered; None: it failed, and nobody knows how much arrived."""
        connection = self._connection
        try:
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            self._broke()
            return None
        if answer.status != 200 or not answer.headers.get("ETag"):
            connection.close()
            if answer.status != _TAKEN:
                self._direct.failed()
            return None
        if answer.will_close:
            connection.close()
        else:
            self._direct.give_back(connection)
        headers = {"ETag": answer.headers["ETag"], "ChecksumCRC64NVME": answer.headers.get(_SUM)}
        return {name: value for name, value in headers.items() if value is not None}

    def abandon(self) -> None:
        """Drop the connection: nobody wants the answer."""
        self._connection.close()

    def _broke(self) -> None:
        self._connection.close()
        self._direct.failed()


def _close(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def framed_bytes(size_bytes: int) -> int:
    """Return the length of a body in chunks of a MiB with its checksum behind it."""
    full, rest = divmod(size_bytes, STEP_BYTES)
    chunks = full * (len(b"%x" % STEP_BYTES) + 4) + (len(b"%x" % rest) + 4 if rest else 0)
    return size_bytes + chunks + len(f"0\r\n{_SUM}:############\r\n\r\n")
