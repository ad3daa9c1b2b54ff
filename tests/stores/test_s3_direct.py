"""The short way for PUTs: what arrives is what was read, and whatever fails goes the other way."""

from __future__ import annotations

import base64
import http.server
import os
import secrets
import subprocess
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from bench import native
from ckptd.core.model.manifest import NodeManifest, parse
from ckptd.errors import VerifyError
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3 import direct
from ckptd.storage.stores.s3.body import STEP_BYTES
from ckptd.storage.stores.s3.probe import takes_trailers
from tests.stores import servers
from tests.stores.conformance import Meter, source_of
from tests.stores.proxy import Fault, Kind, Proxy, proxy
from tests.stores.scene import Node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptd.storage.remote.messages import UploadResult
    from ckptd.storage.stores.s3.store import S3Store

pytestmark = pytest.mark.stores

PART_BYTES = 5 << 20
DATA = os.urandom((12 << 20) + 77)
SMALL = 40
KEYS = ("a/b", "spaced out/+plus", "100%/ü~_-.", "a=b&c?d#e", "zero/layers.1.weight/fp32.pt")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def between(moto: servers.Server) -> Iterator[Proxy]:
    with proxy(moto.port) as made:
        yield made


@pytest.fixture
def null(tmp_path: Path) -> Iterator[Proxy]:
    """A server that enforces CRC64NVME, also behind the body."""
    with native.null_server(tmp_path) as server, proxy(server.port) as made:
        yield made


def store_at(endpoint: str, **more: Any) -> S3Store:
    access = Access(endpoint_url=endpoint, part_size_bytes=PART_BYTES, **more)
    store = cast("S3Store", open_store(f"s3://{servers.BUCKET}/{secrets.token_hex(4)} x", access=access))
    store.probe()
    return store


# --- one request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_signed", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize("key", KEYS)
def test_the_server_takes_signature_and_name(rclone: servers.Server, key: str, *, is_signed: bool) -> None:
    """rclone checks signatures; the client finds under the same key what went the short way."""
    store = store_at(rclone.endpoint, sign_payload=is_signed)
    assert store.direct is not None
    for data in (b"", b"x" * 1000, os.urandom(STEP_BYTES)):
        flight = store.direct.begin(key, {}, data)
        assert flight is not None
        answer = flight.end()
        assert answer is not None
        assert answer["ETag"]
        assert store.get(key) == data
    assert store.direct.streams is not is_signed


