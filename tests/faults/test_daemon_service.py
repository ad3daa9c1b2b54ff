"""Life as a service: reload with good and bad files, globs, notifications to a supervisor; real daemons."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ckptd.core.model.heartbeat import HEARTBEATS
from tests.e2e.harness import PATIENCE_SECONDS, RUN, made_before, shards_in_order
from tests.support.real import save_dir_of
from tests.support.status_schema import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.real, pytest.mark.faults]


real_saves = made_before(RUN)


@dataclass
class House:
    """A configuration directory, its daemon, and a supervisor's notification socket."""

    root: Path
    process: subprocess.Popen[bytes] | None = None
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.root / "etc"
        (self.config / "jobs.d").mkdir(parents=True)
        (self.config / "ckptd.toml").write_text(f'state_dir = "{self.root}/state"\n')
        (self.root / "nas").mkdir()
        (self.root / "nvme").mkdir()
        self.log = self.root / "log"
        self.address = self.root / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.address))
        self.socket.setblocking(False)

    def job(self, name: str, more: str = "", *, save_dir: str = "", url: str = "") -> None:
        """Write a job file."""
        save_dir = save_dir or str(self.root / "nvme" / name)
        url = url or str(self.root / "nas" / name)
        (self.config / "jobs.d" / f"{name}.toml").write_text(
            f'save_dir = "{save_dir}"\nsettle = "0.5s"\n[[remote]]\nname = "nas"\nurl = "{url}"\n'
            f'same_filesystem = true\nforms = ["zero"]\n{more}\n'
        )

    def start(self, *, inside: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """The daemon, told of the socket; `inside`: the `cgroup.procs` that it begins in."""
        command = [sys.executable, "-m", "ckptd", "run", "--config-dir", str(self.config)]
        if inside is not None:
            command = ["sh", "-c", f'echo $$ > {inside} && exec "$@"', "sh", *command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | {"NOTIFY_SOCKET": str(self.address)} | environment,
            )
        self.wait("READY", lambda: "READY=1" in self.heard())
        return self.process

    def heard(self) -> list[str]:
        """Every notification so far, line by line."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.said += self.socket.recv(4096).decode().splitlines()
        return self.said

    def ckptd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command."""
        words = [sys.executable, "-m", "ckptd", *arguments]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asked:
            self.wait("the command's end", lambda: asked.poll() is not None)
            stdout, stderr = asked.communicate()
        return subprocess.CompletedProcess(words, asked.returncode, stdout, stderr)

    def reload(self, name: str) -> subprocess.CompletedProcess[str]:
        """`ckptd reload` by the state directory."""
        return self.ckptd("reload", "--state-dir", str(self.root / "state" / name))

    def status(self) -> dict[str, Any]:
        """The newest status.json with the jobs of all of this daemon: each state directory holds its own."""
        paths = sorted((self.root / "state").glob("*/status.json"), key=lambda p: p.stat().st_mtime_ns)
        if not paths:
            return {"jobs": [], "daemon": {}}
        documents: list[dict[str, Any]] = [checked(path.read_bytes()) for path in paths]
        pid = documents[-1]["daemon"]["pid"]
        jobs = {j["name"]: j for d in documents if d["daemon"]["pid"] == pid for j in d["jobs"]}
        return documents[-1] | {"jobs": list(jobs.values())}

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Jobs of status by name."""
        return {job["name"]: job for job in self.status()["jobs"]}

    def save(self, name: str, step: int = 1) -> None:
        """A real save, whole."""
        source = save_dir_of(RUN) / f"global_step{step}"
        folder = self.root / "nvme" / name / source.name
        folder.mkdir(parents=True)
        for path in shards_in_order(source):
            (folder / path.name).write_bytes(path.read_bytes())

    def committed(self, name: str, step: int = 1) -> bool:
        """On the NAS."""
        return (self.root / "nas" / name / f"_ckptd/commits/global_step{step}~g1~zero.json").exists()

    def wait(self, what: str, done: Callable[[], object]) -> None:
        """Until `done`; listens meanwhile as a supervisor does: with ten messages unread the daemon waits."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            self.heard()
            with contextlib.suppress(OSError, ValueError, KeyError):
                if done():
                    return
            time.sleep(0.05)
        raise AssertionError(f"waited for {what}: {self.log.read_text()[-2000:]}")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    try:
        yield made
    finally:
        if made.process is not None:
            with contextlib.suppress(ProcessLookupError):
                made.process.send_signal(signal.SIGCONT)
                made.process.kill()
                made.process.wait(10)
        made.socket.close()


def codes_of(house: House, name: str) -> list[str]:
    """Of the problems that a job shows."""
    return [problem["code"] for problem in house.jobs()[name]["problems"]]


def last_heartbeat(house: House, job: str) -> dict[str, Any]:
    (path,) = (house.root / "nas" / job / HEARTBEATS).glob("*.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_reload_with_good_and_bad_files(house: House) -> None:
    """Unchanged jobs are left alone, changed ones start anew, bad ones go on, removed ones end."""
    for name in ("one", "two", "three"):
        (house.root / "nvme" / name).mkdir()
        house.job(name)
        house.save(name)
    daemon = house.start()
    house.wait("three commits", lambda: all(house.committed(n) for n in ("one", "two", "three")))
    mark = len(house.log.read_text())
    house.job("one", "keep_last = 4")
    house.job("two", "kep_last = 4")
    (house.config / "jobs.d" / "three.toml").unlink()
    (house.root / "nvme" / "four").mkdir()
    house.job("four")
    house.save("four")
    done = house.reload("one")
    assert done.returncode == 78
    assert "kep_last" in done.stderr
    assert "keep_last" in done.stderr
    house.wait("the new job", lambda: house.committed("four"))
    house.wait("the end of the old one", lambda: set(house.jobs()) == {"one", "two", "four"})
    has_ended = {n: last_heartbeat(house, n).get("ended", False) for n in ("one", "two", "three")}
    assert has_ended == {"one": False, "two": False, "three": True}, "only what is gone is over"
    # a job says so in its next turn, which on a busy machine may come after another job's commit
    house.wait("the refusal", lambda: codes_of(house, "two") == ["reload-refused"])
    assert "kep_last" in house.jobs()["two"]["problems"][0]["text"]
    house.save("two", 2)
    house.wait("the old configuration at work", lambda: house.committed("two", 2))
    house.job("two")
    assert house.reload("one").returncode == 0
    house.wait("well", lambda: not house.jobs()["two"]["problems"])
    later = house.log.read_text()[mark:]
    assert "job two ends" not in later
    assert later.count("watching") == 2, "one anew, four for the first time"
    assert {"RELOADING=1", "READY=1"} <= set(house.heard())
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(200) == 0
    assert "STOPPING=1" in house.heard()


def test_a_reload_does_not_disturb_the_others_upload(house: House) -> None:
    """The upload under way goes on through SIGHUP: its bytes are sent once."""
    (house.root / "nvme" / "slow").mkdir()
    house.job("slow", 'bandwidth = "400kB/s"')
    house.save("slow")
    daemon = house.start()
    house.wait("the upload", lambda: (house.root / "nas" / "slow" / "global_step1").exists())
    children = house.log.read_text().count("uploading")
    daemon.send_signal(signal.SIGHUP)
    house.wait("reloaded", lambda: house.status()["daemon"]["reloaded_at"])
    house.wait("the commit", lambda: house.committed("slow"))
    assert house.log.read_text().count("uploading") == children


def test_a_conversion_stands_still_while_another_job_saves(house: House) -> None:
    """One disk serves both trainers: a save in one save_dir stops the other's conversion until it is over."""
    for name in ("one", "two"):
        (house.root / "nvme" / name).mkdir()
        house.job(name, '[local]\nforms = ["universal"]')
    daemon = house.start()
    begun = house.root / "nvme" / "one" / "global_step1"
    begun.mkdir()
    is_over = threading.Event()

    def save_on() -> None:
        with (begun / "mp_rank_00_model_states.pt").open("ab") as shard:
            while not is_over.wait(0.05):
                shard.write(b"x")
                shard.flush()

    writer = threading.Thread(target=save_on)
    writer.start()
    try:
        house.wait("the save", lambda: "saving" in [c["state"] for c in house.jobs()["one"]["checkpoints"]])
        house.save("two")
        house.wait("a stopped child", lambda: is_stopped(daemon))
        assert not (house.root / "nvme" / "two" / "latest_universal").exists()
    finally:
        is_over.set()
        writer.join()
    shutil.rmtree(begun)
    house.wait("the conversion", lambda: (house.root / "nvme" / "two" / "latest_universal").exists())


def is_stopped(daemon: subprocess.Popen[bytes]) -> bool:
    """Whether one of its children is; those that end while we look are not."""
    for child in psutil.Process(daemon.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_STOPPED:
                return True
    return False


def test_a_bad_ckptd_toml_keeps_everything(house: House) -> None:
    """The daemon goes on, and says what is wrong."""
    (house.root / "nvme" / "one").mkdir()
    house.job("one")
    house.start()
    house.save("one")
    house.wait("the commit", lambda: house.committed("one"))
    (house.config / "ckptd.toml").write_text('memory_budget = "12MB"\n')
    done = house.reload("one")
    assert done.returncode == 78
    assert "256MiB" in done.stderr
    house.save("one", 2)
    house.wait("work goes on", lambda: house.committed("one", 2))


@pytest.mark.full
def test_a_glob_makes_a_job_of_each_directory_also_later(house: House) -> None:
    """`{dir}` in the URL; a directory that appears becomes a job without a reload."""
    (house.root / "nvme" / "a").mkdir()
    house.job("runs", save_dir=f"{house.root}/nvme/*", url=f"{house.root}/nas/{{dir}}")
    house.start()
    house.save("a")
    house.wait("the first", lambda: house.committed("a"))
    house.save("b")
    house.wait("the second", lambda: house.committed("b"))
    assert set(house.jobs()) == {"runs-a", "runs-b"}


def test_no_edit_counts_before_a_reload(house: House) -> None:
    """A new directory of a glob becomes a job; a limit that an operator is still typing deletes nothing."""
    for name in ("one", "runs/a"):
        (house.root / "nvme" / name).mkdir(parents=True)
    house.job("one")
    house.job("bad", 'save_total_limit = "many"')
    house.job("runs", save_dir=f"{house.root}/nvme/runs/*", url=f"{house.root}/nas/{{dir}}")
    house.start()
    # READY comes before the first look: what is there by then was found, and found checkpoints stay
    house.wait("the first look", lambda: f"watching {house.root}/nvme/one" in house.log.read_text())
    for step in (1, 2, 3):
        house.save("one", step)
        house.wait("the commit", partial(house.committed, "one", step))
    # each job publishes in its own turns: on a busy machine one may have committed before another said a word
    house.wait("the refusal", lambda: codes_of(house, "bad"))
    refused = house.jobs()["bad"]["problems"]
    house.job("one", "[local]\nsave_total_limit = 1\n")
    house.job("bad")
    (house.config / "jobs.d" / "half.toml").write_text("save_dir = ")
    (house.root / "nvme" / "runs" / "b").mkdir()
    house.wait("the new directory's job", lambda: "runs-b" in house.jobs())
    house.save("one", 4)
    house.wait("the commit", lambda: house.committed("one", 4))
    time.sleep(2)
    kept = sorted(path.name for path in (house.root / "nvme" / "one").glob("global_step*"))
    assert kept == [f"global_step{step}" for step in (1, 2, 3, 4)]
    assert house.jobs()["bad"]["problems"] == refused
    assert "half" not in house.jobs()
    house.reload("one")
    house.wait("the limit", lambda: len(list((house.root / "nvme" / "one").glob("global_step*"))) == 1)
    house.wait("the file that was half written", lambda: "half" in house.jobs())
    house.wait("the file that was put right", lambda: house.jobs()["bad"]["problems"] != refused)


def test_a_glob_without_dir_in_the_url_is_refused(house: House) -> None:
    house.job("runs", save_dir=f"{house.root}/nvme/*")
    done = house.ckptd("check", str(house.config / "jobs.d" / "runs.toml"))
    assert done.returncode == 78
    assert "{dir}" in done.stdout


def test_the_watchdog_is_fed_by_turns_alone(house: House) -> None:
    """WATCHDOG=1 comes after turns; a daemon that is stopped sends none."""
    (house.root / "nvme" / "one").mkdir()
    house.job("one")
    daemon = house.start(WATCHDOG_USEC="1500000")
    house.wait("keep-alives", lambda: house.heard().count("WATCHDOG=1") >= 3)
    daemon.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    before = house.heard().count("WATCHDOG=1")
    time.sleep(2)
    assert house.heard().count("WATCHDOG=1") == before
    daemon.send_signal(signal.SIGCONT)
    house.wait("alive again", lambda: house.heard().count("WATCHDOG=1") > before)
    assert any(line.startswith("STATUS=one:") for line in house.heard())


def test_reload_without_a_daemon_says_so(house: House) -> None:
    (house.root / "nvme" / "one").mkdir()
    house.job("one")
    daemon = house.start()
    house.save("one")
    house.wait("the commit", lambda: house.committed("one"))
    daemon.kill()
    daemon.wait()
    done = house.reload("one")
    assert done.returncode == 66
    assert "no daemon runs" in done.stderr
