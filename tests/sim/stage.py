"""Where production code meets the simulation: `os`, time, chance, SQLite, threads and children of one life.

ckptd's modules reach the world through module attributes alone (`os.open`, `time.monotonic`, `secrets` …); a
stage puts the simulated ones there and takes them away again. Nothing in ckptd knows of it.
"""

from __future__ import annotations

import datetime as real_datetime
import io
import pathlib
import posixpath
import random
import sqlite3
import sys
import time
import types
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptd.base import files, retry
from ckptd.base.identity import Model
from ckptd.conversion.engine import inspect, inspect_child
from ckptd.core.model.facts import FileFacts
from ckptd.daemon import job, loop
from ckptd.daemon.intake import sealer
from ckptd.daemon.resources import limits, reserve, workers
from ckptd.errors import JournalDamaged
from ckptd.storage.child import service, slots
from ckptd.storage.journal import journal
from ckptd.storage.remote import transfer
from ckptd.storage.remote import transfer as flights
from ckptd.storage.stores import base as _store
from ckptd.storage.stores import directory, rate_limit, retrying
from ckptd.storage.stores import directory as folders
from tests.sim.kernel import Kernel, Killed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Stage"]
assert loop is not None
assert directory is not None
assert _store is not None

SMALL_BYTES = 6000
"""Instead of 8 MiB, so that shards of a few pages count as large: windows, resumption and reading back."""
WINDOW_BYTES = 4096
_INHERITED = object()
"""In the place of an attribute that its class has from another."""

_known_facts: dict[tuple[str, bytes], FileFacts] = {}
"""An inspection is a function of name and bytes; lives share what they found."""


@lru_cache(maxsize=4096)
def _read(kind: type[Model], data: bytes | str) -> Model:
    """Parse a document. It is frozen, so that one that was read need not be parsed after each crash."""
    return kind.__pydantic_validator__.validate_json(data)  # type: ignore[no-any-return]


class Inline:
    """A thread pool that does everything at once, in the caller."""

    def __init__(self, *_: object, **__: object) -> None:
        return None

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future


class Queued:
    """A thread pool whose work waits until the scheduler picks it."""

    def __init__(self, tasks: list[Callable[[], None]]) -> None:
        self._tasks = tasks

    def submit(self, work: Callable[[], None]) -> None:
        self._tasks.append(work)

    def shutdown(self, **_: object) -> None:
        self._tasks.clear()


class Database:
    """A SQLite connection; each statement is a call of the kernel, each transaction durable when it ends."""

    def __init__(self, kernel: Kernel, path: str, db: sqlite3.Connection | None) -> None:
        self._kernel = kernel
        self.path = path
        self._db = db

    def _real(self, statement: str) -> sqlite3.Connection:
        if self._db is None:
            msg = f"the journal {self.path}: file is not a database"
            raise JournalDamaged(msg)
        if not statement.startswith(("SELECT", "PRAGMA", "CREATE TEMP")):
            self._kernel.call("sql", statement.split(maxsplit=3)[0])
        return self._db

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        if statement == "PRAGMA quick_check":  # a journal in memory is whole, or no database at all
            statement = "SELECT 'ok'"
        return self._real(statement).execute(statement, values)

    def executemany(self, statement: str, values: Sequence[Any]) -> sqlite3.Cursor:
        return self._real(statement).executemany(statement, values)

    def executescript(self, statements: str) -> sqlite3.Cursor:
        return self._real("script").executescript(statements)

    def create_function(self, name: str, count: int, function: Any, *, deterministic: bool) -> None:
        if self._db is not None:
            self._db.create_function(name, count, function, deterministic=deterministic)

    @property
    def in_transaction(self) -> bool:
        return self._db is not None and self._db.in_transaction

    def close(self) -> None:
        return None


