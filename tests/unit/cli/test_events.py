"""`ckptd events JOB` and `ready_dir` with a real daemon that is killed, and a reader that follows."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ckptd.observe import event_log
from ckptd.observe.event_log import EVENTS, EventLog, read_events
from tests.support.metadata import metadata
from tests.support.real import REPOSITORY
from tests.support.recover_scene import Scene
from tests.unit.cli.test_logs import CLEAN, ckptd
from tests.unit.observe.test_event_log import checkpoint, job

PATIENCE_SECONDS = 100


@contextmanager
def daemon(scene: Scene, *more: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    words = ["run", str(scene.save_dir), str(scene.nas), "--same-filesystem", *more]
    environ = CLEAN | {"CKPTD_SETTLE": "0.3s"} | settings
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd", *words], env=environ, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def committed(rows: list[dict[str, Any]]) -> list[str]:
    return [row["tag"] for row in rows if row["kind"] == "committed" and row["form"] == "zero"]


def test_a_follower_misses_nothing_while_daemons_are_killed(tmp_path: Path) -> None:
    """Three lives of a daemon, each killed as soon as it has committed, or before; one reader throughout."""
    scene = Scene(tmp_path)
    scene.save(2)
    lines = tmp_path / "lines"
    with daemon(scene):
        assert ckptd("wait", scene.save_dir, "--step", 2, "--timeout", "100s").returncode == 0
        command = [sys.executable, "-m", "ckptd", "events", str(scene.save_dir), "--json", "--follow"]
        with open(lines, "w") as out:
            follower = subprocess.Popen(command, env=CLEAN, stdout=out)
    try:
        scene.save(4)
        with daemon(scene) as second:
            assert ckptd("wait", scene.save_dir, "--step", 4, "--timeout", "100s").returncode == 0
            second.kill()
        with open(scene.save_dir / "_ckptd" / "state" / EVENTS, "a") as log:
            log.write('{"id": 99')  # what a power cut may leave
        scene.save(6)
        with daemon(scene):
            end = time.monotonic() + PATIENCE_SECONDS
            while "global_step6" not in committed(
                rows := [json.loads(x) for x in lines.read_text().splitlines()]
            ):
                assert time.monotonic() < end, rows
                time.sleep(0.2)
    finally:
        follower.kill()
        follower.wait(60)
    assert committed(rows) == ["global_step2", "global_step4", "global_step6"]
    assert "gap" not in {row["kind"] for row in rows}
    ids = [row["id"] for row in rows]
    assert ids == sorted(set(ids))
    # and the daemon need not run: from any id on, as text too
    since = next(row["id"] for row in rows if row["kind"] == "committed")
    rest = ckptd("events", scene.save_dir, "--json", "--since", since).stdout.splitlines()
    assert [json.loads(x)["id"] for x in rest][: len(ids)] == [one for one in ids if one > since]
    assert "committed: global_step6 (zero) is committed on" in ckptd("events", scene.save_dir).stdout


def test_a_clean_restart_with_nothing_new_tells_nothing(tmp_path: Path) -> None:
    """Nor does a command that opens the job where no daemon runs, or a remote that still is not there."""
    scene = Scene(tmp_path)
    scene.save(2)
    hook, heard = tmp_path / "hook", tmp_path / "heard"
    hook.write_text(f"#!/bin/sh\ncat >> {heard}\necho >> {heard}\n")
    hook.chmod(0o755)
    (tmp_path / "ckptd.toml").write_text(f'[notify]\non_complete = ["{hook}"]\non_committed = ["{hook}"]\n')
    told = []
    for life in range(3):
        with daemon(scene, "--config-dir", str(tmp_path)) as process:
            wait_for_status(scene, process.pid, "committed" if life == 0 else "remote-unreachable")
            if life == 0:
                wait_for_lines(heard, 3)  # of both forms
            process.terminate()
            process.wait(60)
        if life == 0:
            assert ckptd("plan", scene.save_dir).returncode == 0
            scene.nas.rename(tmp_path / "unmounted")
            scene.nas.write_text("no directory")
        told.append(read_events(scene.save_dir / "_ckptd" / "state"))
    assert [row["kind"] for row in told[0] if row["tag"]].count("committed") == 2
    assert [(row["kind"], row["code"]) for row in told[1][len(told[0]) :]] == [
        ("problem", "remote-unreachable")
    ]
    assert told[2] == told[1]
    kinds = [json.loads(line)["kind"] for line in heard.read_text().splitlines()]
    assert kinds == ["complete", "committed", "committed"]


def test_each_of_many_deletions_at_once_is_an_event(tmp_path: Path) -> None:
    """More than status shows of what is gone; also after a crash between the deletions and their events."""
    scene = Scene(tmp_path)
    tags = [scene.save(step) for step in range(2, 56, 2)]
    state = scene.save_dir / "_ckptd" / "state"
    more = {"CKPTD_REMOTE_FORMS": "zero", "CKPTD_EXISTING": "all"}
    with daemon(scene, "--once", **more) as first:
        assert first.wait(PATIENCE_SECONDS) == 0
    before = (state / event_log.KNOWN).read_bytes()
    for _ in range(2):
        since = read_events(state)[-1]["id"]
        with daemon(scene, "--once", "--save-total-limit", "1", **more) as second:
            assert second.wait(PATIENCE_SECONDS) == 0
        told = [row["tag"] for row in read_events(state, since) if row["kind"] == "pruned"]
        assert sorted(told) == sorted(tags[:-1])
        (state / event_log.KNOWN).write_bytes(before)


def wait_for_lines(path: Path, count: int) -> None:
    """Until a file that hooks append to has so many lines."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < end
        time.sleep(0.1)


