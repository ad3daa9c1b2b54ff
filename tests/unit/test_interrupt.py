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
