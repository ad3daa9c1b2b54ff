"""Start children: an argument list of ours, an empty environment, closed descriptors (docs/design.md §7).

Every child is `python -m ckptd.conversion.engine.<name>` by spawn and exec, never fork: threads, sockets and
secrets of the daemon do not travel.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import ckptd
from ckptd.base.process import spawn
from ckptd.conversion.engine.priority import LowestPriority
from ckptd.conversion.engine.sandbox import STOP_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE_PARENT = str(Path(ckptd.__file__).resolve().parent.parent)
MAX_LINE_BYTES = 16 << 20
"""Facts of the largest models are some hundred kilobytes."""
NONSENSE = "it said nonsense"


def start(
    module: str, *, stdout: int | IO[bytes], stderr: int | IO[bytes], pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start `python -m ckptd.conversion.engine.<module>` with an empty environment and a pipe as stdin.

    `-S` keeps site-packages out: children need the standard library and ckptd alone.
    """
    return spawn(
        [sys.executable, "-E", "-s", "-S", "-X", "utf8", "-m", f"ckptd.conversion.engine.{module}"],
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
        """Return the lines that `chunk` completes, one by one.

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
    """Return a child's exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    import signal

    names: dict[int, Any] = {s.value: s.name for s in signal.Signals}
    return f"signal {names.get(-status, -status)}"


# --- Watching one child: progress lines, last error, stop, pause and time-out ----------------------------

POLL_SECONDS = 0.02
"""A pause takes hold after so long at most: a save may last half a second."""
WAIT_SECONDS = 1.0
"""Longest wait for a line of a child that nobody stops or pauses, before its end is looked for."""
LATE_SECONDS = 1.0
"""A watcher that looks so much later than it meant to was stopped itself, as a frozen container is."""
STOP_SECONDS = 10.0
_MAX_WORDS_BYTES = 1 << 20


@dataclass(slots=True)
class Watched:
    """Record how a child ended; `said` is the last JSON line of its stderr."""

    status: int = 0
    stopped: bool = False
    timed_out: bool = False
    garbled: bool = False
    """It said something that is no line of its protocol, and was killed for it."""
    said: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """Return a number of its last words; 0 where there is none."""
        value = self.said.get(name, 0)
        return value if type(value) is int else 0


def watch(
    child: subprocess.Popen[bytes],
    request: bytes,
    *,
    on_line: Callable[[dict[str, Any]], None] | None,
    should_stop: Callable[[], bool] | None,
    should_pause: Callable[[], bool] | None,
    timeout_seconds: float | None,
    silence_seconds: float | None = None,
    yields: bool = False,
) -> Watched:
    """Serve a child until it ends; it is dead and reaped when this returns or raises.

    One that lasts longer than `timeout_seconds`, or prints nothing for `silence_seconds`, is killed. While it
    is paused, or the watcher itself was stopped, neither counts.
    `yields`: it leads its session, and runs after everybody else until it starves.
    """
    watcher = _Watcher(child, on_line, LowestPriority(child.pid) if yields else None)
    try:
        watcher.register()
        give(child, request)
        return watcher.loop(should_stop, should_pause, timeout_seconds, silence_seconds)
    finally:
        watcher.close()
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)  # a stopped process would not see what follows
        end(child)


class _Watcher:
    """Buffers of one child's pipes, and whether it is paused."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        on_line: Callable[[dict[str, Any]], None] | None,
        priority: LowestPriority | None,
    ) -> None:
        self.child = child
        self.on_line = on_line
        self.priority = priority
        self.selector = selectors.DefaultSelector()
        self.lines = Lines()
        self.words = b""
        self.paused = False
        self.has_spoken = False
        """It has said something, so that it dies with us, stopped or not (`sandbox.restrict`)."""
        self.result = Watched()
        self.heard_at = time.monotonic()

    def close(self) -> None:
        self.selector.close()
        if self.priority is not None:
            self.priority.close()

    def register(self) -> None:
        for pipe in (self.child.stdout, self.child.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self.selector.register(pipe, selectors.EVENT_READ)

    def loop(
        self,
        should_stop: Callable[[], bool] | None,
        should_pause: Callable[[], bool] | None,
        timeout_seconds: float | None,
        silence_seconds: float | None,
    ) -> Watched:
        now = time.monotonic()
        deadline = None if timeout_seconds is None else now + timeout_seconds
        killed_at: float | None = None
        is_steered = should_stop is not None or should_pause is not None
        pause = POLL_SECONDS if is_steered else min(WAIT_SECONDS, silence_seconds or WAIT_SECONDS)
        while self.selector.get_map():
            before = now
            self._read(pause)
            now = time.monotonic()
            if self.paused or now - before > pause + LATE_SECONDS:
                self.heard_at = now
                deadline = None if deadline is None else deadline + now - before
            if silence_seconds is not None and now - self.heard_at > silence_seconds:
                deadline = self.heard_at  # stopped by somebody, or stuck with all its threads
            if killed_at is None and should_stop is not None and should_stop():
                self.result.stopped = True
                self._pause(paused=False)
                self.child.send_signal(STOP_SIGNAL)
                killed_at = now + STOP_SECONDS
            if deadline is not None and now > deadline:
                self.result.timed_out = True
                killed_at = now
            if killed_at is not None and now >= killed_at:
                self.child.kill()
            elif killed_at is None and should_pause is not None:
                self._pause(paused=should_pause())
        self.result.status = self.child.wait()
        self._last_words()
        return self.result

    def _pause(self, *, paused: bool) -> None:
        if paused != self.paused and self.has_spoken:
            self.paused = paused
            self.child.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def _read(self, seconds: float) -> None:
        if self.priority is not None and self.has_spoken:  # from here on it only works
            self.priority.look(time.monotonic())
        for key, _ in self.selector.select(seconds):
            chunk = os.read(key.fd, 1 << 16)
            self.heard_at = time.monotonic()
            self.has_spoken = True
            if not chunk:
                self.selector.unregister(key.fileobj)
            elif self.child.stderr is not None and key.fd == self.child.stderr.fileno():
                self.words = (self.words + chunk)[-_MAX_WORDS_BYTES:]
            elif not self.result.garbled:
                self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        """Pass progress on; whoever says what is none has failed, whatever its exit status will be."""
        try:
            for line in self.lines.feed(chunk):
                if self.on_line is not None:
                    self.on_line(line)
        except Garbled:
            self.result.garbled = True
            self.child.kill()

    def _last_words(self) -> None:
        for line in reversed(self.words.splitlines()):
            if line.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    self.result.said = json.loads(line)
                    return