def wait_for_status(scene: Scene, pid: int, word: str) -> None:
    """Until the daemon of this process has published a checkpoint, and the word."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        text = ckptd("status", scene.save_dir, "--json").stdout
        document = json.loads(text or "{}")
        is_its = document.get("daemon", {}).get("pid") == pid
        if is_its and document["jobs"][0]["checkpoints"] and f'"{word}"' in text:
            return
        assert time.monotonic() < end, text
        time.sleep(0.3)


def test_a_follower_gets_what_was_written_last_before_the_file_was_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another event after it."""
    scene = Scene(tmp_path)
    scene.save(2)
    with daemon(scene):
        assert ckptd("wait", scene.save_dir, "--step", 2, "--timeout", "100s").returncode == 0
    state_dir = scene.save_dir / "_ckptd" / "state"
    command = [sys.executable, "-m", "ckptd", "events", str(scene.save_dir), "--json", "--follow"]
    with subprocess.Popen(command, env=CLEAN, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            lines: queue.SimpleQueue[str] = queue.SimpleQueue()
            threading.Thread(target=lambda out=follower.stdout: [*map(lines.put, out)]).start()
            for _ in read_events(state_dir):
                lines.get(timeout=PATIENCE_SECONDS)
            time.sleep(1.0)
            monkeypatch.setattr(event_log, "EVENTS_BYTES", 1)
            EventLog(state_dir).see(job(checkpoint("step7")))
            assert not (state_dir / EVENTS).exists()
            found = [json.loads(lines.get(timeout=20))["tag"] for _ in range(2)]
        finally:
            follower.kill()
    assert found == ["step7", "step7"]


def test_a_script_waits_for_a_ready_file(tmp_path: Path) -> None:
    """A directory that is not there is a problem within a moment, with nothing else to say of the job, and
    gets its files once it is; the line of docs/operations.md waits for one."""
    scene = Scene(tmp_path)
    scene.save(2)
    ready = tmp_path / "shared" / "ready"
    with daemon(scene, CKPTD_READY_DIR=str(ready)):
        assert ckptd("wait", scene.save_dir, "--step", 2, "--timeout", "100s").returncode == 0
        end = time.monotonic() + 15
        while "ready-dir-unwritten" not in ckptd("status", scene.save_dir, "--json").stdout:
            assert time.monotonic() < end
            time.sleep(0.5)
        ready.mkdir(parents=True)
        page = (REPOSITORY / "docs" / "operations.md").read_text()
        script = next(line for line in page.splitlines() if line.startswith("until "))
        environ = CLEAN | {"READY_DIR": str(ready)}
        subprocess.run(["sh", "-c", script], env=environ, check=True, timeout=PATIENCE_SECONDS)
        end = time.monotonic() + 15
        while "ready-dir-unwritten" in ckptd("status", scene.save_dir, "--json").stdout:
            assert time.monotonic() < end
            time.sleep(0.5)
    said = json.loads((ready / "global_step2.json").read_text())
    assert (said["tag"], said["step"]) == ("global_step2", 2)
    assert [(one["url"], one["forms"][-1]) for one in said["remotes"].values()] == [(str(scene.nas), "zero")]
    assert not [name for name in os.listdir(ready) if not name.startswith("global_step")]


def test_a_notice_of_the_cloud_drains(tmp_path: Path) -> None:
    """A spot interruption in the middle of training: a drain until then, in status and in events."""
    scene = Scene(tmp_path)
    scene.save(2)
    with (
        metadata("aws") as service,
        daemon(scene, CKPTD_TERMINATION="aws", CKPTD_TERMINATION_URL=service.url),
    ):
        assert ckptd("wait", scene.save_dir, "--step", 2, "--timeout", "100s").returncode == 0
        assert drain_of(scene) is None
        at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=120)
        service.say(
            "/latest/meta-data/spot/instance-action",
            {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")},
        )
        end = time.monotonic() + PATIENCE_SECONDS
        while (drain := drain_of(scene)) is None:
            assert time.monotonic() < end
            time.sleep(0.5)
        assert abs(datetime.fromisoformat(drain["deadline_at"]).timestamp() - at.timestamp()) < 2
        scene.save(4)
        assert ckptd("wait", scene.save_dir, "--step", 4, "--timeout", "100s").returncode == 0
    rows = [json.loads(x) for x in ckptd("events", scene.save_dir, "--json").stdout.splitlines()]
    told = [row["text"] for row in rows if row["code"] == "node-ending"]
    assert told
    assert "spot/instance-action terminate" in told[0]
    assert committed(rows)[-1] == "global_step4"


def drain_of(scene: Scene) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(ckptd("status", scene.save_dir, "--json").stdout)["jobs"][0][
        "drain"
    ]
    return found
