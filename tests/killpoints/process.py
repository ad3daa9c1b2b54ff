"""A daemon's own turns in one thread of this process: no child, no pool, no clock but ours.

It exists because a real daemon with its children takes seconds to start and a life must be cut at thousands
of places. The jobs, plans, journal, workers' work, remotes' service, planning and executing are the
product's; what is replaced is how they are started and when they are heard.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

from ckptd.config import load_daemon, load_jobs
from ckptd.convert import executor_child, inspect_child, inspection, planning_child, supervise
from ckptd.convert.watch import Watched
from ckptd.daemon import job as job_module
from ckptd.daemon import links
from ckptd.daemon.backoff import Breaker
from ckptd.daemon.checks import exit_code, is_idle
from ckptd.daemon.loop import Daemon
from ckptd.daemon.problems import Problem
from ckptd.daemon.workers import Workers
from ckptd.remote import messages as m
from ckptd.remote import service as service_module
from ckptd.remote import transfer
from ckptd.remote.directory import DirectoryStore
from tests.killpoints.seams import Seams, stored
from tests.killpoints.shelf import ShelfStore

WINDOW_BYTES = 4096
STORE_VERBS = ("upload", "put", "put_if_absent", "delete", "discard", "verify")
Post = Callable[[Callable[[], None]], None]
_real_sleep = time.sleep


class Clock:
    """Moves when somebody waits."""

    def __init__(self, ahead_seconds: float) -> None:
        self.ahead_seconds = ahead_seconds
        self._monotonic, self._time, self._ns = time.monotonic, time.time, time.time_ns

    def install(self) -> None:
        """In this process, for good."""
        time.monotonic = lambda: self._monotonic() + self.ahead_seconds
        time.time = lambda: self._time() + self.ahead_seconds
        time.time_ns = lambda: self._ns() + int(self.ahead_seconds * 1e9)
        time.sleep = self.wait  # type: ignore[assignment]
        Breaker.__init__.__kwdefaults__.update(clock=time.monotonic, unix=time.time)

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

    def __init__(self, settings: m.RemoteSettings, on_answer: Callable[[int, m.Answer], None]) -> None:
        self._settings = settings
        self._on_answer = on_answer
        self._service = service_module.Service(self._emit, window_bytes=WINDOW_BYTES)
        self._service.expect(settings)
        self._next = 0
        self._is_closed = False

    def submit(self, order: m.Order) -> int:
        """Carry it out now or after the turn."""
        self._next += 1
        number = self._next

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
        if self.drain is not None and isinstance(answer, m.Moving | m.ObjectDone):
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


def _inspected(request: dict[str, Any], timeout_seconds: float) -> Iterator[dict[str, Any]]:
    """The inspecting child's lines."""
    lines: list[dict[str, Any]] = [{"restrictions": []}]
    with mock.patch.object(inspect_child, "_emit", lines.append):
        if request["files"]:
            with inspect_child.files.opened_dir(request["folder"]) as fd:
                for index, item in enumerate(request["files"]):
                    lines.append({"index": index, **inspect_child._inspect(fd, index, item)})
    yield from [*lines, {"ended": "exit status 0"}]


def _started(module: str, *, stdout: Any, stderr: Any, pass_fds: Any = ()) -> Any:
    return types.SimpleNamespace(module=module, stdout=stdout)


def _watched(child: Any, request: bytes, **_: Any) -> Watched:
    """Plan or execute here, with the child's own `main`."""
    said = io.StringIO()
    out = child.stdout if hasattr(child.stdout, "write") else io.BytesIO()
    module = {"planning_child": planning_child, "executor_child": executor_child}[child.module]
    before = os.umask(0)
    try:
        with (
            mock.patch.object(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(request))),
            mock.patch.object(sys, "stdout", io.TextIOWrapper(_Kept(out))),
            mock.patch.object(sys, "stderr", said),
        ):
            status = module.main()
            sys.stdout.flush()
    finally:
        os.umask(before)
    words = [line for line in said.getvalue().splitlines() if line.startswith("{")]
    return Watched(status=status, said=inspection.json.loads(words[-1]) if words else {})


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


# --- the daemon -------------------------------------------------------------------------------------------


