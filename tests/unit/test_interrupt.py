"""Ctrl-C while a command is still being loaded: exit code 130, and not a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

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
        "ckptd.cli.list_cmd",
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
