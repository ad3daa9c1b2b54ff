"""`ckptd status` alone lists every daemon of its user, however it was started, with the worst exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.recover_scene import Scene

OWN_SPACE = ["--pid", "--mount"] if os.geteuid() == 0 else ["--pid", "--mount", "--user"]
"""Other tests run daemons as this user: processes of these tests see each other alone."""


class House:
    """Daemons of one user in a process space of their own; no configuration directory is named."""

    def __init__(self, root: Path, init: int) -> None:
        self.root = root
        self.daemons: list[subprocess.Popen[bytes]] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
        self.environ = clean | {"XDG_CONFIG_HOME": str(root / "config")}
        keeps = [] if os.geteuid() == 0 else ["--preserve-credentials"]
        self.inside = ["nsenter", "-t", str(init), *OWN_SPACE, *keeps, sys.executable, "-m", "ckptd"]

    def scene(self, name: str, *steps: int) -> Scene:
        """A save_dir, with the checkpoints of these steps."""
        found = Scene(self.root / name)
        for step in steps:
            found.save(step)
        return found

    def start(self, scene: Scene, name: str) -> None:
        """`ckptd run SAVE_DIR URL`, by hand."""
        words = ["run", str(scene.save_dir), str(scene.nas), "--same-filesystem"]
        environ = self.environ | {"CKPTD_NAME": name, "CKPTD_SETTLE": "0.3s"}
        with (self.root / "log").open("ab") as log:
            daemon = subprocess.Popen([*self.inside, *words], env=environ, stdout=log, stderr=log)
        self.daemons.append(daemon)

    def kill(self, daemon: subprocess.Popen[bytes]) -> None:
        """The daemon itself, which `nsenter` waits for."""
        for child in psutil.Process(daemon.pid).children():
            child.send_signal(signal.SIGKILL)
        daemon.wait(60)

    def status(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`ckptd status`."""
        command = [*self.inside, "status", *words]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, timeout=200
        )

    def until(self, is_so: Callable[[subprocess.CompletedProcess[str]], bool]) -> str:
        """What status says once it is so."""
        deadline = time.monotonic() + 120
        while not is_so(done := self.status()):
            assert time.monotonic() < deadline, done
            time.sleep(0.3)
        return done.stdout


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Whose daemons end with the test."""
    makes = ["--map-root-user"] if "--user" in OWN_SPACE else []
    # a /var/tmp of its own as well, where daemons of the same user leave their state
    hold = "mount -t tmpfs tmpfs /var/tmp && exec sleep infinity"
    holds = ["--fork", "--mount-proc", "--kill-child", "sh", "-c", hold]
    space = subprocess.Popen(["unshare", *OWN_SPACE, *makes, *holds])
    try:
        while not (children := psutil.Process(space.pid).children()) or children[0].name() != "sleep":
            time.sleep(0.05)
        yield House(tmp_path, children[0].pid)
    finally:
        space.kill()
        space.wait(60)


def test_every_daemon_is_listed_and_the_worst_is_the_exit_code(house: House) -> None:
    none = house.status()
    assert none.returncode == 66
    assert "no daemon of yours runs" in none.stderr
    assert "→ start one: ckptd run SAVE_DIR URL" in none.stderr
    first, second, waiting = house.scene("a", 2), house.scene("b", 3), house.scene("c")
    house.start(first, "alone-a")
    house.until(lambda done: done.returncode == 0 and "alone-a  ● SAFE  step 2" in done.stdout)
    house.start(second, "alone-b")
    shown = house.until(lambda done: done.returncode == 0 and "alone-b  ● SAFE  step 3" in done.stdout)
    assert len(re.findall(r"^  process \d+: CKPTD_NAME=alone-", shown, re.MULTILINE)) == 2
    house.start(waiting, "alone-c")
    # 3: nothing of it is safe yet
    shown = house.until(lambda done: done.returncode == 3 and "alone-c  ● WAITING" in done.stdout)
    assert "alone-a  ● SAFE" in shown and "alone-b  ● SAFE" in shown
    documents = json.loads(house.status("--json").stdout)
    others = documents["other_daemons"]
    names = {job["name"] for one in [documents, *others] for job in one["jobs"]}
    assert names == {"alone-a", "alone-b", "alone-c"}
    live = house.status("--live")
    assert (live.returncode, live.stdout.count("live: process ")) == (0, 3)
    # one that is gone is one that does not run: its SAVE_DIR still tells of it
    house.kill(house.daemons[0])
    assert "alone-a" not in house.status().stdout
    gone = house.status(str(first.save_dir))
    assert (gone.returncode, "NOT WATCHED" in gone.stdout) == (1, True)
    # a configured job is listed whether it runs or not
    jobs = house.root / "config" / "ckptd" / "jobs.d"
    jobs.mkdir(parents=True)
    (jobs / "alone-a.toml").write_text(
        f'save_dir = "{first.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{first.nas}"\n'
    )
    done = house.status()
    assert (done.returncode, "alone-a  ● NOT WATCHED" in done.stdout) == (1, True), done
    assert "alone-b  ● SAFE" in done.stdout
