"""Connect to the journal's database, and tell a disk that fails from a journal that is damaged.

What SQLite says of the disk (full, I/O error, read-only, cannot open) passes and is waited for; the rest of
its errors mean that the file is no journal of ours, and that one is set aside: it can be rebuilt.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ckptd.errors import JournalDamaged, JournalFailed, StorageError
from ckptd.storage.journal.history import add_sums, keep_sums

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
        """Run `execute` of sqlite3, translating its errors."""
        return self._run(super().execute, sql, *args)

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        """Run `executemany` of sqlite3, translating its errors."""
        return self._run(super().executemany, sql, *args)

    def executescript(self, sql: str) -> sqlite3.Cursor:
        """Run `executescript` of sqlite3, translating its errors."""
        return self._run(super().executescript, sql)

    def _run(self, statement: Callable[..., sqlite3.Cursor], *args: Any) -> sqlite3.Cursor:
        try:
            return statement(*args)
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as error:
            raise _in_words(error, self.path) from error


def whole(read: Callable[P, Result]) -> Callable[P, Result]:
    """Return a method that reads rows: one that cannot be read as what was written is damage, not a defect.

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
        msg = f"cannot set the journal {path} aside: {error.strerror}"
        raise StorageError(msg, hint="move it away by hand; it is rebuilt") from error
    return aside


# --- tables, and journals of other versions --------------------------------------------------------------
# A journal of another schema is set aside and rebuilt, which loses nothing: all of it follows from the disk
# and the remotes. One that lacked nothing but the checksums of its rows gets them.

SCHEMA = 4
_WITHOUT_SUMS = 3

FOUND = "found"
"""In meta: what lay in save_dir when the journal was begun (daemon/intake/ordering.py); empty: not looked
at yet."""
AT_BEGIN = "at-begin"
"""In meta: tags in save_dir when the daemon that began the journal first looked
(daemon/intake/initial_scan.py)."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE facts (identity TEXT NOT NULL, path TEXT NOT NULL, facts TEXT NOT NULL, seen_at REAL NOT NULL,
                    PRIMARY KEY (identity, path));
CREATE TABLE saves (id INTEGER PRIMARY KEY, tag TEXT NOT NULL, sealed TEXT NOT NULL, state TEXT NOT NULL,
                    found_first INTEGER NOT NULL, adopted INTEGER NOT NULL, held INTEGER NOT NULL DEFAULT 0,
                    derived TEXT NOT NULL DEFAULT '{}', weights TEXT NOT NULL DEFAULT '{}',
                    seen_at REAL NOT NULL, sealed_at REAL NOT NULL,
                    ended_at REAL);
CREATE TABLE ships (save_id INTEGER NOT NULL, remote TEXT NOT NULL, form TEXT NOT NULL, record TEXT NOT NULL,
                    started_at REAL, ended_at REAL, PRIMARY KEY (save_id, remote, form));
CREATE TABLE objects (save_id INTEGER NOT NULL, remote TEXT NOT NULL, form TEXT NOT NULL, key TEXT NOT NULL,
                      bytes INTEGER NOT NULL, flushed_bytes INTEGER NOT NULL, crc64 TEXT NOT NULL, proof TEXT,
                      token TEXT NOT NULL,
                      PRIMARY KEY (save_id, remote, form, key));
CREATE TABLE deletions (id INTEGER PRIMARY KEY, save_id INTEGER NOT NULL, trash TEXT NOT NULL,
                        intent TEXT NOT NULL, state TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE decisions (kind TEXT NOT NULL, tag TEXT NOT NULL, serial INTEGER NOT NULL, body TEXT NOT NULL,
                        PRIMARY KEY (kind, tag, serial));
INSERT INTO meta VALUES ('found', '');
"""
"""Tables without the sums, which are each table's last column."""


def prepare(db: Database) -> None:
    """Tables in a new journal, sums in an old one; those of rows that were there are compared.

    Raises:
        JournalDamaged: it has another schema, or SQLite finds something wrong in it. ValueError: a row is not
            what was written.
    """
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        version = _WITHOUT_SUMS
        db.executescript(f"BEGIN;{TABLES}PRAGMA user_version={version};COMMIT;")
    elif version not in (_WITHOUT_SUMS, SCHEMA):
        raise JournalDamaged(f"the journal {db.path} has schema {version}")
    elif (result := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise JournalDamaged(f"the journal {db.path}: {result}")
    if version == _WITHOUT_SUMS:
        with Transaction(db):
            add_sums(db)
            db.execute(f"PRAGMA user_version={SCHEMA}")
    keep_sums(db)
