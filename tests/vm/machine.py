"""Boot a User-Mode Linux whose systemd runs one case, and return what the case said."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.vm.image import BUILD, ROOT, build

MEMORY = "1100M"
DISK_MEGABYTES = 400
_ALARM_SECONDS = 20.0
DISKS = ("ubdb", "ubdc", "ubdd")
"""Disks of the guest beside its own: the export, the node's, another one."""


def _shim() -> Path:
    """Compile what linux.uml needs on newer processors."""
    source, library = ROOT / "tests" / "vm" / "xstate.c", BUILD / "xstate.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def _wait(guest: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for its end, or raise; an alarm wakes an idle loop that lost its timer, and spins."""
    until = time.monotonic() + seconds
    while guest.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            guest.wait(min(_ALARM_SECONDS, until - time.monotonic()))
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired("linux.uml", seconds)
        guest.send_signal(signal.SIGALRM)  # to a guest that ended it is not sent


def boot(name: str, *arguments: str, seconds: float, again: str = "") -> str:
    """Boot, run the case, and return its lines; `again`: with the disks of the last time that case.

    Raises:
        subprocess.TimeoutExpired: the guest did not end in time; it was ended.
    """
    image, place = build(), BUILD / "guests" / name
    if not again:
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    share = place / "share"
    share.mkdir(exist_ok=True)
    out = share / "case.out"
    out.unlink(missing_ok=True)
    command = ["linux.uml", f"umid={name}", f"ubd0={place}/root.cow,{image}", "root=/dev/ubda", "rw"]
    for number, disk in enumerate(DISKS, start=1):
        path = place / disk
        with path.open("ab") as file:
            file.truncate(DISK_MEGABYTES << 20)
        command.append(f"ubd{number}={path}")
    command += [f"mem={MEMORY}", "con=null", "con0=null,fd:1", "init=/sbin/init"]
    command += [
        f"vm.case={':'.join((again or name, *arguments))}",
        f"vm.share={share}",
        f"vm.repository={ROOT}",
    ]
    with (place / "console").open("ab") as console:
        guest = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=os.environ | {"TMPDIR": str(place), "LD_PRELOAD": str(_shim())},  # its memory is a file there
            start_new_session=True,
        )
        try:
            _wait(guest, seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guest.pid, signal.SIGKILL)
            guest.wait()
    return out.read_text() if out.exists() else ""


if __name__ == "__main__":
    print(boot(*sys.argv[1:], seconds=600))
