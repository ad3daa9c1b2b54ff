"""The daemon's end of a remote's child process: submit orders, get answers by callback, never wait.

Whatever the child does — hang on a dead mount, die, talk nonsense — the caller's thread goes on: writing,
reading and starting happen in threads of this module, and an order that cannot be carried out any more ends
with `Failed`.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from ckptd.base.process import spawn
from ckptd.config.remote_names import shown_remote
from ckptd.errors import RemoteError, RemoteUnreachable
from ckptd.storage.remote.messages import (
    ANSWER_LINE,
    EVENTS,
    LONG_ORDERS,
    ORDER_LINE,
    Alive,
    Attach,
    Attached,
    Cancel,
    Failed,
    Pace,
    RequestLine,
    UploadRequest,
    in_short,
    known,
)
from ckptd.storage.stores.base import WINDOW_BYTES
from ckptd.storage.stores.open import clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.errors import CkptdError
    from ckptd.storage.remote.messages import Answer, RemoteSettings, Request

CHILD = "ckptd.storage.child.child"
_ATTACH_ID = 0


class _Child(NamedTuple):
    """One incarnation of the child process."""

    process: subprocess.Popen[bytes]
    to_write: queue.SimpleQueue[bytes | None]


class _Signs:
    """Record when each of the child's two threads last gave a sign, and when a byte last moved in it."""

    def __init__(self) -> None:
        self._sign_at = dict.fromkeys((True, False), time.monotonic())
        self._moved_at = dict(self._sign_at)

    def ordered(self, order: Request, before: Iterable[Request]) -> None:
        """Note that an order was given: a thread with nothing to do has not been silent."""
        is_long = _is_long(order)
        if not any(_is_long(other) == is_long for other in before):
            self._sign_at[is_long] = self._moved_at[is_long] = time.monotonic()

    def heard(self, order: Request, answer: Answer) -> None:
        """Note that an event or an answer came."""
        is_long, now = _is_long(order), time.monotonic()
        self._sign_at[is_long] = now
        self._moved_at[is_long] = now - getattr(answer, "idle_seconds", 0.0)

    def silent_seconds(self, order: Request) -> float:
        """Return the seconds since the last sign of life."""
        return time.monotonic() - self._sign_at[_is_long(order)]

    def idle_seconds(self, order: Request) -> float:
        """Return the seconds since the last byte moved."""
        return time.monotonic() - self._moved_at[_is_long(order)]


def _is_long(order: Request) -> bool:
    return isinstance(order, LONG_ORDERS)


def _is_making(order: Request) -> bool:
    return isinstance(order, UploadRequest) and order.making is not None


