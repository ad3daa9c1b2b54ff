"""S3 passes the conformance suite on two real servers, one of which ignores conditions."""

from __future__ import annotations

import http.client
import secrets
import socket
from collections import Counter
from dataclasses import replace

import pytest

from ckptd.conversion.remote.uploader import NOTE, UploadNote, write_note
from ckptd.errors import DamagedError, NotPermitted, RemoteUnreachable, VerifyError
from ckptd.storage.remote.repair import ExactSource
from ckptd.storage.stores.base import Progress, ResumePoint
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3 import bucket as s3
from ckptd.storage.stores.s3 import client as s3_client
from ckptd.storage.stores.s3.parts import PARTS_AT_ONCE
from ckptd.storage.stores.s3.probe import WrongSum
from ckptd.storage.stores.s3.store import S3Store
from ckptd.storage.stores.sources import MemorySource
from tests.stores import servers
from tests.stores.conformance import DATA, Meter, Stopped, StoreConformance, source_of
from tests.stores.proxy import answer, proxy
from tests.support.repair_scene import run_here
from tests.unit.storage.remote.test_remote_resend import entry

pytestmark = pytest.mark.stores

PART_BYTES = 5 << 20
BIG = DATA * 6
"""24 MiB and a bit: five parts of 5 MiB, the last one short."""


@pytest.fixture(autouse=True)
def credentials(either_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)


def store_at(server: servers.Server, *, probed: bool = True) -> S3Store:
    access = servers.access(server.endpoint, part_size_bytes=PART_BYTES)
    store = open_store(f"s3://{servers.BUCKET}/{secrets.token_hex(4)}", access=access)
    assert isinstance(store, S3Store)
    if probed:
        store.probe()
    return store


class WordsOfServers:
    """What a real server does with a checksum behind a body decides whether one is sent there."""

    behind_body = "ignored"

    @pytest.mark.botocore
    def test_a_checksum_behind_a_body_goes_only_where_a_wrong_one_is_refused(self, store: S3Store) -> None:
        """Sent past the probe: a server that takes a wrong one must never be one that gets them."""
        data = secrets.token_bytes(40_000)
        direct, key = store.direct, "trailer.bin"
        assert direct is not None
        source = MemorySource(data, mode=0o644, folder_mode=0o755, gid=None)
        wrong = direct.stream(key, {}, WrongSum(source, 0, len(data)), with_trailer=True)
        direct.wake()
        try:
            held = store.read_at(key, 0, len(data) + 1) if wrong is not None else b""
        except FileNotFoundError:
            held = b""
        found = "refused" if wrong is None else "ignored" if held == data else "stored with its frame"
        assert found == self.behind_body
        assert store.abilities.trailers is (store.abilities.checksum is not None and found == "refused")
        store.delete(key)
        crc = store.upload(key, source, resume=None, on_progress=lambda _: None)
        assert store.verify(key, len(data), crc, lambda _: None)
        assert store.read_at(key, 0, len(data) + 1) == data


class _InParts(StoreConformance, WordsOfServers):
    """The suite with the smallest parts that S3 takes."""

    window_bytes = PART_BYTES
    data = BIG
    at_once = PARTS_AT_ONCE

    def test_a_part_is_never_held_whole(self, store: S3Store) -> None:
        """P12: at most 1 MiB of a part at a time, whatever its size."""
        meter = Meter(BIG)
        store.upload("t/x", meter, resume=None, on_progress=lambda _: None)
        assert meter.longest_bytes == 1 << 20


class TestMoto(_InParts):
    proof = "part-etags"

    @pytest.fixture
    def store(self, moto: servers.Server) -> S3Store:
        return store_at(moto)


class TestRclone(_InParts):
    is_create_only = False

    @pytest.fixture
    def store(self, rclone: servers.Server) -> S3Store:
        return store_at(rclone)


