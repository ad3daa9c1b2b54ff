"""Starting a child of ours: it is born with SIGTERM blocked, its parent ends it.

Slurm signals every process of a step, systemd and `kill -- -PGID` may as well: a daemon that drains needs its
children to its end. The mask is inherited through exec, so there is no moment at which a child would die.
Each ends by itself with its parent (PR_SET_PDEATHSIG), or at the end of its input.
"""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`, of a child that SIGTERM does not end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
