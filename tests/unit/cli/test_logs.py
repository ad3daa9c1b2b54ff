"""`ckptd logs JOB`: what a daemon logged that runs by hand, and lines of the journal of a service."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptd.cli.daemon.logs import line_of
from ckptd.observe.logs import LOG, LOG_BYTES, OLD_LOG, JobLogs, job_lines
from tests.support.recover_scene import Scene

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}


def ckptd(*words: object) -> subprocess.CompletedProcess[str]:
    """A command."""
    command = [sys.executable, "-m", "ckptd", *map(str, words)]
    return subprocess.run(command, env=CLEAN, capture_output=True, text=True, check=False, timeout=200)


def test_a_daemon_by_hand_keeps_its_log(tmp_path: Path) -> None:
    """In the state directory, whatever becomes of stderr; a follower sees what comes."""
    scene = Scene(tmp_path)
    scene.save(2)
    words = ["run", str(scene.save_dir), str(scene.nas), "--same-filesystem"]
    environ = CLEAN | {"CKPTD_SETTLE": "0.3s"}
    daemon = subprocess.Popen([sys.executable, "-m", "ckptd", *words], env=environ, stderr=subprocess.DEVNULL)
    follower = None
    try:
        assert ckptd("wait", scene.save_dir, "--step", 2, "--timeout", "100s").returncode == 0
        shown = ckptd("logs", scene.save_dir)
        assert shown.returncode == 0
        assert "global_step2" in shown.stdout
        lines = shown.stdout.splitlines()
        assert ckptd("logs", scene.save_dir, "-n", 1).stdout.splitlines()[0] in lines[-1:] + lines
        assert len(ckptd("logs", scene.save_dir, "-n", 2).stdout.splitlines()) == 2
        assert (scene.save_dir / "_ckptd" / "state" / LOG).exists()
        command = [sys.executable, "-m", "ckptd", "logs", str(scene.save_dir), "-f", "-n", "0"]
        follower = subprocess.Popen(command, env=CLEAN, stdout=subprocess.PIPE, text=True)
        time.sleep(2)
        scene.save(4)
        assert follower.stdout is not None
        assert any("global_step4" in line for line in follower.stdout)
    finally:
        daemon.terminate()
        daemon.wait(60)
        if follower is not None:
            follower.kill()
            follower.wait(60)
    # it stays when the daemon has gone, and goes with what ckptd put here
    assert "global_step4" in ckptd("logs", scene.save_dir).stdout
    assert ckptd("uninstall", scene.save_dir, "--uncommitted").returncode == 0
    assert not (scene.save_dir / "_ckptd").exists()


def test_a_job_without_a_log_says_so(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(2)
    done = ckptd("logs", scene.save_dir)
    assert (done.returncode, done.stdout) == (66, ""), done


def test_a_log_is_bounded(tmp_path: Path) -> None:
    """Lines from before the state directory are kept; a line of no job is in each; two files at most."""
    places = {name: tmp_path / name for name in ("a", "b")}
    logs, log = JobLogs(), logging.getLogger("ckptd.test_bounded")
    log.addHandler(logs)
    try:
        log.warning("before all")
        with job_lines("a"):
            log.warning("before a")
        for name, place in places.items():
            place.mkdir()
            logs.begin(name, place)
        log.warning("of none")
        for number in range(3 * LOG_BYTES // 1000):
            with job_lines("a"):
                log.warning("%d %s", number, "x" * 1000)
        logs.end("b")
        with job_lines("b"):
            log.warning("after its end")
    finally:
        log.removeHandler(logs)
    text = (places["b"] / LOG).read_text()
    assert "before all" in text and "of none" in text
    assert "before a\n" not in text and "after its end" not in text
    assert sorted(os.listdir(places["a"])) == [LOG, OLD_LOG]
    assert all((places["a"] / name).stat().st_size < LOG_BYTES + 2000 for name in (LOG, OLD_LOG))


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            json.dumps({"at": "T", "level": "info", "logger": "ckptd", "job": "a", "text": "done\x1b"}),
            "T INFO ckptd [a]: done?",
        ),
        (json.dumps({"at": "T", "level": "error", "logger": "ckptd", "text": "x"}), "T ERROR ckptd: x"),
        (json.dumps({"at": "T", "level": "info", "logger": "ckptd", "job": "b", "text": "x"}), ""),
        ("Started ckptd@alice.service.", "Started ckptd@alice.service."),
    ],
)
def test_a_line_of_the_journal(line: str, shown: str) -> None:
    assert line_of(line, "a") == shown
