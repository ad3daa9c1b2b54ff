"""What stands for processes, threads and the clock in a life that is lived in one thread.

The work is the product's: the service of a remote, the planning child's and the executor's `main`, what a
pool would run. Replaced is only how it is started, and when its result is heard.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, partialmethod
from inspect import isfunction, signature
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from ckptd.base import files
from ckptd.base.retry import Breaker, RetryTimer
from ckptd.conversion.engine import (
    children,
    executor,
    executor_child,
    inspect,
    inspect_child,
    planner_child,
    supervisor,
)
from ckptd.conversion.engine.children import Watched
from ckptd.core.model.records import ObjectRow
from ckptd.daemon import job
from ckptd.storage.child import service, slots
from ckptd.storage.journal.journal import EARLY_ID, Journal
from ckptd.storage.remote import messages as m
from ckptd.storage.remote import transfer
from ckptd.storage.remote.early import upload_early
from ckptd.storage.stores import checksums
from ckptd.storage.stores import open as opening
from ckptd.storage.stores.directory import DirectoryStore
from tests.killpoints.seams import Seams, stored
from tests.killpoints.shelf import ShelfStore

WINDOW_BYTES = 4096
STORE_VERBS = ("upload", "put", "put_if_absent", "delete", "discard", "verify")
checksums.crc64(b"warm")
Post = Callable[[Callable[[], None]], None]


class Clock:
    """Moves when somebody waits."""

    def __init__(self, ahead_seconds: float) -> None:
        self.ahead_seconds = ahead_seconds
        self._monotonic, self._time, self._ns = time.monotonic, time.time, time.time_ns

    def install(self) -> None:
        """In this process, for good."""
        put(time, "monotonic", lambda: self._monotonic() + self.ahead_seconds)
        put(time, "time", lambda: self._time() + self.ahead_seconds)
        put(time, "time_ns", lambda: self._ns() + int(self.ahead_seconds * 1e9))
        put(time, "sleep", self.wait)
        put(RetryTimer.__init__, "__kwdefaults__", {"clock": time.monotonic})
        put(Breaker.__init__, "__kwdefaults__", {"clock": time.monotonic, "unix": time.time})

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.ahead_seconds += max(0.0, seconds)


class Inline:
    """What stands for a ThreadPoolExecutor: work is done when it is submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do it; its result or error waits in the future."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        """Nothing waits."""


class Later(Inline):
    """Work is done when the deciding thread has ended its turn."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self._post = post

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue it."""
        future: Future[Any] = Future()
        self._post(lambda: work(*args))
        return future


class DirectClient:
    """A remote's child without the process: the same service, its orders carried out in this thread."""

    pid = None
    later: Post | None = None
    """Where orders wait for the end of the turn; None: carried out at once."""
    drain: Callable[[], None] | None = None

    def __init__(
        self, settings: m.RemoteSettings, on_answer: Callable[[int, m.Answer], None], making: str
    ) -> None:
        self._settings = settings
        self._ids = count(1)
        self._on_answer = on_answer
        self._service = service.Service(self._emit, window_bytes=WINDOW_BYTES)
        self._service.expect(settings)
        self._is_closed = False

    def new_id(self) -> int:
        """For the next order."""
        return next(self._ids)

    def submit(self, order: m.Request, number: int) -> int:
        """Carry it out now or after the turn."""

        def work() -> None:
            if isinstance(order, m.Attach):
                self._service.expect(order.settings)
            self._service.carry_out(number, order)

        if self.later is None:
            work()
        else:
            self.later(work)
        return number

    def _emit(self, order_id: int, answer: m.Answer) -> None:
        if self._is_closed or isinstance(answer, m.Alive):
            return
        self._on_answer(order_id, answer)
        if self.drain is not None and isinstance(answer, m.TransferProgress | m.ObjectDone):
            self.drain()  # the deciding thread hears it while the order goes on

    def pace(self, fraction: float, bytes_per_second: int | None) -> None:
        """Reaches the service at once."""
        self._service.steer(m.Pace(fraction=fraction, bytes_per_second=bytes_per_second))

    def cancel(self, order_id: int) -> None:
        """Likewise."""
        self._service.steer(m.Cancel(order_id=order_id))

    def idle_seconds(self, order_id: int) -> float:
        """Nothing hangs in one thread."""
        return 0.0

    def silent_seconds(self, but: int | None = None) -> float:
        """Likewise."""
        return 0.0

    def abandon(self, reason: str = "") -> None:
        """There is no child."""

    def close(self, timeout_seconds: float = 0.0) -> None:
        """Nobody listens any more."""
        self._is_closed = True


class Deaf:
    """A watcher that hears nothing; every turn is asked for."""

    problem: str | None = None
    hears_all = False

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""

    def follow(self, *_: object) -> None:
        """Nothing."""


# --- children ---------------------------------------------------------------------------------------------