def test_reading_goes_on_where_a_connection_broke(moto: servers.Server) -> None:
    """An hour of restoring does not end with one lost connection; bytes that came are not asked for again."""
    with proxy(moto.port) as between:
        there = f"s3://{servers.BUCKET}/{servers.CLIENT}/broken"
        store = open_store(there, access=servers.access(between.endpoint))
        store.put("t/x", BIG)
        between.cut()
        between.requests.clear()
        between.cuts = [9 << 20, 500_000, 3 << 20]
        assert store.read_at("t/x", 0, len(BIG)) == BIG
        assert not between.cuts
        assert between.count("GET") == 4
        between.cuts = [2 << 20]
        with pytest.raises(RemoteUnreachable):
            store.get("t/x")
        between.cuts = [2 << 20]
        assert store.verify("t/x", len(BIG), crc64(BIG), lambda done: None) == "read-back"


@pytest.mark.botocore
def test_a_store_that_is_closed_holds_no_connection(moto: servers.Server) -> None:
    """Workers of a cluster close theirs with each conversion; the next request opens anew."""
    store = store_at(moto)
    store.put("t/1", b"x")
    assert store.direct is not None
    with socket.create_server(("127.0.0.1", 0)) as listening:  # moto keeps none open
        idle = http.client.HTTPConnection(*listening.getsockname())
        idle.connect()
        store.direct.give_back(idle)
        assert idle.sock is not None
        store.close()
        assert idle.sock is None
    assert store.get("t/1") == b"x"
    store.close()


