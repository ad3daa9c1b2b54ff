"""The S3 store over s3fs has the access that s3fs's own settings give, and no thread of it waits for ever.

That it keeps the same contract is shown by the tests that run over both clients (`either_client`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base import retry
from ckptd.errors import ConfigError, NotPermitted, RemoteUnreachable
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3.parts import PARTS_AT_ONCE
from ckptd.storage.stores.s3.store import S3Store
from tests.faults.transfer_rig import Rig
from tests.stores import servers
from tests.stores.conformance import Meter, Stopped, source_of
from tests.stores.proxy import Fault, answer, proxy
from tests.stores.test_s3 import BIG, PART_BYTES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.stores


@pytest.fixture(autouse=True)
def by_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(servers, "CLIENT", "s3fs")


def store_at(endpoint: str | None, **more: Any) -> S3Store:
    access = servers.access(endpoint, part_size_bytes=PART_BYTES, **more)
    store = open_store(f"s3://{servers.BUCKET}/{secrets.token_hex(4)}", access=access)
    assert isinstance(store, S3Store)
    return store


# --- faults -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["part", "document"])
def test_a_server_that_takes_no_more_bytes_is_left(
    moto: servers.Server, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """aiohttp waits for it without end, also where the connection is closed; the kernel does not."""
    monkeypatch.setattr("ckptd.storage.stores.s3.client.READ_SECONDS", 2)
    monkeypatch.setattr("ckptd.storage.stores.s3.client.ATTEMPTS", 1)
    with proxy(moto.port) as between:
        store = store_at(between.endpoint)
        stalls = Fault("stall", "PUT .*t/x", times=100, after_bytes=1000)
        between.faults.append(stalls)
        with pytest.raises(RemoteUnreachable, match="the connection was lost"):
            if what == "part":
                store.upload("t/x", source_of(BIG), resume=None, on_progress=lambda _: None)
            else:
                store.put("t/x", BIG)
        assert stalls.hits
        between.faults.clear()
        store.put("t/x", b"1")
        assert store.get("t/x") == b"1"


def test_a_request_is_tried_by_one_layer_alone(moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs's five tries around botocore's five would be 25; bytes that are sent again are hashed anew."""
    monkeypatch.setattr("ckptd.storage.stores.s3.client.ATTEMPTS", 2)
    with proxy(moto.port) as between:
        store = store_at(between.endpoint)
        store.probe()
        between.faults.append(Fault("busy", "partNumber=2"))
        assert store.upload("t/x", source_of(BIG), resume=None, on_progress=lambda _: None) == crc64(BIG)
        assert store.get("t/x") == BIG
        assert max(n for (_, part), n in between.parts().items() if part == 2) == 2
        between.requests.clear()
        between.canned = answer("503 Slow Down", "SlowDown")
        with pytest.raises(Exception, match="SlowDown"):
            store.put("t/y", b"1")
        assert len(between.requests) == 2


