"""The S3 suite on Ceph's RADOS gateway, where `make rgw-packages` was run (CKPTD_FULL=1, adr/0089).

Real production code: it checks signatures and Content-MD5, heeds If-None-Match on PUT but not on Complete,
keeps no CRC64, and its ETags are MD5s, also of what it encrypts.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.errors import CkptdError, ConfigError, NotPermitted, VerifyError
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3.parts import PARTS_AT_ONCE
from ckptd.storage.stores.s3.store import S3Store
from tests.stores import rgw as cluster
from tests.stores import servers
from tests.stores.conformance import DATA, StoreConformance, send
from tests.stores.proxy import proxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.stores, pytest.mark.root]

PART_BYTES = 5 << 20
BIG = DATA * 6

if os.environ.get("CKPTD_FULL"):

    @pytest.fixture(autouse=True)
    def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in servers.environment().items():
            monkeypatch.setenv(name, value)

    @pytest.fixture(scope="module")
    def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
        reason = cluster.missing()
        if reason is not None:
            pytest.skip(reason)
        root: Path = tmp_path_factory.mktemp("rgw")
        with cluster.rgw(root) as server:
            yield server

    def store_at(endpoint: str, *, probed: bool = True, **more: Any) -> S3Store:
        access = servers.access(endpoint, part_size_bytes=PART_BYTES, **more)
        store = open_store(f"s3://{servers.BUCKET}/{secrets.token_hex(4)}", access=access)
        assert isinstance(store, S3Store)
        if probed:
            store.probe()
        return store

    class TestRgw(StoreConformance):
        window_bytes = PART_BYTES
        data = BIG
        proof = "part-etags"
        at_once = PARTS_AT_ONCE

        @pytest.fixture
        def store(self, rgw: servers.Server) -> S3Store:
            return store_at(rgw.endpoint)

    def test_what_the_gateway_was_seen_to_do(rgw: servers.Server) -> None:
        can = store_at(rgw.endpoint).abilities
        assert (can.create_only, can.complete_only_absent, can.resumable) == (True, False, True)
        assert (can.checksum, can.part_etags, can.joined_etags, can.content_md5) == (None, True, True, True)

    @pytest.mark.parametrize(
        "more",
        [{"sse": "aws:kms", "sse_kms_key_id": "testkey"}, {"sign_payload": True}],
        ids=lambda more: "-".join(more),
    )
    def test_options(rgw: servers.Server, more: dict[str, Any]) -> None:
        """What is encrypted or signed is proved as everything else, and comes back as it was."""
        store = store_at(rgw.endpoint, **more, tags=(("team", "nlp"),), storage_class="STANDARD")
        send(store, "t/big", BIG)
        send(store, "t/small", DATA)
        assert store.put_if_absent("_ckptd/x.json", b"{}")
        send(store, "t/tiny", DATA[:999])
        for key, data in (("t/big", BIG), ("t/small", DATA), ("t/tiny", DATA[:999])):
            assert store.verify(key, len(data), crc64(data), lambda done: None) == store.abilities.proof
        for key, data in (("t/big", BIG), ("t/small", DATA), ("_ckptd/x.json", b"{}")):
            assert store.get(key) == data
            place = store.place(key)
            assert rgw.client().head_object(**place).get("ServerSideEncryption") == more.get("sse")
            tags = rgw.client().get_object_tagging(**place).get("TagSet", [])
            assert tags == ([{"Key": "team", "Value": "nlp"}] if key != "t/big" else [])
        assert "tags are ignored on objects that are sent in parts" in store.abilities.notes

    def test_encryption_that_is_ignored_is_no_encryption(rgw: servers.Server) -> None:
        """Ceph 16 takes the header of SSE-S3 and stores in the clear: nothing is uploaded there then."""
        with pytest.raises(ConfigError, match='sse = "AES256" is ignored by the server'):
            store_at(rgw.endpoint, sse="AES256")

    def test_a_class_and_a_key_that_it_does_not_know(rgw: servers.Server) -> None:
        wrong: list[dict[str, Any]] = [
            {"storage_class": "NO_SUCH"},
            {"sse": "aws:kms", "sse_kms_key_id": "nobody"},
        ]
        for more in wrong:
            with pytest.raises(CkptdError):
                store_at(rgw.endpoint, **more)

    def test_a_bit_that_flips_on_its_way(rgw: servers.Server) -> None:
        with proxy(rgw.port) as between:
            store = store_at(between.endpoint)
            between.flip_in = "partNumber=3"
            send(store, "t/x", BIG)
            assert max(between.parts().values()) == 2
            assert store.verify("t/x", len(BIG), crc64(BIG), lambda done: None) == "part-etags"
            signed = store_at(between.endpoint, sign_payload=True)
            between.flip_in = "PUT"
            with pytest.raises(CkptdError):
                send(signed, "t/y", DATA)
            assert signed.stat("t/y") is None
            with pytest.raises(VerifyError):
                between.flip_in = "PUT"
                send(store, "t/z", DATA)
                store.verify("t/z", len(DATA), crc64(DATA), lambda done: None)

    def test_wrong_keys(rgw: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(NotPermitted, match="SignatureDoesNotMatch"):
            store_at(rgw.endpoint)
