"""Start a child of ours: it is born with SIGTERM and SIGINT blocked, its parent ends it.

Slurm signals every process of a step, a terminal by Ctrl-C, systemd and `kill -- -PGID` may as well: a daemon
that drains needs its children to its end. The mask is inherited through exec, so there is no moment at which
a child would die. Each ends by itself with its parent (PR_SET_PDEATHSIG), or at the end of its input. It
leads a session of its own, which ranks behind others where the kernel groups processes by session (adr/0223).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ckptd.errors import RemoteUnreachable

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType


SAID_SECONDS = 5.0
"""After this long without an answer a command says on stderr which remote or path it waits for."""
LIMIT_SECONDS = 30.0
"""After this long it counts as unreachable."""
NOT_ANSWERING = "is the server up? a hard mount waits for ever; see `ckptd check`"


def limit_malloc(settings: Mapping[int, int]) -> None:
    """Set options of malloc, number → value (glibc alone)."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in settings.items():
            mallopt(option, value)


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `subprocess.Popen` for a child that neither SIGTERM nor SIGINT ends."""
    import subprocess  # here: children that start none do without

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def calling_on_stop_signals(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGTERM and SIGINT, and afterwards handle them as before; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: act()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM as at Ctrl-C, so that leases and temporaries are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def must_answer(path: str) -> None:
    """Look at a path that a command was given in a process of its own, before the command touches it.

    Raises:
        RemoteUnreachable: it does not answer.
    """
    pid = os.fork()
    if pid == 0:
        # a process that cannot be ended keeps no stream of ours open
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.closerange(1, 1 << 16)
        with contextlib.suppress(OSError):
            os.statvfs(path)
            os.stat(os.path.join(path, "_ckptd"))
        os._exit(0)
    for seconds in (SAID_SECONDS, LIMIT_SECONDS - SAID_SECONDS):
        if _has_ended(pid, seconds):
            return
        if seconds == SAID_SECONDS:
            say_waiting(path)
    os.kill(pid, signal.SIGKILL)
    raise RemoteUnreachable(f"{path} did not answer within {LIMIT_SECONDS:.0f} s", hint=NOT_ANSWERING)


def _has_ended(pid: int, seconds: float) -> bool:
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], seconds)[0]:
            return False
    finally:
        os.close(fd)
    os.waitpid(pid, 0)
    return True


def say_waiting(shown: str) -> None:
    """Write one line to stderr: what a command waits for, and how long."""
    text = f"{shown} has not answered for {SAID_SECONDS:.0f} s; waiting for it {LIMIT_SECONDS:.0f} s at most"
    sys.stderr.write(f"ckptd: {text}\n")
    sys.stderr.flush()


_PR_SET_PDEATHSIG = 1


_NICE, _AGAIN_SECONDS = 10, 0.1


def become_child() -> None:
    """Make this process die with its parent process, ignore Ctrl-C, and rank behind others.

    Not with the thread that started it: PR_SET_PDEATHSIG speaks of that one.
    """
    import ctypes

    parent = os.getppid()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGUSR1, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        os._exit(0)
    _rank_behind_others()


def _rank_behind_others() -> None:
    """Take nice 10, in a session of its own: within one alone it would count nothing beside a trainer's."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
        os.setsid()
        fd = os.open("/proc/self/autogroup", os.O_WRONLY | os.O_CLOEXEC)
        if set_session_nice(fd, _NICE):
            os.close(fd)
        else:
            threading.Thread(target=_rank_session, args=(fd,), daemon=True).start()


def _rank_session(fd: int) -> None:
    while not set_session_nice(fd, _NICE):
        time.sleep(_AGAIN_SECONDS)
    os.close(fd)


def set_session_nice(autogroup_fd: int, nice: int) -> bool:
    """Set the nice value of a session among sessions, by an open `/proc/PID/autogroup` (adr/0223).

    False: to be asked again; the kernel takes ten such requests a second, from all users together.
    """
    try:
        os.write(autogroup_fd, str(nice).encode())
    except BlockingIOError:
        return False
    except OSError:  # the process has ended, or its session is no group of the scheduler
        return True
    return True