class RemoteClient:
    """Orders to one remote. `on_answer(order id, answer)` is called from a thread of this object.

    Events (`EVENTS`) are of an open order, any other answer ends it. A child that died is
    started again by the next `submit`, attached with what was learned of the remote's identity before.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        on_answer: Callable[[int, Answer], None],
        *,
        window_bytes: int = WINDOW_BYTES,
        making: str | None = None,
        has_stderr: bool = True,
    ) -> None:
        """`making`: the module whose `opened` makes forms while they are sent; None: only files are sent.

        Without `has_stderr` a child that a dead mount keeps from dying holds no stream of a command open.
        """
        self._stderr = None if has_stderr else subprocess.DEVNULL
        self._settings = settings
        self._window_bytes = window_bytes
        self._on_answer = on_answer
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._making = making
        self._ids = count(_ATTACH_ID + 1)
        self._open: dict[int, Request] = {}
        self._pace = Pace(fraction=1.0, bytes_per_second=settings.bytes_per_second)
        self._signs = _Signs()
        self._is_closed = False

    @property
    def alive(self) -> bool:
        """Whether a child process is running."""
        with self._lock:
            return self._child is not None and self._child.process.poll() is None

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, for the memory account; None when there is none."""
        with self._lock:
            return self._child.process.pid if self._child is not None else None

    @property
    def open_orders(self) -> tuple[int, ...]:
        """Return the ids of orders without a final answer."""
        with self._lock:
            return tuple(self._open)

    def silent_seconds(self, but: int | None = None) -> float:
        """Return how long the child has been silent, leaving out the order `but`.

        That one is judged by the bytes that it moves. Long orders and short ones each have a thread in the
        child: what one of them does is no sign of life of the other.
        """
        with self._lock:
            open_ = (order for order_id, order in self._open.items() if order_id != but)
            return max((self._signs.silent_seconds(order) for order in open_), default=0.0)

    def idle_seconds(self, order_id: int) -> float:
        """Return how long no byte of that open order has moved, for whatever reason but our own limits."""
        with self._lock:
            order = self._open.get(order_id)
            return self._signs.idle_seconds(order) if order is not None else 0.0

    def new_id(self) -> int:
        """Return an id for an order that is submitted later."""
        with self._lock:
            return next(self._ids)

    def submit(self, order: Request, order_id: int | None = None) -> int:
        """Queue an order; returns its id at once. Starts the child when there is none."""
        if isinstance(order, Attach):
            order = Attach(settings=self._remember(order.settings))
        with self._lock:
            order_id = next(self._ids) if order_id is None else order_id
            self._signs.ordered(order, self._open.values())
            self._open[order_id] = in_short(order)
            try:
                child = self._running(is_attaching=isinstance(order, Attach))
            except OSError as error:
                reason = str(error)
                threading.Thread(target=self._end, args=([order_id], reason), daemon=True).start()
                return order_id
            child.to_write.put(_line(order_id, order))
            if isinstance(order, Attach):
                # settings name the remote's own speed; what was ordered since holds
                child.to_write.put(_line(_ATTACH_ID, self._pace))
        return order_id

    def pace(self, fraction: float, bytes_per_second: int | None) -> None:
        """Move at this fraction of that speed (None: no limit) from now on; 0 pauses."""
        with self._lock:
            self._pace = Pace(fraction=fraction, bytes_per_second=bytes_per_second)
            if self._child is not None:
                self._child.to_write.put(_line(_ATTACH_ID, self._pace))

    def cancel(self, order_id: int) -> None:
        """End an order at its next buffer; its answer is `Failed` with `SourceChanged`."""
        with self._lock:
            if self._child is not None and order_id in self._open:
                self._child.to_write.put(_line(_ATTACH_ID, Cancel(order_id=order_id)))

    def abandon(self, reason: str = "it gave no sign of life") -> None:
        """Kill the child and fail its orders at once, even when a dead mount keeps it from dying."""
        with self._lock:
            child, self._child = self._child, None
            ended = list(self._open)
        if child is not None:
            child.to_write.put(None)
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
        self._end(ended, reason)

    def end_idle(self) -> bool:
        """End the child when it has no order; the next one starts another. False: it has."""
        with self._lock:
            if self._open:
                return False
            self.abandon("it is not needed")
        return True

    def close(self, timeout_seconds: float = 2.0) -> None:
        """End the child; open orders get no answer any more."""
        with self._lock:
            self._is_closed = True
            self._open.clear()
            child, self._child = self._child, None
        if child is None:
            return
        child.to_write.put(None)
        try:
            child.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            child.process.kill()

    # --- inside -----------------------------------------------------------------------------------------

    def _remember(self, settings: RemoteSettings) -> RemoteSettings:
        """Return the settings to attach with; what was learned of the identity stays unless the caller knows
        better.
        """
        with self._lock:
            held = self._settings
            if settings.url == held.url and settings.remote_id is None and held.remote_id is not None:
                learned = {"remote_id": held.remote_id, "job_id": held.job_id, "may_initialise": False}
                settings = settings.model_copy(update=learned)
            self._settings = settings
            return settings

    def _running(self, *, is_attaching: bool) -> _Child:
        """Return the child, started if needed; the lock is held."""
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        process = spawn(
            [sys.executable, "-m", CHILD, str(self._window_bytes), *([self._making] if self._making else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=clean_environment(self._settings.url),
            cwd="/",
            close_fds=True,
        )
        child = _Child(process, queue.SimpleQueue())
        self._child = child
        self._signs = _Signs()
        for target in (self._write, self._read):
            threading.Thread(
                target=target, args=(child,), name=f"remote-{target.__name__}", daemon=True
            ).start()
        if not is_attaching:
            child.to_write.put(_line(_ATTACH_ID, Attach(settings=self._settings)))
        child.to_write.put(_line(_ATTACH_ID, self._pace))
        return child

    def _write(self, child: _Child) -> None:
        stream = child.process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            while (data := child.to_write.get()) is not None:
                stream.write(data)
                stream.flush()
        with contextlib.suppress(OSError):
            stream.close()

    def _read(self, child: _Child) -> None:
        stream = child.process.stdout
        assert stream is not None
        for raw in stream:
            try:
                line = ANSWER_LINE.validate_json(raw)
            except ValidationError:
                break
            if not self._deliver(child, line.id, line.answer):
                break
        stream.close()
        child.to_write.put(None)
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        code = child.process.wait()
        with self._lock:
            if self._child is not child:
                return
            self._child = None
            ended = self._not_asked_again()
        self._end(ended, f"its process ended ({code})")

    def _not_asked_again(self) -> list[int]:
        """Return the orders that end with the child; the lock is held.

        A child that died while it made a form says nothing of the remote: short orders are put again.
        """
        if not any(map(_is_making, self._open.values())):
            return list(self._open)
        ended = [order_id for order_id, order in self._open.items() if _is_long(order)]
        asked = [(order_id, order) for order_id, order in self._open.items() if not _is_long(order)]
        try:
            for order_id, order in asked:
                child = self._running(is_attaching=isinstance(order, Attach))
                child.to_write.put(_line(order_id, order))
        except OSError:
            return list(self._open)
        return ended

    def _deliver(self, child: _Child, order_id: int, answer: Answer) -> bool:
        """Pass an answer on; False when this incarnation was abandoned."""
        with self._lock:
            if self._child is not child:
                return False
            order = self._open.get(order_id)
            if order is not None:
                self._signs.heard(order, answer)
            if isinstance(answer, Alive):
                return True
            if isinstance(answer, Attached):
                self._settings = known(self._settings, answer)
            is_open = order_id in self._open
            if is_open and not isinstance(answer, EVENTS):
                del self._open[order_id]
        if is_open:
            self._on_answer(order_id, answer)
        return True

    def _end(self, order_ids: list[int], reason: str) -> None:
        for order_id in order_ids:
            with self._lock:
                order = self._open.pop(order_id, None)
                if self._is_closed or order is None:
                    continue
                name, url = self._settings.name, self._settings.url
                shown = shown_remote(name, url)
                message = f"{shown}{'' if shown == url else f' ({url})'}: {reason}"
            hint = "ckptd tries again by itself; check the mount or the network"
            error = "BehindError" if _is_making(order) else "RemoteUnreachable"
            self._on_answer(order_id, Failed(error=error, message=message, hint=hint))


def attach_once(settings: RemoteSettings, timeout_seconds: float) -> Attached | CkptdError:
    """Attach to a remote in a child of its own and let go again; errors are returned."""
    answered = threading.Event()
    answers: list[Answer] = []

    def on_answer(_: int, answer: Answer) -> None:
        answers.append(answer)
        answered.set()

    client = RemoteClient(settings, on_answer, has_stderr=False)
    try:
        client.submit(Attach(settings=settings))
        if not answered.wait(timeout_seconds):
            msg = f"{settings.url} did not answer within {timeout_seconds:.0f} s"
            return RemoteUnreachable(msg, hint="is the server up? a hard mount waits for ever")
    finally:
        client.close()
    answer = answers[0]
    if isinstance(answer, Attached):
        return answer
    if isinstance(answer, Failed):
        return answer.raised
    return RemoteError(f"{settings.url} answered with {answer.kind}")


def _line(order_id: int, order: Request) -> bytes:
    return ORDER_LINE.dump_json(RequestLine(id=order_id, order=order)) + b"\n"