class _Slow(Meter):
    """A source that waits in each read, as a rate limit makes it."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        time.sleep(0.2)
        return super().read_into(offset, buffer)


def test_nothing_reads_the_source_once_the_upload_has_ended(moto: servers.Server) -> None:
    """A server that refuses in the middle of a body: the file may be closed when the failure is told."""
    with proxy(moto.port) as between:
        store = store_at(between.endpoint)
        between.canned_for, between.canned = "partNumber", answer("403 Forbidden", "AccessDenied")
        meter = _Slow(BIG)
        with pytest.raises(NotPermitted):
            store.upload("t/x", meter, resume=None, on_progress=lambda _: None)
        asked = meter.asked
        time.sleep(0.5)
        assert meter.asked == asked < len(BIG)


def test_a_stop_ends_every_request_at_once(moto: servers.Server) -> None:
    """What the source raises is what the caller gets, and no part is tried again."""
    with proxy(moto.port) as between:
        store = store_at(between.endpoint)
        started = time.monotonic()
        with pytest.raises(Stopped):
            store.upload("t/x", Meter(BIG, 2 << 20), resume=None, on_progress=lambda _: None)
        assert time.monotonic() - started < 20
        assert max(between.parts().values(), default=0) <= 1
        assert store.upload("t/y", source_of(BIG), resume=None, on_progress=lambda _: None) == crc64(BIG)


def test_slow_sources_do_not_hold_up_other_requests(moto: servers.Server) -> None:
    """Bodies are read beside the event loop, which all requests share."""
    store = store_at(moto.endpoint)
    store.put("t/warm", b"1")
    gate, held = threading.Event(), threading.Event()

    class Waits(Meter):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            held.set()
            gate.wait(60)
            return super().read_into(offset, buffer)

    upload = threading.Thread(
        target=store.upload, args=("t/x", Waits(BIG)), kwargs={"resume": None, "on_progress": lambda _: None}
    )
    upload.start()
    assert held.wait(60)
    try:
        assert store.get("t/warm") == b"1"
    finally:
        gate.set()
        upload.join()
    assert store.get("t/x") == BIG


def test_a_child_killed_in_mid_upload_goes_on(
    tmp_path: Path, moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 while parts move: what the server holds is not sent again, and there is one COMMIT."""
    monkeypatch.setattr(retry, "backoff_seconds", lambda tries: 0.2)
    with proxy(moto.port) as between:
        between.latency_seconds = 0.1
        access = {"endpoint_url": between.endpoint, "part_size_bytes": PART_BYTES, "client": "s3fs"}
        rig = Rig(tmp_path, f"s3://{servers.BUCKET}/killed", access=access)
        try:
            folder = rig.save(1, 60)
            rig.until("parts", lambda: between.parts().total() >= 6)
            rig.kill_child()
            rig.upload()
        finally:
            rig.close()
        client, where = moto.client(), {"Bucket": servers.BUCKET}
        for path in folder.iterdir():
            found = client.get_object(**where, Key=f"killed/{folder.name}/{path.name}")["Body"].read()
            assert found == path.read_bytes(), path.name
        assert sum(n - 1 for n in between.parts().values()) <= PARTS_AT_ONCE
        assert "Uploads" not in client.list_multipart_uploads(**where, Prefix="killed/")


# --- access -----------------------------------------------------------------------------------------------


def signed(store: S3Store) -> list[dict[str, str]]:
    """The headers of each request that the store sends from now on."""
    seen: list[dict[str, str]] = []

    def note(request: Any, **_: Any) -> None:
        seen.append(
            {k.lower(): v.decode() if isinstance(v, bytes) else v for k, v in request.headers.items()}
        )

    store.client.meta.events.register("before-send.s3", note)
    return seen


def test_anonymous_and_requester_pays(moto: servers.Server) -> None:
    """Every request says so, of each kind; botocore's client alone cannot."""
    access = {"storage_options": (("anon", "true"), ("requester_pays", "true"))}
    store = store_at(moto.endpoint, **access)
    moto.client().put_object(**store.place("t/a"), Body=b"1", ACL="public-read")
    seen = signed(store)
    store.upload("t/x", source_of(BIG), resume=None, on_progress=lambda _: None)
    assert store.get("t/a") == b"1"
    assert store.stat("t/a")
    assert len(seen) >= 7
    assert all("authorization" not in headers for headers in seen)
    assert all(headers.get("x-amz-request-payer") == "requester" for headers in seen)