def test_a_server_that_hangs_is_left_and_gone_on_with(
    moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes bytes and never answers: said after the time limit; what it holds is not sent again."""
    monkeypatch.setattr(s3_client, "READ_SECONDS", 5)
    monkeypatch.setattr(s3_client, "ATTEMPTS", 2)
    seen: list[Progress] = []
    with proxy(moto.port) as between:
        access = servers.access(between.endpoint, part_size_bytes=PART_BYTES)
        store = open_store(f"s3://{servers.BUCKET}/{servers.CLIENT}/hang", access=access)

        def tell(progress: Progress) -> None:
            seen.append(progress)
            between.hang = progress.flushed_bytes >= 2 * PART_BYTES

        with pytest.raises(RemoteUnreachable, match="connection was lost"):
            store.upload("t/x", source_of(BIG), resume=None, on_progress=tell)
        before = between.parts()
        between.hang = False
        monkeypatch.setattr(s3_client, "READ_SECONDS", 60)
        store = open_store(store.url, access=access)
        last = seen[-1]
        resume = ResumePoint(flushed_bytes=last.flushed_bytes, crc64=last.crc64, token=last.token)
        assert store.upload("t/x", source_of(BIG), resume=resume, on_progress=lambda _: None) == crc64(BIG)
        again = between.parts() - before
        assert not {part for _, part in again} & {1, 2}, "what it holds is sent again"
        assert again.total() <= 3, "more than once"
        assert before.total() <= 5 + PARTS_AT_ONCE * s3_client.ATTEMPTS
        assert store.get("t/x") == BIG


def test_a_server_that_cannot_list_parts_gets_the_object_anew(moto: servers.Server) -> None:
    """Said by the probe; an upload that was cut short starts over, and leaves no parts behind."""
    with proxy(moto.port) as between:
        between.canned, between.canned_for = (
            answer("501 Not Implemented", "NotImplemented"),
            "^GET .*uploadId=",
        )
        access = servers.access(between.endpoint, part_size_bytes=PART_BYTES)
        store = open_store(f"s3://{servers.BUCKET}/{servers.CLIENT}/unlisted", access=access)
        abilities = store.probe()
        assert not abilities.resumable
        assert any("parts cannot be listed" in note for note in abilities.notes)
        seen: list[Progress] = []
        with pytest.raises(Stopped):
            store.upload("t/x", Meter(BIG, 3 * PART_BYTES), resume=None, on_progress=seen.append)
        last = seen[-1]
        resume = ResumePoint(flushed_bytes=last.flushed_bytes, crc64=last.crc64, token=last.token)
        again = open_store(store.url, access=access)
        assert again.upload("t/x", source_of(BIG), resume=resume, on_progress=lambda _: None) == crc64(BIG)
        assert again.get("t/x") == BIG
        left = moto.client().list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", [])
        assert not [one for one in left if one["Key"].startswith(f"{servers.CLIENT}/unlisted/")]


@pytest.mark.parametrize("cut", [1, 5])
def test_parts_that_arrived_out_of_order_are_not_sent_again(moto: servers.Server, cut: int) -> None:
    """A process that died with parts in flight: what the server holds is hashed here, the rest is sent."""
    data = BIG + BIG[: 12 << 20]
    parts = -(-len(data) // PART_BYTES)
    with proxy(moto.port) as between:
        access = servers.access(between.endpoint, part_size_bytes=PART_BYTES)
        store = open_store(f"s3://{servers.BUCKET}/{servers.CLIENT}/order{cut}", access=access)
        store.probe()
        seen: list[Progress] = []
        between.canned_for = f"partNumber={cut}(&|$)"
        between.canned = answer("403 Forbidden", "AccessDenied")
        with pytest.raises(NotPermitted):
            store.upload("t/x", source_of(data), resume=None, on_progress=seen.append)
        between.canned = None
        last = seen[-1]
        assert last.flushed_bytes <= (cut - 1) * PART_BYTES
        assert all(crc64(data[: p.flushed_bytes]) == p.crc64 for p in seen)
        assert [p.flushed_bytes for p in seen] == sorted(p.flushed_bytes for p in seen)
        before = between.parts()
        tries = sum(n for (key, _), n in before.items() if key.endswith("t/x"))
        upload_id = last.token.partition(":")[2]
        where = {"Bucket": servers.BUCKET, "Key": f"{servers.CLIENT}/order{cut}/t/x", "UploadId": upload_id}
        held = {p["PartNumber"] for p in moto.client().list_parts(**where).get("Parts", [])}
        resume = ResumePoint(flushed_bytes=last.flushed_bytes, crc64=last.crc64, token=last.token)
        again = open_store(store.url, access=access)
        again.probe()
        assert again.upload("t/x", source_of(data), resume=resume, on_progress=lambda _: None) == crc64(data)
        sent = Counter(
            {part: n for (key, part), n in (between.parts() - before).items() if key.endswith("t/x")}
        )
        assert sent == Counter(set(range(1, parts + 1)) - held)
        # the part that was refused was tried both ways
        assert tries - len(held) <= PARTS_AT_ONCE + 1
        assert again.get("t/x") == data


def test_a_small_object_costs_one_request_or_one_more_to_prove_it(moto: servers.Server) -> None:
    """Round trips are what thousands of small files cost: no look before, none after."""
    with proxy(moto.port) as between:
        store = open_store(
            f"s3://{servers.BUCKET}/{servers.CLIENT}/trips", access=servers.access(between.endpoint)
        )
        assert isinstance(store, S3Store)
        shown = store.probe()
        for name, proof, wanted in (("x", "part-etags", ["PUT"]), ("y", "read-back", ["PUT", "GET"])):
            between.requests.clear()
            crc = store.upload(f"t/{name}", source_of(DATA[:9999]), resume=None, on_progress=lambda _: None)
            assert store.verify(f"t/{name}", 9999, crc, lambda done: None) == proof
            assert [line.split()[0] for line in between.requests] == wanted
            # a server whose ETags show nothing
            store.abilities = replace(shown, part_etags=False, joined_etags=False)
        right = crc64(DATA[:9999])
        for wrong in (right ^ 1, right):
            with pytest.raises(VerifyError):
                store.verify("t/x", 9998, wrong, lambda done: None)
            assert store.stat("t/x") is not None


def test_what_another_node_uploads_there_is_never_given_up(moto: servers.Server) -> None:
    """H18: of several uploads of a key only those are aborted whose ids are ours."""
    store = store_at(moto)
    client, place = moto.client(), store.place("t/x")
    theirs = client.create_multipart_upload(**place)["UploadId"]
    ours = client.create_multipart_upload(**place)["UploadId"]
    store.discard("t/x")
    store.discard("t/x", f"{5 << 20}:{ours}")
    left = client.list_multipart_uploads(Bucket=place["Bucket"], Prefix=place["Key"]).get("Uploads", [])
    assert [upload["UploadId"] for upload in left] == [theirs]


def test_a_huge_object_is_no_document(moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not read into memory because it bears a document's name."""
    monkeypatch.setattr(s3, "DOCUMENT_LIMIT_BYTES", 100)
    store = store_at(moto, probed=False)
    store.put("latest", bytes(101))
    with pytest.raises(DamagedError, match="latest is no document"):
        store.get("latest")
    store.put("latest", bytes(100))
    assert store.get("latest") == bytes(100)


def test_what_is_not_as_committed_never_gets_a_name(moto: servers.Server) -> None:
    """P2: a repair sends parts beside each other; a source that is not what a manifest lists ends before the
    parts are joined, and one that is, does not."""
    store = store_at(moto)
    client, place = moto.client(), store.place("t/x")
    joined: list[object] = []
    store.client.meta.events.register("before-call.s3.CompleteMultipartUpload", lambda **_: joined.append(1))
    file = entry("t/x", BIG)
    moved: list[int] = []
    for at in (0, len(BIG) // 2, len(BIG) - 1):
        bad = BIG[:at] + bytes([BIG[at] ^ 1]) + BIG[at + 1 :]
        with pytest.raises(DamagedError, match="not what was committed"):
            store.upload(
                "t/x",
                ExactSource(source_of(bad), file, moved.append),
                resume=None,
                on_progress=lambda _: None,
            )
        store.discard("t/x")
    assert not joined
    assert "Uploads" not in client.list_multipart_uploads(Bucket=place["Bucket"], Prefix=place["Key"])
    moved.clear()
    good = ExactSource(source_of(BIG), file, moved.append)
    store.upload("t/x", good, resume=None, on_progress=lambda _: None)
    assert sum(moved) == len(BIG)
    assert store.get("t/x") == BIG


def test_gc_gives_up_what_a_killed_conversion_left_open(
    moto: servers.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its note names, and nothing else: parts that nobody sees are paid for all the same."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    store, client = store_at(moto), moto.client()
    place = store.place("zero/a/fp32.pt")
    ours, stranger = (client.create_multipart_upload(**place)["UploadId"] for _ in range(2))
    client.upload_part(**place, UploadId=ours, PartNumber=1, Body=DATA)
    store.put("zero/b/fp32.pt", b"12345")
    write_note(store, NOTE, UploadNote(plan_sha256="p", uploads={"zero/a/fp32.pt": f"{PART_BYTES}:{ours}"}))

    def left() -> list[str]:
        found = client.list_multipart_uploads(Bucket=place["Bucket"], Prefix=place["Key"])
        return sorted(one["UploadId"] for one in found.get("Uploads", []))

    assert run_here(capsys, "gc", store.url, "--dry-run").returncode == 0
    assert left() == sorted([ours, stranger])
    done = run_here(capsys, "gc", store.url)
    assert (done.returncode, "an upload of zero/a/fp32.pt" in done.stdout) == (0, True), done.stderr
    assert left() == [stranger]
    assert "1 objects (5 bytes)" in done.stderr
    assert store.get("zero/b/fp32.pt") == b"12345"
    assert "nothing to remove" in run_here(capsys, "gc", store.url).stdout


def test_what_a_killed_probe_left_open_is_given_up(
    moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, which is a probe's alone, and a day old by the server's clock; nobody else's upload."""
    store = store_at(moto, probed=False)
    places = [store.place(key) for key in ("_ckptd/probe~dead", "global_step1/shard.pt")]
    client = moto.client()
    for place in places:
        client.create_multipart_upload(**place)

    def left() -> list[str]:
        found = client.list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", [])
        return [one["Key"] for one in found if one["Key"] in [place["Key"] for place in places]]

    monkeypatch.setattr("ckptd.storage.stores.s3.probe._LEFT_SECONDS", 1e12)
    store.probe()
    assert len(left()) == 2, "another node may be probing now"
    monkeypatch.undo()
    store.probe()
    assert left() == [places[1]["Key"]]