class Databases:
    """The journals of a life: connections by the inode of the file that stands for them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._held: dict[int, sqlite3.Connection] = {}

    def connect(self, path: Path) -> Database:
        """What ckptd.storage.journal.schema.connect is."""
        kernel = self._kernel
        fd = kernel.open(path, 0o100 | 2, 0o644)
        inode = kernel.fds[fd].inode
        kernel.close(fd)
        if inode.data:
            return Database(kernel, str(path), None)
        if inode.ino not in self._held:
            # the name is durable with the first transaction, as SQLite makes it
            disk = kernel.disks[str(path).split("/")[2]]
            assert inode.parent is None
            kernel.flush_name(disk, inode)
            made = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._held[inode.ino] = made
        return Database(kernel, str(path), self._held[inode.ino])

    def roll_back(self) -> None:
        """The process is gone: what it had not committed is as if it never was."""
        for db in self._held.values():
            if db.in_transaction:
                db.rollback()

    def close(self) -> None:
        """The life is over."""
        for db in self._held.values():
            db.close()


class SimulatedDatetime(real_datetime.datetime):
    """`datetime` whose present is the kernel's."""

    kernel: Kernel

    @classmethod
    def now(cls, tz: real_datetime.tzinfo | None = None) -> real_datetime.datetime:  # type: ignore[override]
        seconds = cls.kernel.now_seconds + cls.kernel.wall_offset_seconds
        return real_datetime.datetime.fromtimestamp(seconds, tz)


def inspect_files(kernel: Kernel, folder: Path, paths: Sequence[str]) -> list[FileFacts]:
    """What the inspecting child says, by its own code, once for each name and content."""
    found = []
    fd = kernel.open(folder, files.DIR_FLAGS)
    try:
        for path in paths:
            try:
                content = bytes(kernel.content_of(f"{folder}/{path}"))
            except OSError:
                content = b""
            key = (path, content)
            if key not in _known_facts:
                line = inspect_child._inspect(fd, 0, inspect._asked(path))
                _known_facts[key] = inspect._facts_of(path, line)
            found.append(_known_facts[key])
    finally:
        kernel.close(fd)
    return found


class _Writers:
    """Of the simulated trainer."""

    def __init__(self, path: str, has_open_writer: Callable[[str, str], bool]) -> None:
        self._path, self._has_open_writer = path, has_open_writer

    def has(self, tag: str, rested_seconds: float = 0.0) -> bool:
        return self._has_open_writer(self._path, tag)