class Process:
    """One daemon from start to its death or its end."""

    def __init__(
        self,
        job_file: Path,
        shelf: Path,
        seams: Seams,
        clock: Clock,
        tell: Callable[[str], None],
        *,
        is_eager: bool,
        lanes: int,
    ) -> None:
        self.clock = clock
        self.seams = seams
        clock.install()
        _stand_in(lanes)
        _open_stores(shelf, seams, tell, lanes)
        seams.install()
        loaded = load_jobs([job_file], load_daemon(None, {}), {})
        self.daemon = Daemon(loaded, {})
        self._queue: queue.SimpleQueue[Callable[[], None]] = self.daemon._queue
        post = self._queue.put
        self.daemon._workers = Workers(post)
        self.daemon._workers._pool = Inline() if is_eager else Later(post)  # type: ignore[assignment]
        DirectClient.later = None if is_eager else staticmethod(post)  # type: ignore[assignment]
        DirectClient.drain = None if is_eager else staticmethod(self._take_in)  # type: ignore[assignment]
        self.daemon._open_jobs()

    @property
    def job(self) -> job_module.Job:
        """The one job."""
        if not self.daemon.jobs:
            message = f"the job ended: {self.daemon.invalid}"
            raise AssertionError(message)
        return self.daemon.jobs[0]

    @property
    def problems(self) -> list[Problem]:
        """What status would show."""
        return list(self.job.problems.all())

    @property
    def exit_code(self) -> int:
        """What `ckptd run --once` would end with."""
        return exit_code(self.job)

    def turn(self) -> None:
        """Wait for what is due, take all that happened, let the job decide."""
        now = time.monotonic()
        self._take_in()
        self.daemon._turn(self.job, now)
        self.daemon._totals.settle()
        if self._queue.empty() and self.daemon.jobs:
            self.clock.wait(min(10.0, max(0.02, self.job.seconds_to_next(time.monotonic()))))

    def _take_in(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except queue.Empty:
                return
            self.daemon._call(call)

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do, as `--once` judges it."""
        return self._queue.empty() and self.job.phase != "waiting" and is_idle(self.job)

    def until_well(self, turns: int) -> None:
        """Turn until what failed was tried again and all is safe."""
        for _ in range(turns):
            if self.is_idle and not self.exit_code and not self.job.links["nas"].seconds_to_wake:
                return
            self.turn()

    def publish(self) -> None:
        """Write status.json."""
        self.daemon._publish(is_urgent=True)


def _stand_in(lanes: int) -> None:
    """Everything that would start a process or a thread works here instead."""
    job_module.Watcher = Deaf  # type: ignore[assignment, misc]
    links.RemoteClient = DirectClient  # type: ignore[assignment, misc]
    transfer.ThreadPoolExecutor = Inline  # type: ignore[assignment, misc]
    inspection._child_lines = _inspected  # type: ignore[assignment]
    supervise.children.start = _started
    supervise.watch = _watched  # type: ignore[assignment]
    executor_child.Ticker = _NoTicker  # type: ignore[assignment, misc]
    for module in (planning_child, executor_child):
        module.restrict = lambda **_: ()  # type: ignore[attr-defined, assignment]
    DirectoryStore.lanes = property(lambda _: lanes)  # type: ignore[assignment]


def _open_stores(shelf: Path, seams: Seams, tell: Callable[[str], None], lanes: int) -> None:
    """s3:// is the shelf; what any store is sent is told."""
    open_store = service_module.open_store

    def opened(url: str, **more: Any) -> Any:
        if url.startswith("s3:"):
            return Told(stored(seams, ShelfStore(shelf, WINDOW_BYTES, lanes), STORE_VERBS), tell)
        return Told(open_store(url, **more), tell)

    service_module.open_store = opened


class Told:
    """A store whose uploads are written down: what was sent again is counted by the judge."""

    def __init__(self, inner: Any, tell: Callable[[str], None]) -> None:
        self._inner = inner
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def upload(self, key: str, source: Any, *, resume: Any, on_progress: Callable[[Any], None]) -> int:
        """As the inner one."""
        self._tell(f"upload {json.dumps([key, resume.flushed_bytes if resume else 0])}")
        flushed = 0

        def moved(progress: Any) -> None:
            nonlocal flushed
            on_progress(progress)
            if progress.flushed_bytes > flushed:
                flushed = progress.flushed_bytes
                self._tell(f"flushed {json.dumps([key, flushed])}")

        crc: int = self._inner.upload(key, source, resume=resume, on_progress=moved)
        return crc


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The product's own lines go nowhere."""
    import logging

    logging.disable(logging.CRITICAL)
    yield


__all__ = ["Clock", "Process", "quiet"]
