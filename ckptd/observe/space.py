"""Where process ids mean something: of another container, machine or boot they say nothing.

The daemon publishes it, so that who reads status.json in another container is not told that it is dead.
"""

from __future__ import annotations

import os
from pathlib import Path


def pid_space() -> str:
    """This boot and this namespace of process ids; empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
