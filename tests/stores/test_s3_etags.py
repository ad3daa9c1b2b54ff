"""ETags as a proof: believed where the probe saw MD5s; what changed on its way is found (adr/0089)."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.errors import VerifyError
from ckptd.storage.child.service import Service
from ckptd.storage.remote.messages import Attach, Failed, UploadResult
from ckptd.storage.stores.base import ResumePoint
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3 import client as s3_client
from ckptd.storage.stores.s3 import parts
from ckptd.storage.stores.s3.store import S3Store
from tests.stores import servers
from tests.stores.conformance import DATA, Meter, Stopped, send, source_of
from tests.stores.proxy import proxy
from tests.stores.scene import Node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptd.storage.stores.base import Progress
    from tests.stores.proxy import Proxy

pytestmark = pytest.mark.stores

PART_BYTES = 5 << 20
BIG = DATA * 3
"""12 MiB and a bit: three parts of 5 MiB."""
_ETAG = re.compile(rb'(?i)(?<=etag: ")[0-9a-f]{32}|(?<=<ETag>&quot;)[0-9a-f]{32}|(?<=<ETag>")[0-9a-f]{32}')
_OTHER = bytes.maketrans(b"0123456789abcdef", b"fedcba9876543210")


@pytest.fixture(autouse=True)
def credentials(either_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1)


@pytest.fixture
def between(moto: servers.Server) -> Iterator[Proxy]:
    with proxy(moto.port) as made:
        yield made


def store_at(endpoint: str, *, read_back: bool = True, **more: Any) -> S3Store:
    access = servers.access(endpoint, part_size_bytes=PART_BYTES, **more)
    store = open_store(f"s3://{servers.BUCKET}/{secrets.token_hex(4)}", access=access, read_back=read_back)
    assert isinstance(store, S3Store)
    store.probe()
    return store


def verified(store: S3Store, key: str = "t/x", data: bytes = BIG) -> str:
    return store.verify(key, len(data), crc64(data), lambda done: None)


def disguise(data: bytes) -> bytes:
    """Every ETag by another of the same length; done twice, it is the first again."""
    return _ETAG.sub(lambda found: found[0].translate(_OTHER), data)


def test_a_proof_without_reading_back(between: Proxy) -> None:
    """Nothing of the object comes back over the network, in one request or in parts."""
    store = store_at(between.endpoint)
    between.requests.clear()
    send(store, "t/x", BIG)
    send(store, "t/y", DATA)
    assert verified(store) == verified(store, "t/y", DATA) == "part-etags"
    assert between.count("GET") == 0
    # asked once more, it is not remembered but read
    assert verified(store) == "read-back"


def test_other_bytes_under_the_key_are_no_proof(between: Proxy, moto: servers.Server) -> None:
    """Replaced between sending and proving: the ETag is another, reading shows what is there."""
    store = store_at(between.endpoint)
    for data in (BIG, DATA):
        send(store, "t/x", data)
        moto.client().put_object(**store.place("t/x"), Body=data[:-1] + b"!")
        with pytest.raises(VerifyError, match="ckptd removes it"):
            verified(store, data=data)
        store.delete("t/x")


@pytest.mark.parametrize("data", [BIG, DATA], ids=["parts", "whole"])
def test_a_bit_that_flips_on_its_way(between: Proxy, moto: servers.Server, data: bytes) -> None:
    """A part is sent again at once; an object in one request is found when it is verified."""
    store = store_at(between.endpoint)
    between.flip_in = "partNumber=2" if data is BIG else "PUT"
    if data is BIG:
        send(store, "t/x", data)
        assert between.parts()[f"/{servers.BUCKET}/{store.place('t/x')['Key']}", 2] == 2
        assert verified(store) == "part-etags"
        assert store.get("t/x") == data
        return
    send(store, "t/x", data)
    with pytest.raises(VerifyError):
        verified(store, data=data)


def test_a_line_that_always_changes_bytes_is_named(between: Proxy) -> None:
    store = store_at(between.endpoint)
    between.flip_all_in = "partNumber=1"
    with pytest.raises(VerifyError, match="part 1 of t/x arrived changed 3 times"):
        send(store, "t/x", BIG)
    assert store.stat("t/x") is None


def test_nothing_is_left_of_an_upload_whose_line_changes_bytes(between: Proxy, moto: servers.Server) -> None:
    """The part that arrived changed is listed by the server: nobody may go on with it, but others' stay."""
    store = store_at(between.endpoint)
    place = store.place("t/x")
    stranger = moto.client().create_multipart_upload(**place)["UploadId"]
    between.flip_all_in = "partNumber="
    with pytest.raises(VerifyError, match="arrived changed 3 times"):
        send(store, "t/x", BIG)
    left = moto.client().list_multipart_uploads(Bucket=place["Bucket"], Prefix=place["Key"])["Uploads"]
    assert [one["UploadId"] for one in left] == [stranger]


