"""The checksum that goes along where a server enforces one: per part, per object, and as a proof."""

from __future__ import annotations

import base64
import http.server
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.errors import DamagedError
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3.store import S3Store
from tests.stores import servers
from tests.stores.conformance import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.stores

PART_BYTES = 5 << 20
DATA = os.urandom((12 << 20) + 77)


class _Server(http.server.ThreadingHTTPServer):
    """`served`: paths and bodies; the first request whose path holds one of `bad` is refused."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.served: list[tuple[str, bytes]] = []
        self.bad: set[str] = set()


class _Takes(http.server.BaseHTTPRequestHandler):
    """Takes parts and objects, compares the CRC64NVME that comes with them."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        right = base64.b64encode(crc64(data).to_bytes(8)).decode()
        self.server.served.append((self.path, data))
        bad = {one for one in self.server.bad if one in self.path}
        self.server.bad -= bad
        if bad or self.headers.get("x-amz-checksum-crc64nvme") != right:
            self._answer(400, b"<Error><Code>BadDigest</Code></Error>")
            return
        self._answer(200, b"", {"ETag": '"0"', "x-amz-checksum-crc64nvme": right})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        made = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
        done = "<CompleteMultipartUploadResult><ETag>0</ETag></CompleteMultipartUploadResult>"
        self._answer(200, (done if "uploadId" in self.path else made).encode())

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def _answer(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(more or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    server = _Server(("127.0.0.1", 0), _Takes)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def store_at(made: _Server) -> S3Store:
    access = servers.access(f"http://127.0.0.1:{made.server_port}", part_size_bytes=PART_BYTES)
    store = open_store("s3://b/x", access=access)
    assert isinstance(store, S3Store)
    store.abilities = replace(store.abilities, create_only=True, checksum="crc64nvme")
    return store


def test_parts_carry_their_checksum_and_one_that_changed_is_sent_again(made: _Server) -> None:
    """What is read to be hashed costs no bandwidth; the other parts are sent once."""
    made.bad.add("partNumber=2")
    meter = Meter(DATA)
    assert store_at(made).upload("t/x", meter, resume=None, on_progress=lambda _: None) == crc64(DATA)
    parts = {path.rpartition("partNumber=")[2][0]: data for path, data in made.served}
    assert b"".join(parts[number] for number in "123") == DATA
    assert len(made.served) == 4
    assert meter.asked == len(DATA) + sum(len(data) for _, data in made.served)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, PART_BYTES])
def test_an_object_in_one_request_is_proved_by_its_answer(made: _Server, size: int) -> None:
    store = store_at(made)
    crc = store.upload("t/x", Meter(DATA[:size]), resume=None, on_progress=lambda _: None)
    assert crc == crc64(DATA[:size])
    assert [data for _, data in made.served] == [DATA[:size]]
    assert store.verify("t/x", size, crc, lambda done: None) == "store-checksum"


def test_a_source_that_reads_differently_the_second_time_is_damage(made: _Server) -> None:
    """Memory or disk that fails between hashing and sending: nothing is believed of either reading."""

    class Fickle(Meter):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            count = super().read_into(offset, buffer)
            if self.asked > 2 * PART_BYTES:
                buffer[0] ^= 1
            return count

    with pytest.raises(DamagedError, match="others when they were read before"):
        store_at(made).upload("t/x", Fickle(DATA[:PART_BYTES] * 2), resume=None, on_progress=lambda _: None)
