"""A directory remote that hangs costs a start of the daemon nothing, and each command a limited time.

The mount is sshfs over a real SSH server that is stopped: a call that waits for it is not ended by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import RUN, made_before, node
from tests.faults.hanging import sshfs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Node
    from tests.stores.sshd import Sshd

pytestmark = [pytest.mark.faults, pytest.mark.root]
real_saves = made_before(RUN)

_QUICK = (
    "from ckptd.base import process; from ckptd.maintenance import check; from ckptd.__main__ import entry\n"
    "process.SAID_SECONDS, process.LIMIT_SECONDS, check.REMOTE_SECONDS = 2.0, 20.0, 20.0\nentry()"
)
"""ckptd with shorter limits than 5 s and 30 s."""
_QUICK_TO_CUT = (
    "import sys; del sys.argv[1:4]\n"  # the command that this program takes the place of
    "from ckptd.daemon.uploads import session\n"
    "session.IDLE_SECONDS, session.STILL_SECONDS = 25.0, 3.0\n"
    "from ckptd.__main__ import entry\nentry()"
)
"""ckptd that cuts an upload after 25 s without a byte, not 60 s, and says it after 3 s, not 10 s."""
_PATIENCE_SECONDS = 90.0


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[tuple[Node, Path, Sshd]]:
    """A node whose first remote lies on the mount; both remotes hold step 1 when the server stops."""
    with sshfs(tmp_path) as (point, _, server), node(tmp_path / "node") as here:
        (tmp_path / "second").mkdir()
        second = f'[[remote]]\nname = "second"\nurl = "{tmp_path}/second/run"\nsame_filesystem = true\n'
        forms = 'forms = ["zero"]\n'
        here.url = f"{point}/run"
        here.write_job(local="forms = []\nsave_total_limit = 2", remote=f"{forms}{second}{forms}")
        here.save(1)
        assert here.once() == 0, here.log.read_text()
        server.stop_answering(is_stopped=True)
        try:
            yield here, tmp_path / "second" / "run", server
        finally:
            server.stop_answering(is_stopped=False)


def holds(place: Path, *patterns: str) -> bool:
    """Whether such a file lies there; what is removed while it is looked for is no error."""
    with contextlib.suppress(FileNotFoundError):
        return any(any(place.rglob(pattern)) for pattern in patterns)
    return False


@pytest.mark.full
def test_a_drain_does_not_wait_for_a_mount_that_hangs(tmp_path: Path) -> None:
    """Said within seconds as a note; the daemon ends a minute after the last byte, not at its deadline."""
    with sshfs(tmp_path) as (point, _, server), node(tmp_path / "node") as here:
        here.url = f"{point}/run"
        here.write_job(local="forms = []", remote='forms = ["zero"]\nbandwidth = "50KB/s"')
        process = here.start("--drain", "300s")
        here.save(1)
        here.wait("bytes in the remote", lambda: holds(point, "*.pt", ".ckptd-*"))
        server.stop_answering(is_stopped=True)
        hung_at = time.monotonic()
        try:
            here.wait("said", lambda: "transfer-stalled" in here.problems(), 40)
            (said,) = (p for p in here.status()["problems"] if p["code"] == "transfer-stalled")
            assert said["severity"] == "note"
            assert said["text"].startswith("remote nas has not answered for ")
            assert here.status()["state"] == "behind"
            process.send_signal(signal.SIGTERM)
            assert process.wait(150) == 3
            assert 55 < time.monotonic() - hung_at < 120
            assert "no byte moves to nas, nor anywhere else: not waited for; not committed: global_step1" in (
                here.log.read_text()
            )
        finally:
            server.stop_answering(is_stopped=False)


def test_status_and_ckptd_drain_say_which_remote_hangs(tmp_path: Path) -> None:
    """The job is behind within seconds; `drain` gives up what its daemon would; the upload goes on later."""
    with sshfs(tmp_path) as (point, _, server), node(tmp_path / "node") as here:
        here.url = f"{point}/run"
        here.write_job(local="forms = []", remote='forms = ["zero"]\nbandwidth = "100KB/s"')
        here.under = (sys.executable, "-c", _QUICK_TO_CUT)
        here.start()
        here.save(1)
        here.wait("bytes in the remote", lambda: holds(point, "*.pt", ".ckptd-*.part"))
        server.stop_answering(is_stopped=True)
        try:
            here.wait("said", lambda: "transfer-stalled" in here.problems(), 40)
            seen = here.status()
            (said,) = (p for p in seen["problems"] if p["code"] == "transfer-stalled")
            assert said["severity"] == "note", "it was not cut yet"
            assert said["text"].startswith("remote nas has not answered for ")
            assert seen["state"] == "behind"
            assert seen["checkpoints"][0]["remotes"]["nas"]["zero"]["eta_seconds"] is None
            begun = time.monotonic()
            done = here.ckptd("drain", here.job_file, "--deadline", "400s", timeout_seconds=200)
            assert done.returncode == 3
            assert time.monotonic() - begun < _PATIENCE_SECONDS
            assert done.stdout == "run: not committed: global_step1\n"
            assert "run: no byte moves to nas, nor anywhere else: not waited for" in done.stderr
            first = here.ckptd("status", here.job_file).stdout.splitlines()[0]
            assert "left, no byte moves to nas" in first
        finally:
            server.stop_answering(is_stopped=False)
        commit = point / "run" / "_ckptd" / "commits" / "global_step1~g1~zero.json"
        here.wait("step 1 in the one that hung", commit.exists, 240)


def test_each_command_names_the_remote_and_ends(hung: tuple[Node, Path, Sshd]) -> None:
    """What the other remote can answer is answered, else 69."""
    here, second, _ = hung
    job, nas = str(here.job_file), here.url
    expected = {
        ("resume", job): 0,
        ("resume", job, "--remote", "second"): 0,
        ("list", job): 69,
        ("verify", job): 69,
        ("check", job): 69,
        ("gc", job, "--dry-run"): 69,
        ("pin", job, "global_step9"): 69,
        ("takeover", job): 69,
        ("restore", job, "global_step1", "--to", str(here.save_dir.parent / "restored")): 0,
        ("list", nas): 69,
        ("status", nas): 69,
        ("inspect", f"{nas}/global_step1"): 69,
        ("convert", "--dry-run", f"{nas}/global_step1", str(here.save_dir.parent / "universal")): 69,
    }
    begun = time.monotonic()
    running = {words: _start(*words) for words in expected}
    found: dict[tuple[str, ...], int | None] = {}
    said: dict[tuple[str, ...], str] = {}
    for words, process in running.items():
        try:
            out, err = process.communicate(timeout=max(1.0, _PATIENCE_SECONDS - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            found[words], said[words] = None, "no end"
        else:
            found[words], said[words] = process.returncode, out + err
    assert not [words for words, code in found.items() if code is None], "no end"
    assert found == expected, said
    for words in expected:
        if words[-1] != "second":
            assert "did not answer within 20 s" in said[words], (words, said[words])
            assert "remote nas" in said[words] or nas in said[words], (words, said[words])
    assert "remote nas has not answered for 2 s" in said["list", job]
    assert f"remote nas ({nas}) did not answer within 20 s" in said["resume", job]
    assert str(second) not in said["resume", job], "nothing is wrong with the other one"


def test_a_daemon_starts_and_reloads_while_it_hangs(hung: tuple[Node, Path, Sshd]) -> None:
    """It seals, the other remote gets the save; the hung one catches up when it answers again."""
    here, second, server = hung
    begun = time.monotonic()
    process = here.start(seconds=_PATIENCE_SECONDS / 2)
    assert time.monotonic() - begun < _PATIENCE_SECONDS / 2, "the daemon waits for the mount"
    commits = second / "_ckptd" / "commits"
    here.save(2)
    here.wait("step 2 in the other remote", lambda: (commits / "global_step2~g1~zero.json").exists(), 90)
    done = "configuration read again: "
    assert done not in here.log.read_text()
    process.send_signal(signal.SIGHUP)
    here.wait("the end of the reload", lambda: done in here.log.read_text(), 60)
    here.save(3)
    here.wait("step 3 in the other remote", lambda: (commits / "global_step3~g1~zero.json").exists(), 90)
    assert process.poll() is None
    server.stop_answering(is_stopped=False)
    ours = here.url + "/_ckptd/commits/global_step3~g1~zero.json"
    here.wait("step 3 in the one that hung", lambda: os.path.exists(ours), 240)


def _start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _QUICK, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    )
