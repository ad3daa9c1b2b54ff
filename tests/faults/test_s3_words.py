"""Wrong endpoints and broken credentials at an S3 remote: a clear sentence, no secret, well again by itself.

What answers is a real process or a real listening socket; `ckptd` is asked as a user would ask it.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.errors import CkptdError, ConfigError, NotPermitted, RemoteNotOurs, RemoteUnreachable
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.s3 import client as s3_client
from tests.e2e.harness import children_of
from tests.e2e.s3_node import BIG_RUN, s3_node
from tests.stores import servers
from tests.stores.proxy import answer, proxy
from tests.support.real import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.s3_node import S3Node

pytestmark = [pytest.mark.real, pytest.mark.faults, pytest.mark.stores]

HIDDEN = "Hunter2HiddenValue"
ZERO_ONLY = 'forms = ["zero"]'
PAGE = b"<html><body>Welcome</body></html>"


@pytest.fixture(autouse=True)
def credentials(either_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    # botocore's own retries are no part of the words
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1)


class _Pages(http.server.BaseHTTPRequestHandler):
    """A web server that is no S3 server; `status` is what it answers to everything."""

    status = 200

    def _any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Silent."""


for _verb in ("GET", "PUT", "POST", "HEAD", "DELETE"):
    setattr(_Pages, f"do_{_verb}", _Pages._any)


