"""Serve one directory to a command: `python -m ckptd.storage.child.apart_child FD PATH OWNER WINDOW_BYTES`.

FD is a control socket, over which each thread of the command hands in a socket of its own. Every command on a
directory remote waits for this process to start, so it imports neither pydantic nor the configuration.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from ckptd.base.process import become_child
from ckptd.errors import CkptdError
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.retrying import tried_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.storage.stores.base import ObjectInfo, Progress, Store

_BATCH = 500
_BATCH_SECONDS = 1.0
_END = object()


class _FarSource:
    """A source that lies with the parent; `Source` for the directory's own store."""

    def __init__(self, lane: Connection, facts: tuple[int, int, int, int | None]) -> None:
        self._lane = lane
        self.size_bytes, self.mode, self.folder_mode, self.gid = facts

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See `Source.read_into`."""
        data = self._ask(("read", offset, len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def drop(self, offset: int, length: int) -> None:
        """See `Source.drop`."""
        self._ask(("drop", offset, length))

    def tell(self, progress: Progress) -> None:
        """Pass on how far the object is."""
        self._ask(progress)

    def _ask(self, frame: object) -> bytes:
        self._lane.send(("value", frame))
        answer: bytes = self._lane.recv()
        return answer


def main() -> None:
    """Serve the directory until the parent's end of the control socket is closed."""
    become_child()
    control = socket.socket(fileno=int(sys.argv[1]))
    store = tried_again(DirectoryStore(sys.argv[2], owner=sys.argv[3], window_bytes=int(sys.argv[4])))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            os._exit(0)
        for fd in array.array("i", descriptors):
            threading.Thread(target=_serve, args=(Connection(fd), store), daemon=True).start()


def _serve(lane: Connection, store: Store) -> None:
    """Carry out the calls of one thread, one after another."""
    with contextlib.suppress(EOFError, OSError), lane:
        while True:
            verb, arguments = lane.recv()
            try:
                _send_all(lane, _carried_out(store, verb, arguments, lane), reads_ahead=verb == "stream")
            except CkptdError as error:
                lane.send(("error", (*error.as_data.values(), None)))
            except OSError as error:
                lane.send(("error", ("OSError", str(error.strerror or error), "", error.errno or 5)))
            except Exception as error:  # noqa: BLE001 - the parent says what went wrong here
                words = f"{type(error).__name__}: {error}"
                lane.send(("error", ("StorageError", words, "it is a bug: please report it", None)))
            else:
                lane.send(("end", None))


def _send_all(lane: Connection, values: Iterator[Any], *, reads_ahead: bool) -> None:
    """Send each value once the one before was taken; `reads_ahead`: the next is read in the meantime."""
    value = next(values, _END)
    while value is not _END:
        lane.send(("value", value))
        try:
            following = next(values, _END) if reads_ahead else None
        finally:
            lane.recv()
        value = following if reads_ahead else next(values, _END)


def _carried_out(store: Store, verb: str, arguments: Any, lane: Connection) -> Iterator[Any]:
    if verb == "list":
        found = iter(store.list(*arguments))
        while batch := _batch(found):
            yield batch
    elif verb == "stream":
        yield from store.stream(*arguments)
    elif verb == "write_range":
        key, offset, length = arguments
        out = recv_handle(lane)
        try:
            with _progress(lane) as told:
                written = store.write_range(key, offset, length, out, told)
            yield written
        finally:
            os.close(out)
    elif verb == "verify":
        key, size_bytes, crc64 = arguments
        with _progress(lane) as told:
            proof = store.verify(key, size_bytes, crc64, told)
        yield proof
    elif verb == "upload":
        key, facts, resume = arguments
        source = _FarSource(lane, facts)
        yield store.upload(key, source, resume=resume, on_progress=source.tell)
    else:
        yield getattr(store, verb)(*arguments)


@contextlib.contextmanager
def _progress(lane: Connection) -> Iterator[Callable[[int], None]]:
    """Yield what sends how many bytes moved, and works on until the next such message: then the one before
    must have been taken, as all are at the end.
    """
    is_taken = True

    def tell(count: int) -> None:
        nonlocal is_taken
        if not is_taken:
            lane.recv()
        lane.send(("value", count))
        is_taken = False

    try:
        yield tell
    finally:
        if not is_taken:
            lane.recv()


def _batch(found: Iterator[ObjectInfo]) -> list[ObjectInfo]:
    """Return the next few objects, fewer where they come slowly."""
    end = time.monotonic() + _BATCH_SECONDS
    batch: list[ObjectInfo] = []
    for info in itertools.islice(found, _BATCH):
        batch.append(info)
        if time.monotonic() > end:
            break
    return batch


if __name__ == "__main__":
    main()
