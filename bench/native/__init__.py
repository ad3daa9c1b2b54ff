"""Servers of the benchmark itself, in C so that they cost little beside what is measured: built and run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.stores.servers import free_port
from tests.support.real import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
BUILD = REPOSITORY / ".build" / "native"
START_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What the null server saw since the last reset; `commit_after_seconds` None: no COMMIT yet."""

    data_bytes: int
    """Of objects and parts outside `_ckptd/`, also of bodies that broke off."""
    data_bodies: int
    requests: int
    objects: int
    commits: int
    commit_after_seconds: float | None
    """From the last data byte to the COMMIT."""


@dataclass(frozen=True, slots=True)
class NullServer:
    """A running null S3 server."""

    port: int
    pid: int

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Forget every object and count."""
        self._get("_reset")

    def counted(self) -> Counted:
        """The counts."""
        found: dict[str, Any] = json.loads(self._get("_stats"))
        after = float(found["commit_after_seconds"])
        return Counted(
            data_bytes=found["data_bytes"],
            data_bodies=found["data_bodies"],
            requests=found["requests"],
            objects=found["objects"],
            commits=found["commits"],
            commit_after_seconds=after if after >= 0 else None,
        )

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.endpoint}/{path}", timeout=10) as answer:
            return bytes(answer.read())


def built(name: str) -> Path:
    """The program of `name`.c, compiled when it is not there.

    Raises:
        RuntimeError: gcc refuses it.
    """
    sources = sorted(HERE.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    program = BUILD / f"{name}-{digest}"
    if not program.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = program.with_suffix(".new")
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", str(fresh)]
        words = [*command, str(HERE / f"{name}.c"), "-lm"]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"gcc: {done.stderr[-2000:]}")
        fresh.rename(program)
    return program


@contextlib.contextmanager
def null_server(
    source: Path, hashes: Literal["crc64nvme", "md5", "plain"] = "crc64nvme"
) -> Iterator[NullServer]:
    """An S3 server that throws bodies away and serves objects from the files below `source`."""
    port = free_port()
    with _running([str(built("nulls3")), str(port), hashes, str(source)], port) as pid:
        yield NullServer(port, pid)


@contextlib.contextmanager
def link(to_port: int, *, bits_per_second: float, round_trip_seconds: float) -> Iterator[str]:
    """A narrow, long way to a server of this machine; gives the URL at its near end."""
    port = free_port()
    words = [str(built("link")), str(port), str(to_port), str(bits_per_second), str(round_trip_seconds)]
    with _running(words, port):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[int]:
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} does not listen")
            time.sleep(0.02)
        yield process.pid
    finally:
        process.kill()
        process.wait()
