"""The journal's connection to SQLite: a disk that fails is told apart from a journal that is damaged.

What SQLite says of the disk (full, I/O error, read-only, cannot open) passes and is waited for; the rest of
its errors mean that the file is no journal of ours, and that one is set aside (P8).
"""

from __future__ import annotations

import functools
import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ckptd.errors import JournalDamaged, JournalFailed, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

P = ParamSpec("P")
Result = TypeVar("Result")

_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}

_WRITE_VERSION_AT, _NEWEST_VERSION = 18, 2
"""In the database's header; with a larger one SQLite opens the file for reading alone, and says READONLY."""


class Database(sqlite3.Connection):
    """A connection whose statements fail in words of the tree.

    Raises (everywhere):
        JournalFailed: the disk refuses. JournalDamaged: what lies there is not to be read.
    """

    path: Path

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        """As sqlite3's."""
        return self._run(super().execute, sql, *args)

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        """As sqlite3's."""
        return self._run(super().executemany, sql, *args)

    def executescript(self, sql: str) -> sqlite3.Cursor:
        """As sqlite3's."""
        return self._run(super().executescript, sql)

    def _run(self, statement: Callable[..., sqlite3.Cursor], *args: Any) -> sqlite3.Cursor:
        try:
            return statement(*args)
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as error:
            raise _in_words(error, self.path) from error


def whole(read: Callable[P, Result]) -> Callable[P, Result]:
    """A method that reads rows: one that cannot be read as what was written is damage, not a defect.

    SQLite keeps no checksums, so a bit that flipped inside a row shows in its content alone.
    """

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return read(*args, **kwargs)
        except sqlite3.ProgrammingError:
            raise
        except (ValueError, TypeError, sqlite3.Error) as error:
            raise JournalDamaged(
                f"a row of the journal is not what was written: {str(error)[:200]}"
            ) from error

    return reading


def connect(path: Path) -> Database:
    """Open the file, or make it.

    Raises:
        JournalFailed: it cannot be opened.
    """
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Database)
    except sqlite3.Error as error:
        raise _in_words(error, path) from error
    assert isinstance(db, Database)
    db.path = path
    return db


def _in_words(error: sqlite3.Error, path: Path) -> JournalFailed:
    is_passing = getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING
    is_closed = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY
    is_damaged = not is_passing or (is_closed and _forbids_writing(path))
    kind = JournalDamaged if is_damaged else JournalFailed
    hint = "run this as the user that ckptd runs as; else the file system is read-only" if is_closed else ""
    return kind(f"the journal {path}: {error}", hint=hint)


def _forbids_writing(path: Path) -> bool:
    """Whether the file itself says that only a later SQLite may write it: none that we made does."""
    try:
        with path.open("rb") as stream:
            header = stream.read(_WRITE_VERSION_AT + 1)
    except OSError:
        return False
    return header[_WRITE_VERSION_AT:] > bytes([_NEWEST_VERSION])


class Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, _value: object, _trace: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # SQLite may have rolled back itself, on a full disk
                self._db.execute("ROLLBACK")


def move_aside(path: Path) -> Path:
    """Rename a journal and its log; where it lies now.

    Raises:
        StorageError: it cannot be renamed.
    """
    aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
    try:
        for tail in ("-wal", "-shm", ""):  # a new journal must never find the old one's log
            other = path.with_name(path.name + tail)
            if other.exists():
                os.rename(other, aside.with_name(aside.name + tail))
    except OSError as error:
        msg = f"cannot set the unreadable journal {path} aside: {error.strerror}"
        raise StorageError(msg, hint="move it away by hand; it is rebuilt") from error
    return aside
