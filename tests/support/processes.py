"""Kill processes of ckptd with everything that they started, and know when all are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

GONE_SECONDS = 200


def kill_with_children(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill a process and its children as a power cut does, and wait until none runs.

    The parent is stopped first, so that it starts none meanwhile; what a child held (locks, open files)
    is free when this returns. A process that ended already is left alone.

    Raises:
        AssertionError: one still runs after GONE_SECONDS.
    """
    if process.poll() is not None:
        return
    os.kill(process.pid, signal.SIGSTOP)
    children = psutil.Process(process.pid).children(recursive=True)
    for one in (*children, process):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    wait_gone(one.pid for one in children)


def wait_gone(pids: Iterable[int]) -> None:
    """Wait until none of them runs.

    Raises:
        AssertionError: one still runs after GONE_SECONDS.
    """
    left, deadline = list(pids), time.monotonic() + GONE_SECONDS
    while left := [pid for pid in left if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """True while the process is there and no zombie."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """State of a process by one letter of proc(5), "" once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