def _inspected(
    request: dict[str, Any], timeout_seconds: float, on_line: Callable[[dict[str, Any]], None]
) -> str:
    """The inspecting child's lines."""
    lines: list[dict[str, Any]] = [{"restrictions": []}]
    with mock.patch.object(inspect_child, "_emit", lines.append):
        if request["files"]:
            with files.opened_dir(request["folder"]) as fd:
                for index, item in enumerate(request["files"]):
                    lines.append({"index": index, **inspect_child._inspect(fd, index, item)})
    for line in lines:
        on_line(line)
    return "exit status 0"


def _started(module: str, *, stdout: Any, stderr: Any, pass_fds: Any = ()) -> Any:
    return types.SimpleNamespace(module=module, stdout=stdout)


def _watched(child: Any, request: bytes, **_: Any) -> Watched:
    """Plan or execute here, with the child's own `main`."""
    said = io.StringIO()
    out = child.stdout if hasattr(child.stdout, "write") else io.BytesIO()
    module = {"planner_child": planner_child, "executor_child": executor_child}[child.module]
    before = os.umask(0)
    try:
        with (
            mock.patch.object(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(request))),
            mock.patch.object(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(_Kept(out)))),
            mock.patch.object(sys, "stderr", said),
        ):
            status = module.main()
            sys.stdout.flush()
    finally:
        os.umask(before)
    words = [line for line in said.getvalue().splitlines() if line.startswith("{")]
    return Watched(status=status, said=json.loads(words[-1]) if words else {})


class _Kept(io.RawIOBase):
    """A stream that the end of its wrapper does not close."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._inner.write(bytes(data))
        return len(data)


class _NoTicker:
    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def put(owner: Any, name: str, stand_in: Any) -> None:
    """Replace something in this process, for good; as `check_call` it refuses what cannot be called alike."""
    check_call(owner, name, stand_in)
    setattr(owner, name, stand_in)


def check_call(owner: Any, name: str, stand_in: Any) -> None:
    """Refuse a function that cannot be called as the one that it is to replace.

    Raises:
        TypeError: it lacks a parameter.
    """
    replaced = getattr(owner, name)
    if isfunction(replaced) and isfunction(stand_in):
        wanted = signature(replaced).parameters.values()
        if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in wanted):
            return  # a wrapper: it does not say how it is called
        named = [one.name for one in wanted if one.kind is one.KEYWORD_ONLY]
        placed = [one.name for one in wanted if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        signature(stand_in).bind(*placed, **dict.fromkeys(named))


def stand_in(lanes: int) -> None:
    """Everything that would start a process or a thread works here instead."""
    put(job, "Watcher", Deaf)
    put(slots, "RemoteClient", DirectClient)
    put(transfer, "ThreadPoolExecutor", Inline)
    put(inspect, "_hear", _inspected)
    put(children, "start", _started)
    put(supervisor, "watch", _watched)
    put(supervisor, "_threads", lambda _: 1)
    put(executor, "FLUSHES_AT_ONCE", 1)
    put(executor_child, "Ticker", _NoTicker)
    for module in (planner_child, executor_child):
        put(module, "restrict", lambda **_: ())
    put(DirectoryStore, "lanes", property(lambda _: lanes))


def open_stores(shelf: Path, seams: Seams, tell: Callable[[str], None], lanes: int) -> None:
    """s3:// is the shelf; what any store is sent is told."""
    open_store = opening.open_store

    def opened(url: str, **more: Any) -> Any:
        if url.startswith("s3:"):
            return Told(stored(seams, ShelfStore(shelf, WINDOW_BYTES, lanes), STORE_VERBS), tell)
        return Told(open_store(url, **more), tell)

    put(service, "open_store", opened)
    put(service, "upload_early", partial(_told_early, upload_early))
    put(Journal, "put_object", partialmethod(_told_row, Journal.put_object, tell))


def _told_early(carry_out: Callable[..., None], *given: Any) -> None:
    Told.is_early = True
    try:
        carry_out(*given)
    finally:
        Told.is_early = False


def _told_row(
    journal: Journal,
    put_object: Callable[..., None],
    tell: Callable[[str], None],
    save_id: int,
    remote: str,
    form: str,
    row: ObjectRow,
) -> None:
    put_object(journal, save_id, remote, form, row)
    if save_id == EARLY_ID and row.proof is not None:
        tell(f"flushed {json.dumps([row.key, row.bytes])}")


class Told:
    """A store whose uploads are written down: what was sent again is counted by the judge."""

    is_early = False
    """A shard is uploaded before its save is whole: until the journal knows it as whole, it may be sent again
    from its beginning."""

    def __init__(self, inner: Any, tell: Callable[[str], None]) -> None:
        self._inner = inner
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def upload(
        self, key: str, source: Any, *, resume: Any, on_progress: Callable[[Any], None], held: Any = ()
    ) -> int:
        """As the inner one."""
        self._tell(f"upload {json.dumps([key, resume.flushed_bytes if resume else 0])}")
        flushed = 0

        def moved(progress: Any) -> None:
            nonlocal flushed
            on_progress(progress)
            if progress.flushed_bytes > flushed and not Told.is_early:
                flushed = progress.flushed_bytes
                self._tell(f"flushed {json.dumps([key, flushed])}")

        crc: int = self._inner.upload(key, source, resume=resume, on_progress=moved, held=held)
        return crc
