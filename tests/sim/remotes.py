"""What remotes do to a daemon: answers that are late, lost or lies, and a child process that may die.

`Faults` is the mood of one remote; the directory remote feels it in the kernel's calls, the object store in
its verbs. `Client` stands where a daemon has a remote's child process: the same service, called directly.
"""

from __future__ import annotations

import errno
import os
from itertools import count
from typing import TYPE_CHECKING, Any

from ckptd.errors import NoSpaceError, RemoteUnreachable
from ckptd.storage.child.client import _Signs
from ckptd.storage.child.service import Service
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.messages import EVENTS, LONG_ORDERS, known
from ckptd.storage.stores.base import ObjectInfo
from tests.sim.stage import WINDOW_BYTES
from tests.stores.memory import MemoryStore

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from tests.sim.kernel import Kernel

MOODS = ("ok", "slow", "before", "after", "down", "full", "hang", "stale", "empty", "flips")
_WRITES = ("create", "write", "mkdir", "put", "upload")
_ODDS = 0.25


class Faults:
    """The mood of one remote."""

    def __init__(self, kernel: Kernel, rng: random.Random) -> None:
        self.mood = "ok"
        self._kernel = kernel
        self._rng = rng

    def hits(self, call: str, *, after: bool) -> bool:
        """Whether this call fails, before or after its effect."""
        if self.mood == "slow" and not after:
            self._kernel.sleep(self._rng.uniform(0, 2.0))
        if self.mood == "down":
            return not after
        if self.mood == "full":
            return not after and call in _WRITES
        if self.mood in ("before", "after"):
            return after == (self.mood == "after") and self._rng.random() < _ODDS
        return False

    def flips(self) -> bool:
        """A bit of what was sent just now arrives as another."""
        return self.mood == "flips" and self._rng.random() < _ODDS

    def on_disk(self, call: str, path: str, after: bool) -> None:
        """Raise what a share says."""
        if self._kernel.actor == "ckptd" and path.startswith("/sim/nas") and self.hits(call, after=after):
            code = errno.ENOSPC if self.mood == "full" else self._rng.choice((errno.EIO, errno.ETIMEDOUT))
            raise OSError(code, os.strerror(code), path)

    def in_store(self, call: str, key: str, *, after: bool) -> None:
        """Raise what an object store says."""
        if self.hits(call, after=after):
            if self.mood == "full":
                raise NoSpaceError(f"{call} {key}: full")
            raise RemoteUnreachable(f"{call} {key}: {'no answer' if after else 'not reached'}")


class Cloud(MemoryStore):
    """An object store with moods; what it holds outlives every process."""

    faults: Faults
    kernel: Kernel
    listed: list[ObjectInfo]
    on_upload: Callable[[str], None]

    def attend(self, kernel: Kernel, faults: Faults) -> None:
        """Before its first use."""
        self.kernel, self.faults, self.listed = kernel, faults, []
        self.window_bytes = WINDOW_BYTES
        self.on_upload = lambda _key: None

    @property
    def url(self) -> str:
        return "s3://bucket/run"

    def _verb(self, call: str, key: str, *, changes: bool = True) -> None:
        if changes:
            self.kernel.call(call, f"s3:{key}")
        elif self.kernel.is_dead:
            self.kernel.call(call, key)
        self.faults.in_store(call, key, after=False)

    def get(self, key: str) -> bytes | None:
        self._verb("get", key, changes=False)
        return super().get(key)

    def put(self, key: str, data: bytes) -> None:
        self._verb("put", key)
        super().put(key, data)
        self.faults.in_store("put", key, after=True)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._verb("put", key)
        made = super().put_if_absent(key, data)
        self.faults.in_store("put", key, after=True)
        return made

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._verb("list", prefix, changes=False)
        if self.faults.mood != "stale":
            self.listed = list(super().list(""))
        return iter([info for info in self.listed if info.key.startswith(prefix)])

    def stat(self, key: str) -> ObjectInfo | None:
        self._verb("stat", key, changes=False)
        return super().stat(key)

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        self._verb("read", key, changes=False)
        return super().read_at(key, offset, length)

    def upload(
        self, key: str, source: Any, *, resume: Any, on_progress: Callable[[Any], None], held: Any = ()
    ) -> int:
        self._verb("upload", key)
        self.on_upload(key)

        def moved(progress: Any) -> None:
            self._verb("part", key)
            on_progress(progress)

        crc = super().upload(key, source, resume=resume, on_progress=moved)
        if self.faults.flips() and self.objects.get(key):
            self.objects[key] = bytes([self.objects[key][0] ^ 1]) + self.objects[key][1:]
        self.faults.in_store("upload", key, after=True)
        return crc

    def verify(self, key: str, size_bytes: int, crc64: int, on_progress: Callable[[int], None]) -> str:
        self._verb("verify", key, changes=False)
        return super().verify(key, size_bytes, crc64, on_progress)

    def discard(self, key: str, token: str = "") -> None:
        self._verb("discard", key)
        super().discard(key, token)

    def delete(self, key: str) -> None:
        self._verb("delete", key)
        super().delete(key)
        self.faults.in_store("delete", key, after=True)