class Stage:
    """The simulated world of one life in the place of the real one, from `enter` to `leave`."""

    def __init__(
        self,
        kernel: Kernel,
        rng: random.Random,
        tasks: list[Callable[[], None]],
        client: Callable[..., Any],
        watcher: Callable[..., Any],
        open_store: Callable[..., Any],
        has_open_writer: Callable[[str, str], bool],
    ) -> None:
        self.databases = Databases(kernel)
        self._put: list[tuple[Any, str, Any]] = []
        self._defaults: list[tuple[Any, dict[str, Any] | None]] = []
        clock = _copy(time, monotonic=kernel.monotonic, time=kernel.wall, sleep=kernel.sleep)
        clock.time_ns = lambda: int(kernel.wall() * 1e9)
        now_type = type("SimulatedDatetime", (SimulatedDatetime,), {"kernel": kernel})
        system = _system(kernel)
        chance = random.Random(rng.random())
        system.urandom = chance.randbytes
        secret = types.SimpleNamespace(
            token_hex=lambda n=16: chance.randbytes(n).hex(), token_bytes=chance.randbytes
        )
        worlds = {
            "os": system,
            "time": clock,
            "secrets": secret,
            "random": chance,
            "fcntl": _copy(__import__("fcntl"), flock=kernel.flock),
            "datetime": now_type,
        }
        for name, module in list(sys.modules.items()):
            if name.startswith("ckptd"):
                for attribute, world in worlds.items():
                    if hasattr(module, attribute) and attribute in vars(module):
                        self._plan(module, attribute, world)
        self._plan(pathlib, "os", system)
        self._plan(pathlib, "io", _copy(io, open=kernel.open_stream))
        self._plan(workers, "ThreadPoolExecutor", lambda *_, **__: Queued(tasks))
        self._plan(transfer, "ThreadPoolExecutor", Inline)
        self._plan(flights, "SMALL_BYTES", SMALL_BYTES)
        self._plan(reserve, "BYTES", WINDOW_BYTES)
        self._plan(directory, "_BLOCK_BYTES", 1)
        self._plan(directory, "_LEAST_CLONE_BYTES", 1)
        self._plan(folders, "buffer_of", lambda size: memoryview(bytearray(size)))
        self._plan(files, "_renameat2", kernel.renameat)
        on_disk: dict[str, Callable[..., object]] = {
            "clone_file": kernel.clone,
            "clone_range": kernel.clone_range,
            "cached_runs": lambda _fd, size: ((0, size),),
            "drop_pages": lambda *_: None,
            "drop_pages_but": lambda *_: None,
            "mount_of": lambda fd: str(kernel.fds[fd].inode.dev),
        }
        for name, call in on_disk.items():
            for module in [m for n, m in sys.modules.items() if n.startswith("ckptd") and name in vars(m)]:
                self._plan(module, name, call)
        self._plan(Model, "model_validate_json", classmethod(_read))  # type: ignore[arg-type]
        self._plan(sealer, "OpenWriters", lambda path: _Writers(path, has_open_writer))
        self._plan(journal, "connect", self.databases.connect)
        self._plan(inspect, "inspect_files", lambda folder, paths, **_: inspect_files(kernel, folder, paths))
        self._plan(inspect_child, "_emit", lambda _line: None)
        self._plan(job, "Watcher", watcher)
        self._plan(slots, "RemoteClient", client)
        self._plan(service, "open_store", open_store)
        for function in (
            retry.RetryTimer.__init__,
            retry.Breaker.__init__,
            rate_limit.RateLimiter.__init__,
            limits.HostLimits.__init__,
        ):
            self._defaults.append((function, function.__kwdefaults__))
        self._motion = retrying.Motion.__init__.__defaults__
        self._clock = clock

    def _plan(self, where: Any, name: str, value: Any) -> None:
        self._put.append((where, name, value))

    def enter(self) -> None:
        """From here on ckptd's modules live in the simulation."""
        self._real = [(where, name, vars(where).get(name, _INHERITED)) for where, name, _ in self._put]
        for where, name, value in self._put:
            setattr(where, name, value)
        known = {"clock": self._clock.monotonic, "unix": self._clock.time, "sleep": self._clock.sleep}
        for function, held in self._defaults:
            function.__kwdefaults__ = {k: known.get(k, v) for k, v in (held or {}).items()}
        retrying.Motion.__init__.__defaults__ = (self._clock.monotonic,)

    def leave(self) -> None:
        """The real world again."""
        for where, name, value in self._real:
            if value is _INHERITED:
                delattr(where, name)
            else:
                setattr(where, name, value)
        for function, held in self._defaults:
            function.__kwdefaults__ = held
        retrying.Motion.__init__.__defaults__ = self._motion
        self.databases.close()


def _copy(module: Any, **changed: Any) -> Any:
    """A module's names, some of them others."""
    made = types.SimpleNamespace(**vars(module))
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def _system(kernel: Kernel) -> Any:
    """`os`, its calls on files by the kernel."""
    names = (
        "open", "dup", "close", "read", "pread", "preadv", "write", "pwrite", "ftruncate", "lseek", "fsync",
        "fdatasync", "stat", "lstat", "fstat", "listdir", "scandir", "access", "readlink", "fstatvfs",
        "mkdir", "unlink", "remove", "rmdir", "link", "rename", "replace", "fchmod", "fchown",
        "posix_fadvise", "posix_fallocate",
    )  # fmt: skip
    system = _copy(__import__("os"), **{name: getattr(kernel, name) for name in names})
    system.path = _copy(posixpath, lexists=kernel.exists, exists=kernel.exists)
    return system


assert Killed is not None