def test_authorities_are_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS: taken with the authority of AWS_CA_BUNDLE, and no other."""
    own = tmp_path / "own.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = [*words, "-days", "2", *subject, "-keyout", str(tmp_path / "key.pem"), "-out", str(own)]
    subprocess.run(made, check=True, capture_output=True)
    with servers.rclone(tmp_path) as server:
        server.stop()
        server.command[-1:-1] = ["--cert", str(own), "--key", str(tmp_path / "key.pem")]
        server.start()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(own))
        store = store_at(f"https://127.0.0.1:{server.port}")
        assert store.direct is not None
        for data in (b"1", b"2"):
            flight = store.direct.begin("t/x", {}, data)
            assert flight is not None
            assert flight.end() is not None
            assert store.get("t/x") == data
        other = direct.Direct(
            store.client, store.direct._credentials, store.bucket, "x/", signs_payload=False, verify=True
        )
        other._place = store.direct._place
        assert other.begin("t/y", {}, b"3") is None
        assert not other.is_ready
        assert store.stat("t/y") is None


def test_behind_a_proxy_the_client_does_it(moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", moto.endpoint)
    store = store_at(moto.endpoint)
    assert store.direct is not None
    assert not store.direct.is_ready
    assert store.pending_puts == 0
    assert store.upload("t/x", source_of(b"1"), resume=None, on_progress=lambda _: None) == crc64(b"1")
    assert store.get("t/x") == b"1"


def test_after_a_failure_the_client_has_the_word_for_a_while(between: Proxy) -> None:
    store = store_at(between.endpoint)
    assert store.direct is not None
    between.lose_answers_to = "t/x"
    flight = store.direct.begin("t/x", {}, b"1")
    assert flight is not None
    assert flight.end() is None
    assert not store.direct.is_ready
    assert store.direct.begin("t/y", {}, b"1") is None
    between.lose_answers_to = None
    store.direct.wake()
    flight = store.direct.begin("t/y", {}, b"1")
    assert flight is not None
    assert flight.end() is not None


def test_a_connection_that_the_server_closed_is_not_written_to(between: Proxy) -> None:
    store = store_at(between.endpoint)
    assert store.direct is not None
    for number in range(3):
        flight = store.direct.begin(f"t/{number}", {}, b"1")
        assert flight is not None
        assert flight.end() is not None
        for held in store.direct._idle:
            held.sock.shutdown(2)


# --- the checksum behind the body --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [STEP_BYTES + 1, PART_BYTES, PART_BYTES + 1, len(DATA)])
def test_each_byte_is_read_once(null: Proxy, size: int) -> None:
    store = store_at(null.endpoint)
    assert store.abilities.trailers
    meter = Meter(DATA[:size])
    crc = store.upload("t/x", meter, resume=None, on_progress=lambda _: None)
    assert crc == crc64(DATA[:size])
    assert meter.asked == size
    assert store.verify("t/x", size, crc, lambda _: None) == "store-checksum"


def test_a_part_that_changed_on_its_way_is_sent_again(null: Proxy) -> None:
    store = store_at(null.endpoint)
    null.flip_in = "partNumber=2"
    crc = store.upload("t/x", source_of(DATA), resume=None, on_progress=lambda _: None)
    assert crc == crc64(DATA)
    assert store.verify("t/x", len(DATA), crc, lambda _: None) == "store-checksum"
    path = f"/{servers.BUCKET}/{store.place('t/x')['Key']}".replace(" ", "%20")
    assert null.parts()[path, 2] == 2


def test_lengths_are_said_as_they_are_sent(null: Proxy) -> None:
    """The frame's length stands in the head: a byte too many or few would leave the connection waiting."""
    store = store_at(null.endpoint)
    for size in (
        STEP_BYTES + 1,
        2 * STEP_BYTES - 1,
        2 * STEP_BYTES,
        2 * STEP_BYTES + 15,
        3 * STEP_BYTES + 16,
    ):
        store.upload(f"t/{size}", source_of(DATA[:size]), resume=None, on_progress=lambda _: None)
        assert store.direct is not None
        assert store.direct.is_ready


class _Kind(http.server.ThreadingHTTPServer):
    """`how`: what it does with a checksum behind the body; `held`: the last object and its headers."""

    how = "compares"
    held: bytes = b""


