"""A real OpenSSH server as an ordinary process on 127.0.0.1, with keys, known_hosts and HOME of its own.

SFTP alone is served, by sshd itself; it and its sessions are ended by pid with the test that started them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.stores.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh-keygen") is None,
    reason="no sshd here (Debian, Ubuntu: apt install openssh-server); SFTP is not tested",
)
_START_SECONDS = 200.0


def make_key(path: Path) -> Path:
    """A new key without a passphrase."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ckptd-test", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


@dataclass
class Sshd:
    """A server; `home` is the HOME of whoever may connect to it."""

    root: Path
    port: int
    denied: str = ""
    """Requests that it does not know, as `sftp-server -P`."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        """HOME with ~/.ssh/id_ed25519 and known_hosts."""
        return self.root / "home"

    @property
    def key(self) -> Path:
        """The key that is let in."""
        return self.home / ".ssh" / "id_ed25519"

    @property
    def files(self) -> Path:
        """Where remotes lie."""
        return self.root / "files"

    @property
    def _options(self) -> str:
        return f" -P {self.denied}" if self.denied else ""

    def url(self, name: str = "remote") -> str:
        """sftp:// of a folder that need not exist yet."""
        return f"sftp://{getpass.getuser()}@127.0.0.1:{self.port}{self.files}/{name}"

    def prepare(self) -> None:
        """Keys, known_hosts, configuration."""
        self.files.mkdir(parents=True)
        self.key.parent.mkdir(parents=True)
        make_key(self.key)
        host_key = make_key(self.root / "host_key")
        public = self.key.with_suffix(".pub").read_text()
        (self.root / "authorized_keys").write_text(public)
        self.know(host_key.with_suffix(".pub").read_text())
        (self.root / "config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {host_key}\nPidFile none\n"
            f"AuthorizedKeysFile {self.root}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            "AllowTcpForwarding no\nX11Forwarding no\nPermitTTY no\n"
            f"Subsystem sftp internal-sftp{self._options}\nForceCommand internal-sftp{self._options}\n"
        )

    def know(self, public_key: str) -> None:
        """Write known_hosts; "" knows nobody."""
        kind_and_key = " ".join(public_key.split()[:2])
        line = f"[127.0.0.1]:{self.port} {kind_and_key}\n" if public_key else ""
        (self.key.parent / "known_hosts").write_text(line)

    def start(self) -> None:
        """Start and wait until it says so."""
        assert SSHD is not None
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        log = self.root / "sshd.log"
        mark = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            command = [SSHD, "-D", "-e", "-f", str(self.root / "config")]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if b"Server listening" in log.read_bytes()[mark:]:
                return
            time.sleep(0.02)
        message = f"sshd does not listen: {log.read_text()[-2000:]}"
        raise RuntimeError(message)

    def drop_sessions(self) -> None:
        """SIGKILL to the sessions alone: as a firewall that forgot them."""
        for pid in self.processes()[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """The server and its sessions, by pid."""
        if self.process is None:
            return []
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += [int(child) for child in task.read_text().split()]
        return found

    def kill(self) -> None:
        """SIGKILL to the server and to every session: as a machine that lost its power."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)

    def stop_answering(self, *, is_stopped: bool) -> None:
        """SIGSTOP: connections stay and nothing comes back."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)


@contextlib.contextmanager
def sshd(root: Path, denied: str = "") -> Iterator[Sshd]:
    """A server that runs for the block."""
    server = Sshd(root=root, port=free_port(), denied=denied)
    server.prepare()
    server.start()
    try:
        yield server
    finally:
        server.kill()
