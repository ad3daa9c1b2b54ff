"""The daemon towards its supervisor: systemd's notifications, and the watchdog's keep-alive (P17).

WATCHDOG=1 is sent by the deciding thread after a turn of every job, never by a timer: a daemon that does not
decide any more gets restarted.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import sdnotify

if TYPE_CHECKING:
    from collections.abc import Mapping


class Service:
    """Notifications to $NOTIFY_SOCKET; without one every call does nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._notifier = sdnotify.SystemdNotifier()
        self._status = ""
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        text = environ.get("WATCHDOG_USEC", "")
        self.watchdog_seconds = int(text) / 1e6 if text.isdecimal() and is_ours else None
        """How long the supervisor waits for a turn; None: it does not."""
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
        """Never sleep through half the watchdog's patience."""
        return min(pause_seconds, self.watchdog_seconds / 3) if self.watchdog_seconds else pause_seconds