class _Takes(http.server.BaseHTTPRequestHandler):
    """One object, for the probe of trailers alone."""

    protocol_version = "HTTP/1.1"
    server: _Kind

    def do_PUT(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") != "aws-chunked" or self.server.how == "frames":
            self.server.held = raw
            self._say(200)
            return
        head, _, rest = raw.partition(b"\r\n")
        data, tail = rest[: int(head, 16)], rest[int(head, 16) :]
        told = tail.decode().rpartition("crc64nvme:")[2].strip()
        if self.server.how == "refuses" or (self.server.how == "compares" and told != _sum(data)):
            self._say(400)
            return
        self.server.held = data
        self._say(200)

    def do_GET(self) -> None:
        self._say(200, self.server.held)

    def do_DELETE(self) -> None:
        self._say(204)

    def _say(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("x-amz-checksum-crc64nvme", _sum(self.server.held))
        if self.server.how == "names the encoding":
            self.send_header("Content-Encoding", "aws-chunked")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _sum(data: bytes) -> str:
    return base64.b64encode(crc64(data).to_bytes(8)).decode()


@pytest.mark.parametrize("how", ["compares", "ignores", "frames", "refuses", "names the encoding"])
def test_trailers_are_believed_where_they_are_seen_to_be_compared(how: str) -> None:
    server = _Kind(("127.0.0.1", 0), _Takes)
    server.how = how
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        access = Access(endpoint_url=f"http://127.0.0.1:{server.server_port}")
        store = cast("S3Store", open_store("s3://b/x", access=access))
        place = store.place("t/x")
        store.client.put_object(**place, Body=b"1")
        assert store.direct is not None
        assert takes_trailers(store.client, place, store.direct, "t/x", access) is (how == "compares")
        assert store.direct.is_ready
    finally:
        server.shutdown()
        server.server_close()


# --- many small files --------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "save")
    node.write_all()
    node.write({f"side{n:02}.json": f"{n}".encode() * (40 + 997 * n) for n in range(SMALL)})
    return node


def uploaded_to(store: S3Store, node: Node) -> tuple[UploadResult, NodeManifest]:
    ground = node.attached(store)
    result = node.upload(ground, node.order(node.sealed()))
    (key,) = [info.key for info in store.list("_ckptd/") if "/nodes/" in info.key and node.tag in info.key]
    return result, parse(NodeManifest, store.get(key) or b"", "")


def as_saved(store: S3Store, node: Node, manifest: NodeManifest) -> None:
    """What is listed is what lies there and what was saved."""
    for file in manifest.files:
        data = (node.save_dir / node.tag / file.path).read_bytes()
        assert store.get(file.key) == data
        assert int(file.checksums.crc64nvme, 16) == crc64(data)


def test_small_files_fly_and_cost_one_request_each(between: Proxy, node: Node) -> None:
    store = store_at(between.endpoint)
    assert store.pending_puts > 0
    between.requests.clear()
    result, manifest = uploaded_to(store, node)
    assert result.outcome == "committed"
    as_saved(store, node, manifest)
    assert {file.proof for file in manifest.files} == {"part-etags"}
    lines = [line for line in between.requests if f"/{node.tag}/side" in line]
    assert len([line for line in lines if line.startswith("PUT")]) == SMALL
    assert not [line for line in lines if line.startswith("HEAD")]
    assert len(node.uploaded()) == len(manifest.files)


@pytest.mark.parametrize("kind", ["flip-up", "forget"])
def test_what_arrived_changed_or_never_is_found_and_sent_again(
    between: Proxy, node: Node, kind: Kind
) -> None:
    store = store_at(between.endpoint)
    between.faults = [Fault(kind, "PUT.*side39", after_bytes=500)]
    with pytest.raises(VerifyError, match="side39"):
        uploaded_to(store, node)
    assert store.stat(f"{node.tag}/side39.json") is None
    order = node.order(node.sealed(), uploaded=node.uploaded())
    assert node.upload(node.attached(store), order).outcome == "committed"
    data = (node.save_dir / node.tag / "side39.json").read_bytes()
    assert store.get(f"{node.tag}/side39.json") == data


@pytest.mark.parametrize("kind", ["cut", "lose-answer", "busy"])
def test_what_fails_in_flight_goes_the_other_way(between: Proxy, node: Node, kind: Kind) -> None:
    store = store_at(between.endpoint)
    between.faults = [Fault(kind, "PUT.*side(07|19|23)", times=3, after_bytes=100)]
    result, manifest = uploaded_to(store, node)
    assert between.faults[0].hits == 3
    assert result.outcome == "committed"
    as_saved(store, node, manifest)


def test_what_another_put_there_meanwhile_is_compared(
    between: Proxy, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(between.endpoint)
    data = (node.save_dir / node.tag / "side05.json").read_bytes()
    real, is_done = store.list, False

    def listed(prefix: str) -> Iterator[Any]:
        nonlocal is_done
        found = list(real(prefix))
        if prefix == f"{node.tag}/" and not is_done:
            is_done = True
            store.put(f"{node.tag}/side05.json", data)
        return iter(found)

    monkeypatch.setattr(store, "list", listed)
    result, manifest = uploaded_to(store, node)
    assert is_done
    assert result.outcome == "committed"
    as_saved(store, node, manifest)


def test_a_file_that_is_written_while_it_is_sent_is_dropped(
    between: Proxy, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read whole, then looked at: the attempt ends, nothing is committed."""
    store = store_at(between.endpoint)
    order, real = node.order(node.sealed()), store.begin

    def begin(key: str, source: Any) -> Any:
        started = real(key, source)
        if key.endswith("side11.json"):
            node.rewrite("side11.json", b"other")
        return started

    monkeypatch.setattr(store, "begin", begin)
    with pytest.raises(Exception, match=r"side11\.json was written while it was uploaded"):
        node.upload(node.attached(store), order)
    assert not [info for info in store.list("_ckptd/") if "/commits/" in info.key]
