"""A real daemon with an S3 remote: killed in mid-upload, a server that goes away, and every wrong setting.

Parts are counted at the network, by a proxy between daemon and server: what a restart sends again
is seen, not believed.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.errors import (
    CkptdError,
    NoSpaceError,
    NotPermitted,
    RemoteNotOurs,
    RemoteUnreachable,
    StorageError,
)
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3.parts import PARTS_AT_ONCE
from tests.e2e.harness import children_of, made_before
from tests.e2e.s3_node import BIG_RUN, PREFIX, S3Node, s3_node
from tests.stores import servers
from tests.stores.proxy import Proxy, answer, proxy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults, pytest.mark.stores]

SLOW = 'bandwidth = "25MB/s"'
ZERO_ONLY = 'forms = ["zero"]'


real_saves = made_before(BIG_RUN)


def remote_child(pid: int) -> int:
    """The daemon's child that speaks to the remote."""
    for child in children_of(pid):
        with open(f"/proc/{child}/cmdline", "rb") as stream:
            if b"ckptd.storage.child.child" in stream.read():
                return child
    raise AssertionError("no remote child")


def sent_twice(between: Proxy) -> dict[str, int]:
    """Key → parts of it that were sent more than once."""
    found: dict[str, int] = {}
    for (key, _), count in between.parts().items():
        found[key] = found.get(key, 0) + count - 1
    return found


def _has_sent(between: Proxy, parts: int) -> bool:
    return between.parts().total() >= parts


KILLS = [("moto", "daemon")]
if os.environ.get("CKPTD_FULL"):
    KILLS += [("moto", "child"), ("rclone", "daemon"), ("rclone", "child")]


@pytest.mark.parametrize(("kind", "who"), KILLS)
def test_killed_in_mid_upload_sends_at_most_the_parts_in_flight_again(
    tmp_path: Path, kind: str, who: str, request: pytest.FixtureRequest
) -> None:
    """kill -9 three times while parts move: each upload goes on; a stranger's upload is left alone (P7)."""
    server: servers.Server = request.getfixturevalue(kind)
    with (
        proxy(server.port) as between,
        s3_node(tmp_path, server, between.endpoint, remote=f"{SLOW}\n{ZERO_ONLY}") as here,
    ):
        foreign = here.client.create_multipart_upload(
            Bucket=here.bucket, Key=f"{PREFIX}/global_step1/foreign"
        )
        daemon = here.start()
        here.save(1, BIG_RUN)
        kills = 0
        for parts in (2, 7, 13) if who == "daemon" else (3, 9):
            here.wait(f"{parts} parts", partial(_has_sent, between, parts), 60)
            victim = remote_child(daemon.pid) if who == "child" else daemon.pid
            os.kill(victim, signal.SIGKILL)
            kills += 1
            if who == "daemon":
                daemon.wait()
                daemon = here.start()
        here.wait_committed("global_step1~g1", 200)
        assert here.holds("global_step1", BIG_RUN, 1)
        again = sent_twice(between)
        assert sum(again.values()) <= kills * PARTS_AT_ONCE, between.parts()
        assert max(between.parts().values()) <= 1 + kills
        left = {u["UploadId"]: u["Key"] for u in here.uploads()}
        assert left.pop(foreign["UploadId"], None), "the stranger's"
        # killed between the answer to its beginning and the note of its id: nobody can know whose it is
        assert len(left) <= kills
        where = {"Bucket": here.bucket}
        held = [
            here.client.list_parts(**where, Key=key, UploadId=one).get("Parts") for one, key in left.items()
        ]
        assert not any(held), left


@pytest.mark.full
def test_the_answer_to_complete_is_lost(tmp_path: Path, moto: servers.Server) -> None:
    """The parts are joined, the answer never comes: found by looking, nothing is sent again."""
    with (
        proxy(moto.port) as between,
        s3_node(tmp_path, moto, between.endpoint, remote=ZERO_ONLY) as here,
    ):
        between.lose_answers_to = "POST /training/run/global_step1/bf16_zero_pp_rank_0"
        here.start()
        here.save(1, BIG_RUN)
        here.wait("a lost answer", lambda: between.count("POST", "uploadId="), 60)
        time.sleep(1)
        between.lose_answers_to = None
        here.wait_committed("global_step1~g1", 200)
        assert here.holds("global_step1", BIG_RUN, 1)
        assert sum(sent_twice(between).values()) <= 1