class Client:
    """A remote's child process, of which each order runs when the scheduler picks it."""

    def __init__(
        self,
        moods: dict[str, Faults],
        settings: m.RemoteSettings,
        on_answer: Callable[[int, m.Answer], None],
        making: str,
    ) -> None:
        assert making, "no life makes forms while they are sent"
        self._settings = settings
        self._on_answer = on_answer
        self._faults = moods[settings.name]
        self._service: Service | None = None
        self._ids = count(1)
        self._open: dict[int, m.Request] = {}
        self._waiting: dict[bool, list[tuple[int, m.Request]]] = {True: [], False: []}
        self._signs = _Signs()
        self.on_confirm: Callable[[str, m.Confirm], None] = lambda _name, _order: None
        """Called when COMMITs are asked for, whatever is answered."""

    @property
    def pid(self) -> int | None:
        return None

    @property
    def open_orders(self) -> tuple[int, ...]:
        return tuple(self._open)

    def lanes(self) -> list[bool]:
        """Which of its two threads could go on: the long orders' (True), the short ones' (False)."""
        return [] if self._faults.mood == "hang" else [lane for lane in (True, False) if self._waiting[lane]]

    def go_on(self, lane: bool) -> None:
        """Carry out the next order of that thread."""
        order_id, order = self._waiting[lane].pop(0)
        assert self._service is not None
        if isinstance(order, m.Confirm):
            self.on_confirm(self._settings.name, order)
        self._service.carry_out(order_id, order)

    def die(self) -> None:
        """The child is gone, the daemon is not: its orders have failed."""
        self._service = None
        self._waiting = {True: [], False: []}
        self._end("its process ended (-9)")

    # --- what RemoteClient offers ------------------------------------------------------------------------

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, order: m.Request, order_id: int) -> int:
        is_attaching = isinstance(order, m.Attach)
        if isinstance(order, m.Attach):
            order = m.Attach(settings=self._remember(order.settings))
        self._signs.ordered(order, self._open.values())
        self._open[order_id] = order
        if self._service is None:
            self._service = Service(self._deliver, window_bytes=WINDOW_BYTES)
            self._signs = _Signs()
            if not is_attaching:
                self._service.expect(self._settings)
                self._waiting[False].append((0, m.Attach(settings=self._settings)))
        if isinstance(order, m.Attach):
            self._service.expect(order.settings)
        self._waiting[isinstance(order, LONG_ORDERS)].append((order_id, order))
        return order_id

    def pace(self, fraction: float, bytes_per_second: int | None) -> None:
        if self._service is not None:
            self._service.steer(m.Pace(fraction=fraction, bytes_per_second=bytes_per_second))

    def cancel(self, order_id: int) -> None:
        if self._service is not None and order_id in self._open:
            self._service.steer(m.Cancel(order_id=order_id))

    def abandon(self, reason: str = "it gave no sign of life") -> None:
        self._service = None
        self._waiting = {True: [], False: []}
        self._end(reason)

    def close(self) -> None:
        self._service = None
        self._open.clear()
        self._waiting = {True: [], False: []}

    def silent_seconds(self, but: int | None = None) -> float:
        open_ = (order for order_id, order in self._open.items() if order_id != but)
        return max((self._signs.silent_seconds(order) for order in open_), default=0.0)

    def idle_seconds(self, order_id: int) -> float:
        order = self._open.get(order_id)
        return self._signs.idle_seconds(order) if order is not None else 0.0

    # --- inside ------------------------------------------------------------------------------------------

    def _remember(self, settings: m.RemoteSettings) -> m.RemoteSettings:
        held = self._settings
        if settings.url == held.url and settings.remote_id is None and held.remote_id is not None:
            learned = {"remote_id": held.remote_id, "job_id": held.job_id, "may_initialise": False}
            settings = settings.model_copy(update=learned)
        self._settings = settings
        return settings

    def _deliver(self, order_id: int, answer: m.Answer) -> None:
        order = self._open.get(order_id)
        if order is not None:
            self._signs.heard(order, answer)
        if isinstance(answer, m.Alive):
            return
        if isinstance(answer, m.Attached):
            self._settings = known(self._settings, answer)
        if order is not None:
            if not isinstance(answer, EVENTS):
                del self._open[order_id]
            self._on_answer(order_id, answer)

    def _end(self, reason: str) -> None:
        ended, self._open = list(self._open), {}
        for order_id in ended:
            message = f"remote {self._settings.name} ({self._settings.url}): {reason}"
            self._on_answer(order_id, m.Failed(error="RemoteUnreachable", message=message, hint=""))