def test_a_file_of_credentials_and_a_profile_win_over_the_environment(
    rclone: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = f"aws_access_key_id = {servers.ACCESS_KEY}\naws_secret_access_key = {servers.SECRET_KEY}\n"
    (tmp_path / "keys").write_text(f"[default]\n{right}")
    (tmp_path / "config").write_text(f"[profile team]\n{right}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(NotPermitted, match="secret key is wrong"):
        store_at(rclone.endpoint).put("a", b"1")
    store_at(rclone.endpoint, credentials=f"file:{tmp_path}/keys").put("a", b"1")
    store_at(rclone.endpoint, credentials="profile:team").put("a", b"1")
    store_at(rclone.endpoint, storage_options=(("profile", '"team"'),)).put("a", b"1")
    for access in ({"credentials": "profile:nobody"}, {"storage_options": (("profile", '"nobody"'),)}):
        with pytest.raises(NotPermitted, match="no AWS profile 'nobody'"):
            store_at(rclone.endpoint, **access).put("a", b"1")


def ckptd(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command in an environment without AWS's variables."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    quiet = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
    command = [sys.executable, "-m", "ckptd", *words]
    environment = plain | quiet | environ
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)


def test_settings_of_fsspec_reach_the_process_that_speaks_to_the_bucket(
    rclone: servers.Server, tmp_path: Path
) -> None:
    """FSSPEC_S3_* and fsspec's files: endpoint and keys stand there alone, and no secret is printed."""
    url = f"s3://{servers.BUCKET}/{secrets.token_hex(4)}"
    (tmp_path / "run").mkdir()
    job = tmp_path / "job.toml"
    job.write_text(f'save_dir = "{tmp_path}/run"\n[[remote]]\nname = "s3"\nurl = "{url}"\nclient = "s3fs"\n')
    variables = {
        "FSSPEC_S3_ENDPOINT_URL": rclone.endpoint,
        "FSSPEC_S3_KEY": servers.ACCESS_KEY,
        "FSSPEC_S3_SECRET": servers.SECRET_KEY,
    }
    done = ckptd("check", str(job), "--init-remote", **variables)
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0, shown + done.stderr
    assert "client s3fs" in shown
    assert "bodies signed with SHA-256 over plain http to another machine, else not" in shown
    settings = {"endpoint_url": rclone.endpoint, "key": servers.ACCESS_KEY, "secret": servers.SECRET_KEY}
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "s3.json").write_text(json.dumps({"s3": settings}))
    folder = {"FSSPEC_CONFIG_DIR": str(tmp_path / "conf"), "CKPTD_REMOTE_CLIENT": "s3fs"}
    found = ckptd("list", url, **folder)
    assert found.returncode == 0, found.stderr
    wrong = ckptd("list", url, **folder, FSSPEC_S3_SECRET="Hunter2Hidden")
    assert servers.SECRET_KEY not in done.stdout + done.stderr + found.stdout + found.stderr
    assert "Hunter2Hidden" not in wrong.stdout + wrong.stderr


def test_what_is_missing_or_misspelt_is_said(moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="argument 'profil'"):
        store_at(moto.endpoint, storage_options=(("profil", '"x"'),)).stat("a")
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        with pytest.raises(NotPermitted, match="no AWS credentials were found") as without:
            store_at(moto.endpoint).stat("a")
    assert "FSSPEC_S3_KEY" in without.value.hint
    assert "anon = true" in without.value.hint
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        store_at(moto.endpoint)
    assert 'pip install "ckptd[s3]"' in caught.value.hint


@pytest.mark.parametrize(("client", "wanted"), [("botocore", False), ("s3fs", True)])
def test_a_process_imports_what_its_client_needs(moto: servers.Server, client: str, wanted: bool) -> None:
    """The other client would cost it some 20 MiB (docs/adr/0200)."""
    program = (
        "import sys; from ckptd.storage.stores.open import open_store; "
        "from ckptd.storage.stores.access import Access; "
        f"store = open_store('s3://{servers.BUCKET}/x', access=Access(endpoint_url='{moto.endpoint}', "
        f"client='{client}')); store.stat('a'); "
        "print(sorted({'s3fs', 'aiohttp', 'aiobotocore'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout.strip() != "[]") is wanted