def test_a_bit_that_flips_on_the_way_is_seen(tmp_path: Path, moto: servers.Server) -> None:
    """The server says 200 to other bytes than were read: the part's ETag shows it, it is sent again (P2)."""
    key = "global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with (
        proxy(moto.port) as between,
        s3_node(tmp_path, moto, between.endpoint, remote=ZERO_ONLY) as here,
    ):
        between.flip_in = f"{key}?uploadId="
        here.start()
        here.save(1, BIG_RUN)
        here.wait_committed("global_step1~g1", 200)
        assert not between.flip_in
        assert sum(sent_twice(between).values()) == 1
        assert here.holds("global_step1", BIG_RUN, 1)


def test_a_server_that_goes_away_and_comes_back(tmp_path: Path, moto: servers.Server) -> None:
    """Connections break and are refused: said in status, nothing local goes, heals by itself."""
    with (
        proxy(moto.port) as between,
        s3_node(tmp_path, moto, between.endpoint, local="save_total_limit = 1", remote=ZERO_ONLY) as here,
    ):
        here.start()
        here.save(1, BIG_RUN)
        here.wait_committed("global_step1~g1", 60)
        between.away = True
        between.cut()
        here.save(2, BIG_RUN)
        here.wait("said", lambda: "remote-unreachable" in here.problems(), 60)
        text = next(p["text"] for p in here.status()["problems"] if p["code"] == "remote-unreachable")
        assert "nothing answers" in text or "connection was lost" in text, text
        time.sleep(3)
        assert here.local_tags() == {"global_step1", "global_step2"}
        between.away = False
        here.wait_committed("global_step2~g1", 120)
        here.wait("well again", lambda: set(here.problems()) <= {"link-slow"}, 60)
        here.wait("the limit", lambda: here.local_tags() == {"global_step2"}, 60)


SKEWED = answer("403 Forbidden", "RequestTimeTooSkewed")
WRONG_REGION = answer("400 Bad Request", "AuthorizationHeaderMalformed", region="eu-west-3")
REFUSALS = [
    (SKEWED, RemoteUnreachable, "clock is", "NTP"),
    (answer("301 Moved Permanently", "PermanentRedirect"), RemoteNotOurs, "another region", "set region"),
    (WRONG_REGION, RemoteNotOurs, "another region", 'region = "eu-west-3"'),
    (answer("403 Forbidden", "InvalidAccessKeyId"), NotPermitted, "access key is not known", "credentials"),
    (answer("403 Forbidden", "AccessDenied"), NotPermitted, "access is denied", "PutObject"),
    (answer("404 Not Found", "NoSuchBucket"), RemoteNotOurs, "no bucket training", "create it"),
    (answer("507 Insufficient Storage", "XMinioStorageFull"), NoSpaceError, "XMinioStorageFull", ""),
    (answer("503 Slow Down", "SlowDown"), RemoteUnreachable, "503 SlowDown", "by itself"),
    (answer("418 Teapot", "Teapot", message="short and stout"), StorageError, "short and stout", ""),
]


