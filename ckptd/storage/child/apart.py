"""Read and write a directory remote through a process of its own, on behalf of a command.

A call on a dead hard mount does not return, and no signal ends it. So a command never touches the path of a
remote: this store passes each call to a child (`apart_child`), waits for a limited time, and then raises
`RemoteUnreachable`; the child is killed, and left behind where even that does not end it. Each thread that
calls has a socket of its own to the child (docs/adr/0182).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any, cast

from ckptd import errors
from ckptd.base import process
from ckptd.config.remote_names import shown_remote
from ckptd.errors import RemoteUnreachable
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.base import WINDOW_BYTES, Store
from ckptd.storage.stores.open import clean_environment, directory_path, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from ckptd.storage.stores.base import Abilities, HeldRange, ObjectInfo, Progress, ResumePoint, Source

_DEFAULT = Access()


def open_apart(
    name: str, url: str, access: Access = _DEFAULT, *, owner: str = "", window_bytes: int = WINDOW_BYTES
) -> Store:
    """Return the store of a remote for a command; a directory is served by a process of its own.

    `owner`: the node id whose half uploads and temporaries are meant, where a command removes them;
    `window_bytes`: as `open_store`.

    Raises:
        ConfigError: as `open_store`.
    """
    path = directory_path(url)
    if path is None:
        return open_store(url, access=access, owner=owner, window_bytes=window_bytes)
    return ApartStore(name, url, str(path), owner=owner, window_bytes=window_bytes)


class ApartStore(Store):
    """The `Store` of a directory, each call of which ends within a limit."""

    def __init__(
        self, name: str, url: str, path: str, *, owner: str = "", window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._shown, self._owner = shown_remote(name, url), owner
        self._window_bytes = window_bytes
        self._url, self._path = url, path
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._free: list[Connection] = []
        self._gone: RemoteUnreachable | None = None
        self._is_said = False

    @property
    def url(self) -> str:
        """Return the path."""
        return self._path

    @property
    def lanes(self) -> int:
        """Return how many transfers run at a time: as many as in the directory's own store."""
        from ckptd.storage.stores.directory import LANES

        return LANES

    # one question and one answer each

    def probe(self) -> Abilities:
        """See `Store.probe`."""
        return cast("Abilities", self._call("probe"))

    def get(self, key: str) -> bytes | None:
        """See `Store.get`."""
        return cast("bytes | None", self._call("get", key))

    def put(self, key: str, data: bytes) -> None:
        """See `Store.put`."""
        self._call("put", key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        return cast("bool", self._call("put_if_absent", key, data))

    def stat(self, key: str) -> ObjectInfo | None:
        """See `Store.stat`."""
        return cast("ObjectInfo | None", self._call("stat", key))

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.read_at`."""
        return cast("bytes", self._call("read_at", key, offset, length))

    def discard(self, key: str, token: str = "") -> None:
        """See `Store.discard`."""
        self._call("discard", key, token)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._call("delete", key)

    def free_bytes(self) -> int | None:
        """See `Store.free_bytes`."""
        return cast("int | None", self._call("free_bytes"))

    def flush_name(self, key: str) -> None:
        """See `Store.flush_name`."""
        self._call("flush_name", key)

    def partial_bytes(self, key: str) -> int:
        """See `Store.partial_bytes`."""
        return cast("int", self._call("partial_bytes", key))

    def left_temporaries(self) -> tuple[ObjectInfo, ...]:
        """See `Store.left_temporaries`."""
        return cast("tuple[ObjectInfo, ...]", self._call("left_temporaries"))

    # several answers each

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        for batch in self._frames("list", prefix):
            yield from batch

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        """See `Store.stream`."""
        return self._frames("stream", key, offset, length)

    def write_range(
        self, key: str, offset: int, length: int, out: int, told: Callable[[int], None]
    ) -> tuple[int, int]:
        """See `Store.write_range`; the child writes, on a duplicate of `out`."""
        found = (0, 0)
        for frame in self._frames("write_range", key, offset, length, passing=out):
            if isinstance(frame, int):
                told(frame)
            else:
                found = frame
        return found

    def upload(
        self,
        key: str,
        source: Source,
        *,
        resume: ResumePoint | None,
        on_progress: Callable[[Progress], None],
        held: Sequence[HeldRange] = (),  # noqa: ARG002
    ) -> int:
        """See `Store.upload`; the child asks for each piece of the source, which is read here."""
        facts = (source.size_bytes, source.mode, source.folder_mode, source.gid)
        frames = self._frames("upload", key, facts, resume)
        with contextlib.closing(frames):
            frame = next(frames)
            while not isinstance(frame, int):
                reply: bytes | None = None
                match frame:
                    case ("read", offset, length):
                        reply = _read(source, offset, length)
                    case ("drop", offset, length):
                        source.drop(offset, length)
                    case _:
                        on_progress(frame)
                frame = frames.send(reply)
            next(frames, None)
            return frame

    def verify(self, key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        """See `Store.verify`."""
        proof = ""
        for frame in self._frames("verify", key, size_bytes, crc64):
            if isinstance(frame, int):
                on_progress(frame)
            else:
                proof = frame
        return proof

    # --- inside -----------------------------------------------------------------------------------------

    def _call(self, verb: str, *arguments: Any) -> Any:
        return next(self._frames(verb, *arguments))

    def _frames(
        self, verb: str, *arguments: Any, passing: int | None = None
    ) -> Generator[Any, bytes | None, None]:
        """Send a call and yield what comes back; the next frame is asked for when this one was taken.

        What is sent into the generator is the answer to a frame that asks for bytes. `passing`: a descriptor
        that goes with the call.
        """
        lane = self._lane()
        is_whole = False
        try:
            lane.send((verb, arguments))
            if passing is not None:
                send_handle(lane, passing, None)
            while True:
                kind, value = self._answer(lane)
                if kind == "end":
                    is_whole = True
                    return
                if kind == "error":
                    is_whole = True
                    raise _rebuilt(*value)
                reply = yield value
                lane.send(True if reply is None else reply)
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and is_whole:
                raise
            raise self._lost(f"{self._shown}: the process that reads it ended") from error
        finally:
            self._put_back(lane, is_whole=is_whole)

    def _answer(self, lane: Connection) -> tuple[str, Any]:
        begun = time.monotonic()
        if not lane.poll(process.SAID_SECONDS):
            self._say()
            if not lane.poll(max(0.0, process.LIMIT_SECONDS - (time.monotonic() - begun))):
                text = f"{self._shown} ({self._url})" if self._shown != self._url else self._url
                raise self._lost(f"{text} did not answer within {process.LIMIT_SECONDS:.0f} s")
        frame: tuple[str, Any] = lane.recv()
        return frame

    def _say(self) -> None:
        with self._lock:
            is_said, self._is_said = self._is_said, True
        if not is_said:
            process.say_waiting(self._shown)

    def _lost(self, text: str) -> RemoteUnreachable:
        """End the child; each later call fails at once."""
        with self._lock:
            if self._gone is None:
                self._gone = RemoteUnreachable(text, hint=process.NOT_ANSWERING)
            if self._child is not None:
                self._child.kill()
            return RemoteUnreachable(self._gone.message, hint=self._gone.hint)

    def _lane(self) -> Connection:
        with self._lock:
            if self._gone is not None:
                raise RemoteUnreachable(self._gone.message, hint=self._gone.hint)
            if self._free:
                return self._free.pop()
            if self._control is None:
                self._start()
            assert self._control is not None
            mine, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                except OSError:
                    mine.close()
                    raise
            return Connection(mine.detach())

    def _put_back(self, lane: Connection, *, is_whole: bool) -> None:
        # an iterator that was left half-way: the child sees the end of its socket
        with self._lock:
            if is_whole and self._gone is None:
                self._free.append(lane)
                return
        lane.close()

    def _start(self) -> None:
        """Start the child; none of our streams stays open in one that cannot be ended."""
        mine, theirs = socket.socketpair()
        with theirs:
            self._child = process.spawn(
                [
                    *(sys.executable, "-m", "ckptd.storage.child.apart_child", str(theirs.fileno())),
                    *(self._path, self._owner, str(self._window_bytes)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=clean_environment(self._url),
                cwd="/",
            )
        self._control = mine


def _read(source: Source, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: source.read_into(offset, memoryview(buffer))])


def _rebuilt(kind: str, message: str, hint: str, number: int | None) -> Exception:
    if number is not None:
        return OSError(number, message)
    return errors.error_named(kind, message, hint)
