"""Starting children: an argument list of ours, an empty environment, closed descriptors (docs/design.md §7).

Every child is `python -m ckptd.convert.<name>` by spawn and exec, never fork: threads, sockets and
secrets of the daemon do not travel.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import ckptd
from ckptd.spawn import spawn

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE_PARENT = str(Path(ckptd.__file__).resolve().parent.parent)
MAX_LINE_BYTES = 16 << 20
"""Facts of the largest models are some hundred kilobytes."""
NONSENSE = "it said nonsense"


def start(
    module: str, *, stdout: int | IO[bytes], stderr: int | IO[bytes], pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start `python -m ckptd.convert.<module>` with an empty environment and a pipe as stdin.

    `-S` keeps site-packages out: children need the standard library and ckptd alone.
    """
    return spawn(
        [sys.executable, "-E", "-s", "-S", "-X", "utf8", "-m", f"ckptd.convert.{module}"],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        cwd=PACKAGE_PARENT,
        env={},
        close_fds=True,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def give(child: subprocess.Popen[bytes], request: bytes) -> None:
    """Hand the request over and close the child's stdin; a child that died already is noticed elsewhere."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.write(request)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.close()


def end(child: subprocess.Popen[bytes]) -> int:
    """Kill the child if it still runs, close its pipes, and reap it; returns its exit status."""
    if child.poll() is None:
        child.kill()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    return child.wait()


class Garbled(Exception):
    """A child said something that is no line of its protocol."""


class Lines:
    """JSON objects from a child's output, one per line, in pieces as they come; bounded, whatever it says."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """The lines that `chunk` completes, one by one.

        Raises:
            Garbled: one is no JSON object, or has no end; those before it were given.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield _object(line)
        if len(self._rest) > MAX_LINE_BYTES:
            raise Garbled


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Garbled from error
    if not isinstance(found, dict):
        raise Garbled
    return found


def died_of(status: int) -> str:
    """A child's exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    import signal

    names: dict[int, Any] = {s.value: s.name for s in signal.Signals}
    return f"signal {names.get(-status, -status)}"