@contextlib.contextmanager
def pages(status: int) -> Iterator[str]:
    handler = type("Pages", (_Pages,), {"status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def one_sentence(text: str) -> bool:
    """Something that fits a line of `ckptd status`."""
    return "\n" not in text and "Traceback" not in text and 20 < len(text) < 400


def refusal(endpoint: str | None = None, credentials: str = "env") -> CkptdError:
    """What the first look at a remote ends with; every later question ends with a sentence too."""
    first: list[CkptdError] = []
    access = servers.access(endpoint, credentials=credentials)
    store = open_store(f"s3://{servers.BUCKET}/x", access=access)
    questions: dict[str, Callable[[], object]] = {
        "get": partial(store.get, "_ckptd/remote.json"),
        "probe": store.probe,
        "stat": partial(store.stat, "a"),
        "list": lambda: list(store.list("")),
        "put_if_absent": partial(store.put_if_absent, "a", b"x"),
    }
    for ask, question in questions.items():
        try:
            answered = question()
        except CkptdError as error:
            assert one_sentence(error.message), error.message
            first.append(error)
        else:
            # a web server's 404 to HEAD is an absent key's; nothing else passes for an answer
            assert ask == "stat", (ask, answered)
            assert answered is None
    return first[0]


@pytest.mark.parametrize("status", [200, 400, 404, 405])
def test_a_web_server_does_not_pass_for_s3(status: int) -> None:
    """Above all its 200 is no empty listing."""
    with pages(status) as endpoint:
        error = refusal(endpoint)
    assert type(error) is RemoteNotOurs
    assert "does not speak S3" in error.message
    assert endpoint in error.message
    assert "endpoint_url" in error.hint


def test_an_empty_prefix_means_start_fresh_and_no_bucket_does_not(
    tmp_path: Path, moto: servers.Server
) -> None:
    """`resume` before the first upload: 4 only where the bucket was reached, and holds nothing there."""
    environment = {**os.environ, **servers.environment(moto), "CKPTD_CONFIG_DIR": "/nonexistent"}

    def resume(url: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "ckptd", "resume", str(tmp_path / "run"), url]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        return done.returncode, done.stderr

    new = f"s3://{servers.BUCKET}/never-used"
    code, said = resume(new)
    assert (code, f"({new}: empty, nothing was ever uploaded there)" in said) == (4, True), said
    code, said = resume("s3://no-such-bucket-here/run")
    assert (code, "start training from scratch" in said) == (69, False), said


def test_tls_against_plain_http_and_a_server_that_is_not_even_http(moto: servers.Server) -> None:
    error = refusal(f"https://127.0.0.1:{moto.port}")
    assert type(error) is RemoteUnreachable
    assert "TLS connection is refused" in error.message
    assert "http or https" in error.hint
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_greet, args=(listener,), daemon=True).start()
        error = refusal(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert "does not speak S3" in error.message


def _greet(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            client.close()


def test_broken_credentials_are_named_and_never_quoted(
    tmp_path: Path, moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line break in a token (Kubernetes secrets have one), half a file, a helper that prints its secret."""
    file = tmp_path / "keys"
    at_file = f"file:{file}"
    said: list[tuple[CkptdError, type[CkptdError], str]] = []
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SESSION_TOKEN", f"{HIDDEN}\n")
        said.append((refusal(moto.endpoint), NotPermitted, "hold a line break"))
    file.write_text(f"[default\naws_secret_access_key {HIDDEN}\n")
    said.append((refusal(moto.endpoint, at_file), ConfigError, str(file)))
    file.write_text("[default]\naws_access_key_id = x\n")
    said.append((refusal(moto.endpoint, at_file), NotPermitted, "aws_secret_access_key is missing"))
    file.write_text(f"[other]\naws_secret_access_key = {HIDDEN}\n")
    said.append((refusal(moto.endpoint, at_file), NotPermitted, "no section [default]"))
    file.write_text(f"[default]\ncredential_process = sh -c 'echo {HIDDEN} >&2; exit 3'\n")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_CONFIG_FILE", str(file))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        said.append((refusal(moto.endpoint), NotPermitted, "could not be got (custom-process)"))
    with monkeypatch.context() as patch:
        patch.setenv("HTTP_PROXY", f"http://user:{HIDDEN}@127.0.0.1:1")
        said.append((refusal("http://192.0.2.1"), RemoteUnreachable, "proxy"))
    for error, kind, words in said:
        assert type(error) is kind, error
        assert words in error.message
        assert HIDDEN not in f"{error}{error!r}"


@pytest.mark.full
def test_each_place_that_credentials_may_lie_at(tmp_path: Path, rclone: servers.Server) -> None:
    """Environment, profile, file; a profile or file that is named wins over the environment's keys."""
    wrong = {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "wrong-key"}
    right = f"aws_access_key_id = {servers.ACCESS_KEY}\naws_secret_access_key = {servers.SECRET_KEY}\n"
    (tmp_path / "shared").write_text(
        f"[default]\naws_access_key_id = a\naws_secret_access_key = b\n[job]\n{right}"
    )
    (tmp_path / "file").write_text(f"[default]\n{right}")
    shared = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "shared")}
    places: list[tuple[str, dict[str, str], int]] = [
        ("env", {}, 0),
        ("env", wrong, 77),
        ("profile:job", wrong | shared, 0),
        ("profile:default", shared, 77),
        (f"file:{tmp_path}/file", wrong, 0),
        ("file:$CREDENTIALS_DIRECTORY/file", wrong | {"CREDENTIALS_DIRECTORY": str(tmp_path)}, 0),
        (f"file:{tmp_path}/gone", {}, 77),
    ]
    for number, (credentials, environment, code) in enumerate(places):
        remote = f'credentials = "{credentials}"'
        with s3_node(tmp_path / str(number), rclone, remote=remote, environment=environment) as here:
            done = here.ckptd("check", here.job_file, "--init-remote")
            assert done.returncode == code, (credentials, done.stdout)


@pytest.mark.full
def test_no_s3_there_is_said_by_check_and_by_status_and_heals(tmp_path: Path, moto: servers.Server) -> None:
    """A login page answers in place of the server for a while: nothing is taken for ours, nothing goes."""
    prepare([BIG_RUN])
    page = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: 33\r\n\r\n"
        + PAGE
    )
    region = answer("400 Bad Request", "AuthorizationHeaderMalformed", region="eu-west-3")
    with proxy(moto.port) as between, s3_node(tmp_path, moto, between.endpoint, remote=ZERO_ONLY) as here:
        for canned, words in ((page, "does not speak S3"), (region, 'set region = "eu-west-3"')):
            between.canned = canned
            done = here.ckptd("check", here.job_file)
            assert done.returncode == 69, done.stdout
            assert words in done.stdout
        here.start()
        here.save(1, BIG_RUN)
        for canned, words in ((region, "another region"), (page, "does not speak S3")):
            between.canned = canned
            here.wait(words, partial(_says, here, words), 60)
        shown = here.ckptd("status", here.job_file).stdout
        assert "does not speak S3" in shown, shown
        between.canned = None
        here.wait_committed("global_step1~g1", 90)
        between.canned = page
        here.save(2, BIG_RUN)
        here.wait("said again", partial(_says, here, "does not speak S3"), 60)
        assert here.local_tags() == {"global_step1", "global_step2"}
        between.canned = None
        here.wait_committed("global_step2~g1", 90)
        here.wait("well again", lambda: not here.problems(), 30)
        assert "Traceback" not in here.log.read_text()


def _says(here: S3Node, words: str) -> bool:
    return any(words in p["text"] for p in here.status()["problems"])


def test_secrets_are_nowhere(tmp_path: Path, rclone: servers.Server) -> None:
    """Not in logs, journal, status, check, metrics, command lines, or on the remote (P15)."""
    prepare([BIG_RUN])
    file = tmp_path / "keys"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    secrets = (HIDDEN, "AnotherHidden7", servers.SECRET_KEY)
    file.write_text(text.format(servers.ACCESS_KEY, HIDDEN))
    own = {"AWS_SECRET_ACCESS_KEY": secrets[1]}
    remote = f'{ZERO_ONLY}\ncredentials = "file:{file}"'
    printed: list[str] = []
    with s3_node(tmp_path / "node", rclone, remote=remote, environment=own) as here:
        daemon = here.start("--log-level", "debug")
        here.save(1, BIG_RUN)
        here.wait("denied", lambda: "remote-denied" in here.problems(), 60)
        for _ in range(2):
            lines = [
                Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (daemon.pid, *children_of(daemon.pid))
            ]
            assert len(lines) > 1
            printed += [line.decode() for line in lines]
            for command in (["status"], ["status", "--json"], ["check"], ["restore", "--dry-run"]):
                done = here.ckptd(command[0], here.job_file, *command[1:])
                printed += [done.stdout, done.stderr]
            file.write_text(text.format(servers.ACCESS_KEY, servers.SECRET_KEY))
            here.wait_committed("global_step1~g1", 120)
        here.stop()
        kept = [p for p in (here.root).rglob("*") if p.is_file() and p.suffix not in (".pt",)]
        assert any("journal" in p.name for p in kept), kept
        kept += [p for p in (rclone.log.parent / "objects").rglob("*.json") if p.is_file()]
        assert "only one node may write there: If-None-Match is ignored" in here.log.read_text()
        for path in kept:
            for secret in secrets:
                assert secret.encode() not in path.read_bytes(), path
        for secret in secrets:
            assert not any(secret in out for out in printed)


@pytest.mark.parametrize("signal_kind", ["stopped", "killed"] if os.environ.get("CKPTD_FULL") else ["killed"])
def test_a_server_that_dies_in_mid_upload_and_lost_its_parts(
    tmp_path: Path, rclone: servers.Server, signal_kind: str
) -> None:
    """rclone keeps parts in memory: after its death they are gone, the file is sent anew, nothing is lost."""
    prepare([BIG_RUN])
    with (
        proxy(rclone.port) as between,
        s3_node(tmp_path, rclone, between.endpoint, remote=f'bandwidth = "25MB/s"\n{ZERO_ONLY}') as here,
    ):
        here.start()
        here.save(1, BIG_RUN)
        here.wait("three parts", lambda: between.parts().total() >= 3, 60)
        process = rclone.process
        assert process is not None
        if signal_kind == "killed":
            process.kill()
            process.wait()
        else:
            rclone.stop()
        here.wait("said", lambda: "remote-unreachable" in here.problems(), 90)
        assert here.local_tags() == {"global_step1"}
        rclone.start()
        here.wait_committed("global_step1~g1", 120)
        assert here.holds("global_step1", BIG_RUN, 1)
        here.wait("well again", lambda: not here.problems(), 30)
        assert not here.uploads()


def test_two_first_writers_where_conditions_are_ignored(rclone: servers.Server) -> None:
    """The second one looks first; what was written after that look is seen by the re-read (P3, P10)."""
    access = servers.access(rclone.endpoint)
    first, second = (open_store(f"s3://{servers.BUCKET}/{servers.CLIENT}", access=access) for _ in range(2))
    assert not first.probe().create_only
    assert any("If-None-Match is ignored" in note for note in second.probe().notes)
    assert first.put_if_absent("_ckptd/a.json", b"first")
    assert not second.put_if_absent("_ckptd/a.json", b"second")
    assert second.get("_ckptd/a.json") == b"first"
    client = first.client  # type: ignore[attr-defined]

    def overtake(**_: object) -> None:
        client.meta.events.unregister("after-call.s3.PutObject", overtake)
        rclone.client().put_object(
            Bucket=servers.BUCKET, Key=f"{servers.CLIENT}/_ckptd/b.json", Body=b"second"
        )

    client.meta.events.register("after-call.s3.PutObject", overtake)
    assert not first.put_if_absent("_ckptd/b.json", b"first")
    assert first.get("_ckptd/b.json") == b"second"
