"""Sixteen at once on one save_dir, events that get lost, watches that are refused (P10, P8)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.figures import note
from tests.e2e.harness import Node, node
from tests.support.synthetic import write_stage12

pytestmark = pytest.mark.faults
FULL = bool(os.environ.get("CKPTD_FULL"))
ROUNDS = 1000 if FULL else 20
EVENTS = 10_000 if FULL else 400
CONTENDER = """
import os, sys, time
from ckptd.daemon.save_dir_lock import open_locked
from ckptd.errors import LockHeld
save_dir, mark, begin, rounds = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
won = both = 0
for number in range(rounds):
    while time.time() < begin + number * 0.02:
        time.sleep(0.0005)
    try:
        fd = open_locked(save_dir)
    except LockHeld:
        continue
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        won += 1
        time.sleep(0.004)
        os.unlink(mark)
    except FileExistsError:
        both += 1
    os.close(fd)
print(won, both)
"""


def test_sixteen_race_for_the_lock(tmp_path: Path) -> None:
    """Whoever got it finds nobody else in there, in each of many rounds."""
    save_dir = tmp_path / "run"
    save_dir.mkdir()
    started = time.monotonic()
    arguments = [str(save_dir), str(tmp_path / "mark"), str(time.time() + 3), str(ROUNDS)]
    contenders = [
        subprocess.Popen([sys.executable, "-c", CONTENDER, *arguments], stdout=subprocess.PIPE, text=True)
        for _ in range(16)
    ]
    rows = [tuple(map(int, one.communicate(timeout=300)[0].split())) for one in contenders]
    won, both = sum(row[0] for row in rows), sum(row[1] for row in rows)
    note(
        "F19", "sixteen race for one save_dir", runs=won, violations=both, seconds=time.monotonic() - started
    )
    assert both == 0
    assert won >= ROUNDS // 2


def save(here: Node, step: int) -> None:
    """A small save."""
    staged = here.root / f"staged{step}"
    write_stage12(staged, [{"w": (16, 8), "b": (8,)}], 2, step=step)
    shutil.copytree(staged, here.save_dir / f"global_step{step}")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as made:
        yield made


@pytest.mark.full
def test_a_killed_holder_a_copied_state_and_a_stale_pid_stand_in_nobodys_way(here: Node) -> None:
    """The lock is the kernel's: nothing that lies in a file keeps the next daemon out."""
    first = here.start()
    save(here, 1)
    here.wait_committed("global_step1~g1")
    here.wait("a status", (here.state / "status.json").exists)
    status = json.loads((here.state / "status.json").read_bytes())
    assert status["daemon"]["pid"] == first.pid
    here.kill()
    status["daemon"]["pid"] = os.getpid()  # alive, and not a daemon: the number was given out again
    (here.state / "status.json").write_text(json.dumps(status))
    shutil.copytree(here.save_dir / "_ckptd", here.root / "copy" / "_ckptd")
    here.start()
    save(here, 2)
    here.wait_committed("global_step2~g1")
    (here.save_dir / "_ckptd" / "lock").write_text(str(os.getpid()))
    here.stop()
    here.start()
    save(here, 3)
    here.wait_committed("global_step3~g1")


QUEUE = Path("/proc/sys/fs/inotify/max_queued_events")


@pytest.mark.root
def test_a_queue_of_one_event_loses_nothing(here: Node) -> None:
    """The kernel drops nearly all of ten thousand events (400 in CI); looks find every save (P8)."""
    before = QUEUE.read_text()
    try:
        QUEUE.write_text("1")
        here.start()
    finally:
        QUEUE.write_text(before)
    started = time.monotonic()
    for number in range(EVENTS):
        path = here.save_dir / f"noise{number % 50}"
        path.write_text("x") if number % 2 else path.unlink(missing_ok=True)
        if number % (EVENTS // 2) == 0:
            save(here, 1 + 2 * number // EVENTS)
    for step in (1, 2):
        here.wait_committed(f"global_step{step}~g1", 60)
    assert "queue overflowed" in here.log.read_text(), "no event was lost: nothing was tried"
    note(
        "F22",
        "ten thousand events, a queue of one",
        runs=EVENTS,
        violations=0,
        seconds=time.monotonic() - started,
    )


@pytest.mark.full
def test_no_watches_at_all(here: Node) -> None:
    """Where the user may have none, rescans do the work, and status says so."""
    script = 'echo 0 > /proc/sys/user/max_inotify_watches && exec "$@"'
    command = ["unshare", "-U", "-r", "sh", "-c", script, "sh", sys.executable, "-m", "ckptd", "run"]
    with here.log.open("ab") as log:
        process = subprocess.Popen([*command, "--job", str(here.job_file)], stdout=log, stderr=log)
    here.processes.append(process)
    here.wait("watching", lambda: b"watching" in here.log.read_bytes())
    save(here, 1)
    here.wait_committed("global_step1~g1", 60)
    here.wait("said", lambda: "no-file-events" in here.problems(), 30)
