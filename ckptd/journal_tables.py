"""Tables of the journal, and which journals are gone on with.

One of another schema is set aside and rebuilt (P8); one that lacked nothing but sums of its rows gets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.errors import JournalDamaged
from ckptd.journal_db import Transaction
from ckptd.journal_sums import add_sums, compare_sums, keep_sums

if TYPE_CHECKING:
    from ckptd.journal_db import Database

SCHEMA = 4
_WITHOUT_SUMS = 3

FOUND = "found"
"""In meta: what lay in save_dir when the journal was begun (daemon/ordering.py); empty: not looked at yet."""
AT_BEGIN = "at-begin"
"""In meta: tags in save_dir when the daemon that began the journal first looked (daemon/beginning.py)."""

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
"""Without the sums, which are each table's last column."""


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
    compare_sums(db)
