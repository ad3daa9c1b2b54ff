"""Notify systemd of readiness and status, and keep its watchdog alive (P17).

WATCHDOG=1 is sent by the deciding thread after a turn of every job, never by a timer: a daemon that does not
decide any more gets restarted.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import sdnotify

from ckptd.config.environment import shown_variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SystemdNotifier:
    """Notifications to $NOTIFY_SOCKET; without one every call does nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._notifier = sdnotify.SystemdNotifier()
        self._status = ""
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        text = environ.get("WATCHDOG_USEC", "")
        self.watchdog_seconds = int(text) / 1e6 if text.isdecimal() and is_ours else None
        """Seconds that systemd waits for a turn; None: it does not."""
        self._alive_at = 0.0

    def ready(self) -> None:
        """Jobs are open."""
        self._notifier.notify("READY=1")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._notifier.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end begins."""
        self._notifier.notify("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`, when it changed."""
        if text != self._status:
            self._status = text
            self._notifier.notify(f"STATUS={text[:200]}")

    def turn_completed(self) -> None:
        """Every job took its turn."""
        limit = self.watchdog_seconds
        if limit is not None and time.monotonic() - self._alive_at >= limit / 6:
            self._alive_at = time.monotonic()
            self._notifier.notify("WATCHDOG=1")

    def longest_pause_seconds(self, pause_seconds: float) -> float:
        """Return the longest pause of the loop: half the watchdog's patience."""
        return min(pause_seconds, self.watchdog_seconds / 3) if self.watchdog_seconds else pause_seconds


def start_command(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the command that starts this daemon again; empty: it was not started by `run`.

    It is the daemon's systemd unit, else its own command line with the settings from its environment.
    """
    if arguments[:1] != ["run"]:
        return ""
    groups = ""
    with contextlib.suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    if unit := unit_of(groups):
        return unit
    settings = shown_variables(environ)
    line = " ".join([*(f"{name}={shlex.quote(text)}" for name, text in settings.items()), "ckptd"])
    # what ran once is to be watched from now on
    line = f"{line} {shlex.join(word for word in arguments if word != '--once')}"
    words = [*arguments[1:], *settings.values()]
    is_relative = any(not word.startswith(("/", "-")) and os.path.exists(word) for word in words)
    return f"cd {shlex.quote(os.getcwd())} && {line}" if is_relative else line


def unit_of(groups: str) -> str:
    """The command for a unit of ours, by the text of /proc/PID/cgroup; empty: it is in none.

    >>> unit_of("0::/ckptd.slice/ckptd@alice.service")
    'systemctl start ckptd@alice'
    >>> unit_of("0::/user.slice/user-1000.slice/user@1000.service/ckptd.slice/ckptd.service")
    'systemctl --user start ckptd'
    """
    for line in groups.splitlines():
        path = line.rpartition(":")[2]
        name = path.rpartition("/")[2]
        if name.startswith("ckptd") and name.endswith(".service"):
            asks = "systemctl --user" if "/user@" in path else "systemctl"
            return f"{asks} start {name.removesuffix('.service')}"
    return ""
