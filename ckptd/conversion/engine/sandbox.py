"""Restrict a child before it opens a checkpoint: resources, network, privileges.

Called first thing in the child, since checkpoints may be hostile (P14). The parent empties the environment
and closes descriptors; this module sets rlimits, no-new-privileges, death with the parent, and a network
namespace where the kernel lets an ordinary user have one. Nothing here needs root, nothing widens a right.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.errors import CkptdError

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
UNLIMITED = -1
STOP_SIGNAL = signal.SIGUSR1
"""Signal by which a parent stops a child; children block SIGTERM, which Slurm sends to a whole step."""


def restrict(
    *, memory_bytes: int, cpu_seconds: int, file_bytes: int, network: bool = False, priority: bool = True
) -> tuple[str, ...]:
    """Restrict this process; returns the names of what holds ("rlimits", "no-new-privs", "no-network" …).

    `memory_bytes` bounds the address space, `file_bytes` any file written (each may be UNLIMITED);
    `network` True leaves the network alone; `priority` lowers CPU and I/O priority (P11). Once the child dies
    with its parent it writes an empty line to stderr, by which the parent knows that it may be stopped: a
    process stopped before it asked for that would outlive a killed parent for ever.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    held: list[str] = []
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
        held.append("dies-with-parent")
    with contextlib.suppress(OSError):
        os.write(2, b"\n")
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        held.append("no-new-privs")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_CPU, cpu_seconds)
    if _limit(resource.RLIMIT_AS, memory_bytes):
        held.append("rlimits")
    if not network and _leave_network(libc):
        held.append("no-network")
    if priority:
        lower_priority(libc)
    return tuple(held)


def lower_priority(libc: ctypes.CDLL | None = None) -> None:
    """Nice 10, preempting nobody, the lowest best-effort I/O class; failures are harmless."""
    with contextlib.suppress(OSError):
        os.nice(10)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    library = libc or ctypes.CDLL(None, use_errno=True)
    library.syscall(251 if os.uname().machine == "x86_64" else 30, 1, 0, (2 << 13) | 7)  # ioprio_set


def _limit(which: int, value: int) -> bool:
    if value == UNLIMITED:
        return False
    hard = resource.getrlimit(which)[1]
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(which, (bound, bound))
    except (OSError, ValueError):
        return False
    return True


def _leave_network(libc: ctypes.CDLL) -> bool:
    """A private, empty network namespace: with CAP_SYS_ADMIN alone, else inside a user namespace.

    A user namespace is not taken by root: it would lose the right to read other users' checkpoints.
    """
    if os.geteuid() == 0:
        return bool(libc.unshare(_CLONE_NEWNET) == 0)
    return bool(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0)


def peak_rss_bytes() -> int:
    """High-water mark of this process (VmHWM; ru_maxrss would count the parent before exec)."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def fail(error: CkptdError) -> int:
    """Tell the parent why this child failed, as its last line on stderr; returns its exit status."""
    sys.stderr.write(json.dumps(error.as_data) + "\n")
    return error.exit_code