@pytest.mark.parametrize(
    ("canned", "kind", "said", "next_step"), REFUSALS, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_a_server_refuses_is_one_sentence(
    moto: servers.Server,
    monkeypatch: pytest.MonkeyPatch,
    canned: bytes,
    kind: type[CkptdError],
    said: str,
    next_step: str,
) -> None:
    """Words that name the cause and the next step; when the cause is gone the same store goes on."""
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    with proxy(moto.port) as between:
        store = open_store(f"s3://{servers.BUCKET}/words", access=servers.access(between.endpoint))
        between.canned = canned
        with pytest.raises(kind) as caught:
            store.get("_ckptd/remote.json")
        assert type(caught.value) is kind
        assert said in caught.value.message
        assert next_step in caught.value.hint
        assert between.endpoint in caught.value.message
        between.canned = None
        assert store.get("_ckptd/remote.json") is None


@pytest.mark.full
def test_a_clock_that_is_off_is_said_in_status_and_heals(tmp_path: Path, moto: servers.Server) -> None:
    """The whole way to `status`, and back."""
    with (
        proxy(moto.port) as between,
        s3_node(tmp_path, moto, between.endpoint, remote=ZERO_ONLY) as here,
    ):
        between.canned = SKEWED
        here.start()
        here.save(1, BIG_RUN)
        problem = _problem(here, "remote-unreachable")
        assert "clock is" in problem["text"]
        assert "NTP" in problem["next_step"]
        assert here.local_tags() == {"global_step1"}
        between.canned = None
        here.wait_committed("global_step1~g1", 60)
        here.wait("well again", lambda: set(here.problems()) <= {"link-slow"}, 30)


def _problem(here: S3Node, code: str) -> dict[str, Any]:
    here.wait(code, lambda: code in here.problems(), 40)
    found: dict[str, Any] = next(p for p in here.status()["problems"] if p["code"] == code)
    return found


def test_wrong_keys_at_a_server_that_checks_them(tmp_path: Path, rclone: servers.Server) -> None:
    """Real signatures: a wrong secret is denied; a corrected credentials file heals without a restart."""
    keys = tmp_path / "keys"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    keys.write_text(text.format(servers.ACCESS_KEY, "wrong-secret"))
    remote = f'{ZERO_ONLY}\ncredentials = "file:{keys}"'
    with s3_node(tmp_path, rclone, remote=remote) as here:
        here.start()
        here.save(1, BIG_RUN)
        problem = _problem(here, "remote-denied")
        assert "secret key is wrong" in problem["text"] or "access is denied" in problem["text"], problem
        assert "wrong-secret" not in here.log.read_text()
        keys.write_text(text.format(servers.ACCESS_KEY, servers.SECRET_KEY))
        here.wait_committed("global_step1~g1", 120)
        assert here.holds("global_step1", BIG_RUN, 1)


def test_no_credentials_no_profile_no_bucket_no_server(tmp_path: Path, moto: servers.Server) -> None:
    """Each by name, from `ckptd check` too."""
    with s3_node(
        tmp_path / "a", moto, environment={"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    ) as here:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            here.environment[name] = ""
        here.environment["AWS_SHARED_CREDENTIALS_FILE"] = "/dev/null"
        done = here.ckptd("check", here.job_file)
        assert "no AWS credentials were found" in done.stdout, done.stdout
        assert done.returncode == 77
    with s3_node(tmp_path / "b", moto, remote='credentials = "profile:nobody"') as here:
        here.start()
        here.save(1, BIG_RUN)
        assert "no AWS profile 'nobody'" in _problem(here, "remote-denied")["text"]
    with s3_node(tmp_path / "c", moto, url="s3://not-there/run") as here:
        here.start()
        here.save(1, BIG_RUN)
        assert "no bucket not-there" in _problem(here, "remote-not-ours")["text"]
        here.client.create_bucket(Bucket="not-there")
        here.wait("healed", lambda: not here.problems(), 90)
    with s3_node(tmp_path / "d", moto, endpoint=f"http://127.0.0.1:{servers.free_port()}") as here:
        here.start()
        here.save(1, BIG_RUN)
        assert "nothing answers at 127.0.0.1" in _problem(here, "remote-unreachable")["text"]


@pytest.mark.full
def test_check_shows_what_each_server_can_do(
    tmp_path: Path, moto: servers.Server, rclone: servers.Server
) -> None:
    """Abilities in words; a server that ignores conditions is a note, not a surprise (P10)."""
    with s3_node(tmp_path / "moto", moto) as here:
        done = here.ckptd("check", here.job_file, "--init-remote")
        assert done.returncode == 0, done.stdout
        assert "create-only writes are enforced" in done.stdout
        assert "verified by part-etags" in done.stdout
    with s3_node(tmp_path / "rclone", rclone) as here:
        done = here.ckptd("check", here.job_file, "--init-remote")
        assert done.returncode == 0, done.stdout
        assert "If-None-Match is ignored" in done.stdout
        assert "ETags of joined parts are no MD5s: each object is read back" in " ".join(done.stdout.split())
        assert "only one node may write there" in done.stdout
        assert "parts cannot be listed" not in done.stdout
