"""A mount that can be made to hang: sshfs over a real SSH server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from tests.stores.sshd import Sshd, sshd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_START_SECONDS = 200.0
_NO_CACHE = "dir_cache=no,attr_timeout=0,entry_timeout=0"
"""Else what was looked at within 20 s answers though the server does not."""


@contextlib.contextmanager
def sshfs(folder: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes], Sshd]]:
    """Mount point, the process that serves it, and the server.

    While the process is stopped calls hang and a kill ends them; while the server is stopped nothing does.
    """
    point = folder / "mnt"
    point.mkdir()
    with sshd(folder / "server") as server:
        options = f"port={server.port},IdentityFile={server.key},StrictHostKeyChecking=yes,{_NO_CACHE}"
        known = f"UserKnownHostsFile={server.key.parent}/known_hosts"
        source = f"{server.url().split('@')[0].removeprefix('sftp://')}@127.0.0.1:{server.files}"
        process = subprocess.Popen(["sshfs", "-f", source, str(point), "-o", f"{options},{known}"])
        end = time.monotonic() + _START_SECONDS
        while not os.path.ismount(point):
            assert time.monotonic() < end, "sshfs does not mount"
            assert process.poll() is None
            time.sleep(0.05)
        try:
            yield point, process, server
        finally:
            process.send_signal(signal.SIGCONT)
            subprocess.run(["umount", "-l", str(point)], check=False)
            process.terminate()
            process.wait(10)
