"""Notifications of a real daemon to a real HTTP server and real programs; what fails costs nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_daemon_service import House, house, real_saves
from tests.support.real import REPOSITORY
from tests.support.trackers import read_mlflow, read_wandb

__all__ = ["house", "real_saves"]
pytestmark = [pytest.mark.real, pytest.mark.faults]


@dataclass
class Receiver:
    """An HTTP server that remembers what it was sent; `answer` may change, `hangs` never answers."""

    port: int = 0
    posts: list[dict[str, Any]] = field(default_factory=list)
    beats: int = 0
    answer: int = 200
    hangs: bool = False


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    got = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if got.hangs:
                time.sleep(60)
            if got.answer == 200:
                got.posts.append(json.loads(body))
            self.send_response(got.answer)
            self.end_headers()

        def do_GET(self) -> None:
            got.beats += 1
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    got.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield got
    server.shutdown()
    server.server_close()


def told(receiver: Receiver, kind: str) -> list[dict[str, Any]]:
    return [post["event"] for post in receiver.posts if post["event"]["kind"] == kind]


def test_webhook_heartbeat_and_hooks(house: House, receiver: Receiver) -> None:
    secret = house.root / "hook.url"
    secret.write_text(f"http://127.0.0.1:{receiver.port}/SECRET-PATH\n")
    script = house.root / "hook"
    script.write_text(
        f"#!/bin/sh\ncat >> {house.root}/seen; echo >> {house.root}/seen; env >> {house.root}/env\n"
    )
    script.chmod(0o755)
    (house.config / "ckptd.toml").write_text(
        f'state_dir = "{house.root}/state"\n[notify]\nwebhook = "file:{secret}"\n'
        f'heartbeat = "http://127.0.0.1:{receiver.port}/beat"\n'
        f'on_complete = ["{script}"]\non_committed = ["{script}"]\non_problem = ["{script}"]\n'
    )
    house.job("one")
    house.start(AWS_SECRET_ACCESS_KEY="planted-secret", CKPTD_LOG_FORMAT="json")
    house.save("one")
    house.wait("the commit", lambda: house.committed("one"))
    seen = house.root / "seen"
    house.wait("two hooks", lambda: '"committed"' in seen.read_text())
    hooked = [json.loads(line) for line in seen.read_text().splitlines()]
    first, second = (event for event in hooked if event["kind"] != "problem")
    assert (first["kind"], first["tag"], first["step"]) == ("complete", "global_step1", 1)
    assert (second["kind"], second["form"], second["remote"]) == ("committed", "zero", "nas")
    assert (first["url"], second["url"]) == (None, str(house.root / "nas" / "one"))
    assert "planted-secret" not in (house.root / "env").read_text()
    house.wait("a beat", lambda: receiver.beats == 1)
    assert receiver.posts == []

    # a torn save: somebody is needed
    (house.root / "nas/one/_ckptd/remote.json").rename(house.root / "elsewhere")
    house.save("one", 2)
    house.wait("a message", lambda: told(receiver, "problem"))
    (message,) = told(receiver, "problem")[:1]
    assert message["severity"] == "attention"
    assert message["next_step"]
    assert receiver.posts[0]["text"].startswith("🔴 ckptd: one on ")
    (house.root / "elsewhere").rename(house.root / "nas/one/_ckptd/remote.json")
    house.wait("that it is over", lambda: told(receiver, "solved"))
    house.wait("the second commit", lambda: house.committed("one", 2))
    assert "SECRET-PATH" not in house.log.read_text()
    lines = [json.loads(line) for line in house.log.read_text().splitlines()]
    done = [(line["job"], line["action"], line["tag"]) for line in lines if "action" in line]
    assert [one for one in done if one[2] == "global_step1" and one[1] != "convert"] == [
        ("one", action, "global_step1") for action in ("complete", "upload", "commit")
    ]
    assert "SECRET-PATH" not in json.dumps(house.status())


def test_a_job_of_two_arguments_has_the_hooks_of_the_configuration(house: House) -> None:
    """Without --config-dir, as one of a job file has; and `check` names what is wrong with them."""
    settings = house.config / "ckptd.toml"
    settings.write_text(f'[notify]\non_committed = ["/bin/sh", "-c", "cat > {house.root}/seen"]\n')
    house.save("one")
    job = (str(house.root / "nvme" / "one"), str(house.root / "nas" / "one"), "--same-filesystem")
    environ = os.environ | {"CKPTD_CONFIG_DIR": str(house.config), "CKPTD_SETTLE": "0.5s"}
    command = [sys.executable, "-m", "ckptd", "run", *job, "--once"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert json.loads((house.root / "seen").read_text())["tag"] == "global_step1", done.stderr
    settings.write_text('[notify]\non_committed = ["/no/such/program"]\n')
    checked = house.ckptd("check", "--config-dir", str(house.config), "--no-probe", *job)
    assert "/no/such/program" in checked.stdout


def test_notifiers_that_fail_hang_or_are_gone_cost_nothing(house: House, receiver: Receiver) -> None:
    receiver.hangs = True
    slow = house.root / "slow"
    slow.write_text("#!/bin/sh\nsleep 300\n")
    slow.chmod(0o755)
    (house.config / "ckptd.toml").write_text(
        f'state_dir = "{house.root}/state"\n[notify]\nwebhook = "http://127.0.0.1:{receiver.port}/x"\n'
        f'severity = "note"\nheartbeat = "http://127.0.0.1:1/nobody"\non_complete = ["{slow}"]\n'
        'on_committed = ["/no/such/program"]\n'
    )
    house.job("one")
    process = house.start()
    for step in (1, 2):
        house.save("one", step)
        house.wait("the commit", lambda step=step: house.committed("one", step))  # type: ignore[misc]
    process.terminate()
    started = time.monotonic()
    assert process.wait(200) == 0
    assert time.monotonic() - started < 60


def test_a_secret_url_is_refused(tmp_path: Path) -> None:
    from ckptd.config.loader import load_daemon
    from ckptd.errors import ConfigError

    place = tmp_path / "ckptd.toml"
    for text, word in (
        ('webhook = "https://hooks.slack.com/services/T0/B0/XXXX"', "is a secret"),
        ('webhook = "https://user:pass@host/x"', "is a secret"),
        ('heartbeat = "hc-ping"', "it is a URL"),
        ('command = ["page"]', "absolute path"),
        ('severty = "note"', "severity"),
    ):
        place.write_text(f"[notify]\n{text}\n")
        with pytest.raises(ConfigError, match=word) as caught:
            load_daemon(place, {})
        assert "XXXX" not in str(caught.value)
        assert "user:pass" not in str(caught.value)


def test_the_hooks_of_the_examples_write_into_runs_that_have_ended(house: House) -> None:
    """A run of W&B (offline) and one of MLflow, named in files by job; a job without a file is left alone."""
    import mlflow

    mlflow.set_tracking_uri(tracking_uri := f"sqlite:///{house.root}/mlflow.db")
    with mlflow.start_run() as run:
        pass
    runs, hook, examples = house.root / "runs", house.root / "hook", REPOSITORY / "examples" / "hooks"
    runs.mkdir()
    (runs / "one.wandb").write_text("my-team/llama/abc123\n")
    (runs / "one.mlflow").write_text(f"{tracking_uri} {run.info.run_id}\n")
    hook.write_text(
        f"#!/bin/sh\nevent=$(cat)\nset -e\n"
        f'echo "$event" | {sys.executable} {examples}/mlflow_commit.py {runs}\n'
        f'echo "$event" | {sys.executable} {examples}/wandb_commit.py {runs} --offline {house.root}\n'
        f'echo "$event" >> {house.root}/seen\n'
    )
    hook.chmod(0o755)
    (house.config / "ckptd.toml").write_text(
        f'state_dir = "{house.root}/state"\n[notify]\non_committed = ["{hook}"]\n'
    )
    house.job("one")
    house.job("two")
    house.start()
    for name in ("two", "one"):
        house.save(name)
    seen = house.root / "seen"
    house.wait("both hooks", lambda: len(seen.read_text().splitlines()) == 2)

    url = f"{house.root}/nas/one"
    (by_wandb,) = read_wandb(house.root)
    assert by_wandb.run_id == "abc123"
    assert by_wandb.summary["ckptd/committed_url"] == f"{url}/global_step1"
    assert by_wandb.summary["ckptd/restore"] == f"ckptd restore {url} global_step1 --to DIR"
    assert by_wandb.values_of("ckptd/committed_step") == [1]
    (by_mlflow,) = read_mlflow(tracking_uri)
    assert by_mlflow.data.tags["ckptd/committed_url"] == f"{url}/global_step1"
    assert by_mlflow.data.metrics["ckptd/committed_step"] == 1
    assert house.status()["daemon"].get("notify_error") is None