def test_a_listed_part_that_arrived_changed_is_sent_again(between: Proxy, moto: servers.Server) -> None:
    """It could not be given up: the line broke, the process died. Who goes on looks at the ETags."""
    store = store_at(between.endpoint)
    place, client = store.place("t/x"), moto.client()
    upload_id = client.create_multipart_upload(**place)["UploadId"]
    for number in (1, 2):
        part = BIG[(number - 1) * PART_BYTES : number * PART_BYTES]
        part = part if number == 1 else part[:-1] + b"!"
        client.upload_part(**place, UploadId=upload_id, PartNumber=number, Body=part)
    between.requests.clear()
    resume = ResumePoint(token=f"{PART_BYTES}:{upload_id}")
    store.upload("t/x", source_of(BIG), resume=resume, on_progress=lambda _: None)
    sent = between.parts()
    path = f"/{servers.BUCKET}/{place['Key']}"
    assert {number: sent[path, number] for number in (1, 2, 3)} == {1: 0, 2: 1, 3: 1}
    assert store.get("t/x") == BIG


def test_an_upload_that_was_continued_is_read_back(between: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compared the parts of the process that died with what this one reads."""
    monkeypatch.setattr(parts, "PARTS_AT_ONCE", 1)
    store = store_at(between.endpoint)
    seen: list[Progress] = []
    with pytest.raises(Stopped):
        store.upload("t/x", Meter(BIG, 2 * PART_BYTES), resume=None, on_progress=seen.append)
    last = seen[-1]
    assert last.flushed_bytes == 2 * PART_BYTES
    resume = ResumePoint(flushed_bytes=last.flushed_bytes, crc64=last.crc64, token=last.token)
    store.upload("t/x", source_of(BIG), resume=resume, on_progress=lambda _: None)
    assert verified(store) == "read-back"


def test_a_server_whose_etags_are_no_md5s_is_found_by_the_probe(between: Proxy) -> None:
    """Ciphertext, a version, a clock: each object is read back, none is sent twice."""
    between.rewrite = disguise
    store = store_at(between.endpoint)
    assert store.abilities.proof == "read-back"
    assert not store.abilities.part_etags
    assert any("ETags are no MD5s" in note for note in store.abilities.notes)
    between.requests.clear()
    send(store, "t/x", BIG)
    assert between.parts().total() == 3
    assert verified(store) == "read-back"


def test_a_server_whose_etags_are_md5s_of_small_objects_alone(between: Proxy) -> None:
    """What the probe could not see is no proof either, and no damage: it is read back, and stays."""
    store = store_at(between.endpoint)
    send(store, "t/x", BIG)
    between.rewrite = disguise
    assert verified(store) == "read-back"
    assert store.get("t/x") == BIG


def test_content_md5_where_etags_show_nothing(rclone: servers.Server) -> None:
    """It is enforced there: a part that changed is refused, and never part of anything."""
    with proxy(rclone.port) as between:
        between.rewrite = disguise
        store = store_at(between.endpoint)
        assert (store.abilities.part_etags, store.abilities.content_md5) == (False, True)
        heads: list[Any] = []
        store.client.meta.events.register(
            "before-send.s3", lambda request, **_: heads.append(request.headers.get("Content-MD5"))
        )
        meter = Meter(BIG)
        store.upload("t/x", meter, resume=None, on_progress=lambda _: None)
        assert sum(one is not None for one in heads) == 3
        assert meter.asked == 2 * len(BIG)
        assert verified(store) == "read-back"
        between.flip_in = "PUT"
        with pytest.raises(VerifyError, match="arrived changed"):
            send(store, "t/y", DATA)
        assert store.stat("t/y") is None


def test_who_wants_to_read_back_reads_back(between: Proxy) -> None:
    """`verify = "read-back"`: no MD5 is computed, and the probe does not call the server a weak one."""
    store = store_at(between.endpoint, verify="read-back")
    assert store.abilities.notes == ()
    send(store, "t/x", BIG)
    between.requests.clear()
    assert verified(store) == "read-back"
    assert between.count("GET") > 0


def test_nothing_is_hashed_where_nothing_is_proved(between: Proxy) -> None:
    store = store_at(between.endpoint, read_back=False)
    send(store, "t/x", BIG)
    assert not store.wants_md5
    assert verified(store) == "none"


@pytest.mark.botocore
def test_a_server_whose_etags_stop_being_md5s_is_probed_again(between: Proxy, tmp_path: Path) -> None:
    """Somebody gave the bucket encryption by keys of its own: the next attempt finds out what it can do."""
    answers: list[Any] = []
    service = Service(lambda _, answer: answers.append(answer))
    node = Node(tmp_path / "save")
    node.write_all()
    node.write({"big.bin": BIG})
    access = servers.access(between.endpoint, part_size_bytes=PART_BYTES)
    url = f"s3://{servers.BUCKET}/{secrets.token_hex(4)}"
    settings = node.settings(url, access=access, may_initialise=True)
    service.expect(settings)
    service.carry_out(1, Attach(settings=settings))
    between.rewrite = lambda data: _ETAG.sub(lambda found: found[0].translate(_OTHER), data)
    for number in (2, 3):
        service.carry_out(number, node.order(node.sealed()))
    failed, uploaded = (one for one in answers if isinstance(one, Failed | UploadResult))
    assert isinstance(failed, Failed)
    assert failed.error == "VerifyError"
    assert isinstance(uploaded, UploadResult)
    assert uploaded.outcome == "committed"
