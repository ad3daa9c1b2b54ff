"""Ctrl-C while a command is still being loaded: exit code 130, and not a word."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.errors import NotPermitted
from ckptd.recover.select.sources import where_of
from tests.support.restore_scene import OPTIM, TAG, RestoreScene, scene

__all__ = ["scene"]

INTERRUPTED = """
import os, runpy, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == WHEN:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
        return None

WHEN = sys.argv.pop(1)
sys.meta_path.insert(0, AtImport())
runpy.run_module("ckptd", run_name="__main__")
"""


def interrupted(when: str, *arguments: str, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """`ckptd …`, interrupted as it imports a module."""
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED, when, *arguments],
        check=False,
        capture_output=True,
        text=True,
        # what was started in the background would hand on that it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
        env={**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent"},
    )


@pytest.mark.parametrize(
    "when",
    [
        "ckptd.cli",
        "ckptd.cli.main",
        "typer",
        "typer.main",
        "ckptd.errors",
        "ckptd.cli.checkpoints.listing",
        "rich.console",
    ],
)
def test_at_any_import(when: str) -> None:
    done = interrupted(when, "list", "job")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_where_it_is_ignored_it_is_ignored() -> None:
    """As a shell does for what it starts in the background."""
    done = interrupted("typer", "list", "job", ignored=True)
    assert (done.returncode, "no job 'job'" in done.stderr) == (66, True), done


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [(">&-", 66, "no daemon has published"), (">&- 2>&-", 66, ""), ("<&- >&- 2>&-", 66, "")],
)
def test_closed_outputs_are_no_reason_to_fail(closed: str, code: int, said: str) -> None:
    """A file that is opened takes the lowest number that is free: never that of what we print on."""
    command = f'"$0" -m ckptd status /nowhere/at/all {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], check=False, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False)


def test_what_nobody_reads_any_more_ends_like_any_program() -> None:
    """`status` ends without taking the interpreter apart: what it said is out before, or it says why not."""
    shown = subprocess.run(
        ["sh", "-c", '"$0" -m ckptd status --help | cat', sys.executable],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Is my run safe?" in shown.stdout
    full = subprocess.run(
        ["sh", "-c", '"$0" -m ckptd status --help > /dev/full', sys.executable],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert full.returncode != 0
    assert "No space left" in full.stderr


AT_A_SHARD = """
import os, runpy, signal, sys

def hook(name, arguments):
    if name == "open" and WHEN in str(arguments[0]) and not done:
        done.append(1)
        os.kill(os.getpid(), int(SIGNAL))

WHEN, SIGNAL, done = sys.argv.pop(1), sys.argv.pop(1), []
sys.addaudithook(hook)
runpy.run_module("ckptd", run_name="__main__")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("verb", ["restore", "resume"])
def test_a_recovery_says_where_it_was_stopped(scene: RestoreScene, verb: str, how: signal.Signals) -> None:
    """The plan in the future, what was done in the past, and what to type; the same command goes on.

    One line at the end, no traceback, nothing on stdout for a launch script.
    """
    scene.two()
    if verb == "resume":
        shutil.rmtree(scene.save_dir)
        scene.save_dir.mkdir()
        place, words = scene.save_dir, ["resume", str(scene.save_dir), str(scene.nas)]
    else:
        place, words = scene.dir, ["restore", str(scene.nas), "--to", str(scene.dir)]

    def ckptd(*first: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent"}
        command = [sys.executable, *first, *words]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=200)

    stopped = ckptd("-c", AT_A_SHARD, OPTIM.format(1), str(int(how)))
    assert not list((scene.nas / "_ckptd" / "readers").iterdir())
    said = stopped.stderr.splitlines()
    assert (stopped.returncode, stopped.stdout) == (130, ""), stopped
    assert "Traceback" not in stopped.stderr
    assert f"ckptd: will put it in place as {TAG}" in said
    assert not [line for line in said if line.startswith(("ckptd: fetched", "ckptd: put"))], said
    assert said[-1].startswith(f"ckptd: stopped, and this was not done: fetch {TAG}"), said
    assert f"write latest = {TAG}" in said[-1]
    assert [line for line in said if "to go on" in line] == said[-1:]
    assert said[-1].endswith(f"→ to go on: ckptd {' '.join(words)}")
    assert not (place / TAG).exists()
    done = ckptd("-m", "ckptd")
    assert (done.returncode, done.stdout.strip()) == (0, str(place / TAG)), done
    assert f"ckptd: put it in place as {TAG}" in done.stderr.splitlines()
    assert f"ckptd: wrote latest = {TAG}" in done.stderr.splitlines()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_check_by_loading_leaves_nothing_when_it_is_stopped(
    scene: RestoreScene, tmp_path: Path, how: signal.Signals
) -> None:
    """Neither the checkpoint that it restores to a temporary folder, nor its lease in the remote."""
    scene.two()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environ = {**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent", "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", AT_A_SHARD, OPTIM.format(1), str(int(how))]
    stopped = subprocess.run(
        [*command, "verify", str(scene.nas), "--load"],
        check=False,
        capture_output=True,
        text=True,
        env=environ,
        timeout=200,
    )
    assert (stopped.returncode, "Traceback" in stopped.stderr) == (130, False), stopped
    assert list(scratch.iterdir()) == []
    assert not list((scene.nas / "_ckptd" / "readers").iterdir())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (another user)")
def test_a_target_of_another_user(scene: RestoreScene) -> None:
    """The target is the caller's choice; who trains has nothing to do with it."""
    scene.two()
    where = where_of(str(scene.nas), {})
    scene.root.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(NotPermitted, match=f"{scene.dir.parent}.*Permission denied") as caught:
            scene.restore(where=where)
    finally:
        os.seteuid(0)
    assert "name another directory with --to" in caught.value.hint
