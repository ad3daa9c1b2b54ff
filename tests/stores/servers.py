"""Real S3 servers as processes on this machine: moto (enforces conditions) and rclone (checks signatures).

Each listens on 127.0.0.1 alone, logs to a file, and is ended by pid with the test that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.config import Config
from botocore.session import Session

from ckptd.storage.stores.access import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCESS_KEY, SECRET_KEY = "test", "testtest"
BUCKET = "training"
START_SECONDS = 200.0
CLIENT = os.environ.get("CKPTD_REMOTE_CLIENT", "botocore")
"""What the S3 stores of these tests speak by; those that ask for `either_client` run over both."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running server; `bucket` exists."""

    name: str
    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it listens."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env={**os.environ, **self.environment}
            )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        message = f"{self.name} does not listen: {self.log.read_text()[-2000:]}"
        raise RuntimeError(message)

    def stop(self) -> None:
        """End it and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def client(self, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
        """A plain client, to look at the server behind ckptd's back."""
        return Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def requests(self) -> list[str]:
        """Lines of its log."""
        return self.log.read_text(errors="replace").splitlines()


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """moto: in memory; conditions on PUT and Complete are enforced, wrong checksums and keys are not."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    yield from _running(Server("moto", command, port, folder / "moto.log"))


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """rclone serve s3: objects are files in `folder/objects`; signatures are checked, conditions ignored."""
    port = free_port()
    objects = folder / "objects"
    objects.mkdir()
    # the wheel puts it beside Python
    program = Path(sys.executable).with_name("rclone")
    command = [
        *(str(program), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--config", "/dev/null"),
        *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--log-level", "INFO", str(objects)),
    ]
    yield from _running(Server("rclone", command, port, folder / "rclone.log"))


def _running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.stop()


def access(endpoint: str | None, **more: Any) -> Access:
    """How a store reaches a server by `CLIENT`."""
    return Access.model_validate({"endpoint_url": endpoint, "client": CLIENT} | more)


def environment(server: Server | None = None, **more: str) -> dict[str, str]:
    """Variables with the right keys and nothing of this machine's own AWS settings."""
    own = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
    quiet = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
    at = {"AWS_ENDPOINT_URL": server.endpoint} if server else {}
    return own | quiet | at | more
