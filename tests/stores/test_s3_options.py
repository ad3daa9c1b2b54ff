"""What a job file says of S3 arrives with every request that needs it, on a real server (adr/0089)."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.errors import CkptdError, ConfigError, NotPermitted, RemoteUnreachable
from ckptd.storage.remote.attach import are_one, attach
from ckptd.storage.remote.messages import Attached, RemoteSettings
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3 import client as s3_client
from ckptd.storage.stores.s3.store import S3Store
from tests.stores import servers
from tests.stores.conformance import DATA, Meter, send
from tests.stores.proxy import answer, proxy

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.stores.base import Progress

pytestmark = pytest.mark.stores

PART_BYTES = 5 << 20
BIG = DATA * 3
"""12 MiB and a bit: three parts of 5 MiB."""
ROLE = "arn:aws:iam::123456789012:role/ckptd"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    # botocore's own retries are no part of the words
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1)


def store_at(endpoint: str, folder: str = "", **more: Any) -> S3Store:
    access = servers.access(endpoint, part_size_bytes=PART_BYTES, **more)
    store = open_store(f"s3://{servers.BUCKET}/{folder or secrets.token_hex(4)}", access=access)
    assert isinstance(store, S3Store)
    return store


def nothing(_: object) -> None:
    """Progress that nobody looks at."""


def heads(server: servers.Server, store: S3Store) -> dict[str, dict[str, Any]]:
    """Key → what the server says of the object, its tags among it."""
    client, found = server.client(), {}
    for info in store.list(""):
        place = store.place(info.key)
        tags = client.get_object_tagging(**place)["TagSet"]
        found[info.key] = client.head_object(**place) | {"Tags": {t["Key"]: t["Value"] for t in tags}}
    return found


def test_encryption_class_and_tags_reach_every_object(moto: servers.Server) -> None:
    """In one request or in parts; documents are encrypted and tagged too, but not classed."""
    tags = (("cost center", "a/b = c"), ("team", "nlp+llm"))
    store = store_at(
        moto.endpoint, sse="aws:kms", sse_kms_key_id="alias/ckpt", storage_class="STANDARD_IA", tags=tags
    )
    store.probe()
    send(store, "t/small", b"small")
    send(store, "t/empty", b"")
    send(store, "t/big", BIG)
    store.put("latest", b"t")
    assert store.put_if_absent("_ckptd/commits/t.json", b"{}")
    found = heads(moto, store)
    assert len(found) == 5
    for key, head in found.items():
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "alias/ckpt"), key
        assert head["Tags"] == dict(tags), key
        assert head.get("StorageClass", "STANDARD") == ("STANDARD_IA" if key[:2] == "t/" else "STANDARD"), key


def test_one_bucket_by_two_endpoints_is_one_place_and_a_copy_of_it_another(moto: servers.Server) -> None:
    """The limit of one remote would empty the other, and local checkpoints go since "both" hold them."""
    alias = moto.endpoint.replace("127.0.0.1", "localhost")
    assert alias != moto.endpoint
    first, copy = store_at(moto.endpoint), store_at(moto.endpoint)

    def attached(store: S3Store, url: str) -> Attached:
        who = {"job": "job", "save_dir": "/run", "node": "n0", "node_id": "id-n0"}
        return attach(store, RemoteSettings.model_validate({"name": "s3", "url": url, **who}))

    mine = attached(first, first.url)
    assert are_one(mine, attached(first, f"{first.url}/"))
    prefix = first.url.rpartition("/")[2]
    assert are_one(mine, attached(store_at(alias, prefix), first.url))
    time.sleep(1.1)  # the service tells whole seconds
    for info in list(first.list("_ckptd/remote.json")):
        copy.put(info.key, first.get(info.key) or b"")
    other = attached(copy, copy.url)
    assert other.identity == mine.identity
    assert not are_one(mine, other)


def test_without_options_nothing_is_asked_for(moto: servers.Server) -> None:
    store = store_at(moto.endpoint, sse="AES256")
    send(store, "t/small", b"small")
    plain = store_at(moto.endpoint)
    send(plain, "t/big", BIG)
    assert heads(moto, store)["t/small"]["ServerSideEncryption"] == "AES256"
    head = heads(moto, plain)["t/big"]
    assert head["Tags"] == {}
    assert "StorageClass" not in head
    assert head.get("ServerSideEncryption") in (None, "AES256")


def test_encryption_that_a_server_ignores_is_refused(moto: servers.Server) -> None:
    """Ceph 16 does so with AES256 (test_rgw.py): what was to be encrypted never lies there in the clear."""
    asked = b"x-amz-server-side-encryption: "
    with proxy(moto.port) as between:
        between.rewrite = lambda data: data.replace(asked, asked.replace(b"encryption", b"decoration"))
        store = store_at(between.endpoint, sse="AES256")
        with pytest.raises(ConfigError, match='sse = "AES256" is ignored by the server'):
            store.probe()
        assert list(store.list("")) == []
        store_at(between.endpoint).probe()


def test_a_class_that_the_server_does_not_know_is_said_by_the_probe(moto: servers.Server) -> None:
    with pytest.raises(CkptdError, match="InvalidStorageClass"):
        store_at(moto.endpoint, storage_class="NO_SUCH_CLASS").probe()


@pytest.mark.parametrize(("sign", "is_signed"), [(True, True), (False, False), (None, False)])
def test_bodies_are_signed_where_that_is_wanted(
    moto: servers.Server, sign: bool | None, is_signed: bool
) -> None:
    """Read twice then, but counted, checked and told once."""
    store = store_at(moto.endpoint, sign_payload=sign)
    seen: list[str] = []
    store.client.meta.events.register(
        "before-send.s3", lambda request, **_: seen.append(_text(request.headers["X-Amz-Content-SHA256"]))
    )
    told: list[Progress] = []
    meter = Meter(BIG)
    crc = store.upload("t/x", meter, resume=None, on_progress=told.append)
    assert crc == crc64(BIG) == crc64(store.get("t/x") or b"")
    assert send(store, "t/small", DATA[:999]) == crc64(store.get("t/small") or b"")
    dones = [one.done_bytes for one in told]
    assert dones == sorted(dones)
    assert ("UNSIGNED-PAYLOAD" in seen) is not is_signed
    assert meter.asked == len(BIG) * (2 if is_signed else 1)


def test_the_region_of_the_job_file_signs_whatever_the_environment_says(
    moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the small requests' own way and by botocore's alike."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    heads: list[bytes] = []

    def noted(data: bytes) -> bytes:
        heads.append(data)
        return data

    with proxy(moto.port) as between:
        between.rewrite = noted
        store = store_at(between.endpoint, region="eu-west-3")
        assert send(store, "t/x", BIG) == crc64(store.get("t/x") or b"")
        store.put("t/small", b"1")
    scopes = set(re.findall(rb"/([a-z0-9-]+)/s3/aws4_request", b"".join(heads)))
    assert scopes == {b"eu-west-3"}


def test_plain_http_to_another_machine_is_signed_and_tls_is_not() -> None:
    signs = {
        None: False,
        "https://s3.example.org": False,
        "http://127.0.0.1:9000": False,
        "http://[::1]:9000": False,
        "http://bucket.localhost:9000": False,
        "http://10.0.0.1:9000": True,
        "http://localhost.example.org": True,
    }
    for endpoint, expected in signs.items():
        assert Access(endpoint_url=endpoint).signs_payload is expected, endpoint
        assert Access(endpoint_url=endpoint, sign_payload=not expected).signs_payload is not expected


@pytest.mark.botocore
def test_a_role_is_assumed_with_the_external_id_and_its_keys_sign(moto: servers.Server) -> None:
    """moto's STS gives keys that its S3 sees; the session bears this node's name."""
    asked: list[str] = []
    heard: list[bytes] = []

    def tap(data: bytes) -> bytes:
        heard.append(data)
        return data

    with proxy(moto.port) as between:
        store = store_at(
            moto.endpoint, role_arn=ROLE, external_id="training/7", sts_endpoint_url=between.endpoint
        )
        store.client.meta.events.register(
            "before-send.s3", lambda request, **_: asked.append(_text(request.headers["Authorization"]))
        )
        between.rewrite = tap
        store.put("a", b"1")
        store.put("b", b"2")
        assert between.count("POST") == 1
        assert b"ExternalId=training%2F7" in b"".join(heard)
        assert b"RoleSessionName=ckptd-" in b"".join(heard)
    (key,) = {re.search(r"Credential=(\w+)/", line)[1] for line in asked}  # type: ignore[index]
    assert key.startswith("ASIA")
    assert key != servers.ACCESS_KEY


@pytest.mark.botocore
def test_a_role_that_cannot_be_assumed_is_named(moto: servers.Server, tmp_path: Path) -> None:
    """Nobody at the STS, and nothing to assume it with: whose fault it is stands in the message."""
    away = store_at(moto.endpoint, role_arn=ROLE, sts_endpoint_url=f"http://127.0.0.1:{servers.free_port()}")
    with pytest.raises(RemoteUnreachable, match=f"nothing answers at {away.access.sts_endpoint_url[7:]}"):  # type: ignore[index]
        away.put("a", b"1")
    with proxy(moto.port) as between:
        # STS wraps what S3 answers bare
        text = answer("403 Forbidden", "AccessDenied").replace(b"<Error>", b"<ErrorResponse><Error>")
        text = text.replace(b"</Error>", b"</Error></ErrorResponse>")
        size = len(text.partition(b"\r\n\r\n")[2])
        between.canned = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % size, text)
        denied = store_at(moto.endpoint, role_arn=ROLE, sts_endpoint_url=between.endpoint)
        with pytest.raises(NotPermitted, match="the role may not be assumed: AccessDenied") as caught:
            denied.put("a", b"1")
        assert "external_id" in caught.value.hint
    none = store_at(moto.endpoint, role_arn=ROLE, credentials=f"file:{tmp_path}/none")
    with pytest.raises(NotPermitted, match="is not there"):
        none.put("a", b"1")


def test_virtual_addressing_puts_the_bucket_into_the_name(
    moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such name resolves here, so that the resolver is told; the server finds the bucket by Host alone."""
    real, asked = socket.getaddrinfo, []

    def resolve(host: Any, *more: Any, **named: Any) -> Any:
        asked.append(str(host))
        return real("127.0.0.1" if str(host).endswith(".example.test") else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    endpoint = f"http://s3.example.test:{moto.port}"
    virtual = store_at(endpoint, "v", addressing="virtual")
    virtual.probe()
    send(virtual, "t/big", BIG)
    assert set(asked) == {f"{servers.BUCKET}.s3.example.test"}
    assert store_at(moto.endpoint, "v").get("t/big") == BIG
    asked.clear()
    store_at(endpoint, "v").stat("t/big")
    assert set(asked) == {"s3.example.test"}


def test_a_credential_of_systemd_by_its_bare_name(
    rclone: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    text = (
        f"[default]\naws_access_key_id = {servers.ACCESS_KEY}\naws_secret_access_key = {servers.SECRET_KEY}\n"
    )
    (tmp_path / "s3").write_text(text)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(NotPermitted, match="CREDENTIALS_DIRECTORY") as caught:
        store_at(rclone.endpoint, credentials="file:s3").put("a", b"1")
    assert "LoadCredential=s3:" in caught.value.hint
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    store_at(rclone.endpoint, credentials="file:s3").put("a", b"1")
    store_at(rclone.endpoint, credentials="file:$CREDENTIALS_DIRECTORY/s3").put("a", b"1")


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.botocore
def test_check_prints_what_is_set_and_what_the_store_can_do(moto: servers.Server, tmp_path: Path) -> None:
    """One table per remote, before anything is uploaded; an option that the server refuses fails there."""
    job = tmp_path / "job.toml"
    text = (
        f'save_dir = "{tmp_path}/run"\n[[remote]]\nname = "s3"\nurl = "s3://{servers.BUCKET}/check"\n'
        f'endpoint_url = "{moto.endpoint}"\nsse = "aws:kms"\nsse_kms_key_id = "alias/ckpt"\n'
        f'role_arn = "{ROLE}"\nsts_endpoint_url = "{moto.endpoint}"\ntags = ["team=nlp"]\n'
    )
    command = [sys.executable, "-m", "ckptd", "check", str(job), "--init-remote"]
    environ = {**os.environ, **servers.environment()}

    def check(storage_class: str) -> tuple[int, str]:
        job.write_text(f'{text}storage_class = "{storage_class}"\n')
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environ)
        return done.returncode, " ".join(done.stdout.split())

    code, shown = check("STANDARD_IA")
    assert code == 0, shown
    for words in (
        f"endpoint_url {moto.endpoint}",
        f"role_arn {ROLE}",
        "sse aws:kms",
        "sse_kms_key_id alias/ckpt",
        "storage_class STANDARD_IA; documents in the default class",
        "tags team=nlp",
        "bodies not signed: plain http",
        "create-only enforced by the store",
        "proof part-etags: its ETags are the MD5s of what arrived",
        "a part that changed on its way seen in the part's ETag",
        "an upload that was cut short goes on",
        "joining parts over an object refused by the store",
        "bytes that lie there already copied by the store",
    ):
        assert words in shown, words
    assert servers.SECRET_KEY not in shown
    code, shown = check("NO_SUCH_CLASS")
    assert code == 74, shown
    assert "InvalidStorageClass" in shown
