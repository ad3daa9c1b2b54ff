"""Remove rows from the journal: of saves that ended long ago, and of files that are gone.

A run seals tens of thousands of saves, and nobody asks for those that ended. Kept are the newest of them, the
order of shards that come back (a save that returns keeps its place in the order), and what was there before
the first start, which ckptd never deletes on its own (docs/adr/0117).
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from typing import TYPE_CHECKING, Any

from ckptd.core.model.records import DeletionIntent, DerivedRecord, DerivedState, ObjectRow, SaveRow
from ckptd.core.model.save import Order, SealedSave

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from sqlite3 import Connection

    from ckptd.base.identity import FileIdentity

KEPT_ENDED = 200
"""Rows of ended saves that stay whole."""
BELT_SECONDS = 3600.0
"""The hourly limit counts what was sealed and what went within an hour."""
_AT_ONCE = 1000
_FACTS_SECONDS = 86400.0
_MADE = (DerivedState.READY, DerivedState.CONVERTING)
UPLOADS = "SELECT save_id, record FROM ships"
SAVES = (
    "SELECT id, sealed, state, found_first, adopted, held, derived, seen_at, sealed_at, ended_at, weights "
    "FROM saves"
)
WIDEST = "widest_save_seconds"
ANY_TAG = ""
"""Asks `past_order` for the same files under whatever name: a copy of what ended long ago."""


def identity_key(identity: FileIdentity) -> str:
    """Return the key of one file in one state, as text."""
    i = identity
    return f"{i.dev}:{i.ino}:{i.size_bytes}:{i.mtime_ns}:{i.ctime_ns}"


def save_row(row: tuple[Any, ...]) -> SaveRow:
    """Return a row of `SAVES`."""
    return SaveRow(
        id=row[0],
        save=SealedSave.model_validate_json(row[1]),
        state=row[2],
        found_first=bool(row[3]),
        adopted=bool(row[4]),
        held=bool(row[5]),
        derived=DerivedRecord.model_validate_json(row[6]),
        seen_at=row[7],
        sealed_at=row[8],
        ended_at=row[9],
        weights={f: DerivedRecord.model_validate(d) for f, d in json.loads(row[10]).items()},
    )


def _past_key(tag: str, fingerprints: tuple[tuple[str, str], ...]) -> str:
    return "past:" + hashlib.sha256(json.dumps([tag, fingerprints]).encode()).hexdigest()[:32]


def past_order(db: Connection, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
    """Return the order of a save whose row was deleted."""
    row = db.execute("SELECT value FROM meta WHERE key=?", (_past_key(tag, fingerprints),)).fetchone()
    return None if row is None else Order(*json.loads(row[0]))


def objects(db: Connection, save_id: int, remote: str, form: str) -> list[ObjectRow]:
    """Return the objects of an upload that is under way."""
    rows = db.execute(
        "SELECT key, bytes, flushed_bytes, crc64, proof, token FROM objects "
        "WHERE save_id=? AND remote=? AND form=?",
        (save_id, remote, form),
    ).fetchall()
    return [
        ObjectRow(key=r[0], bytes=r[1], flushed_bytes=r[2], crc64=r[3], proof=r[4], token=r[5]) for r in rows
    ]


def why_deleted(db: Connection, save_id: int) -> str | None:
    """Return the reason of a save's newest prune that was not undone."""
    row = db.execute(
        "SELECT intent FROM deletions WHERE save_id=? AND state != 'undone' ORDER BY id DESC LIMIT 1",
        (save_id,),
    ).fetchone()
    return None if row is None else DeletionIntent.model_validate_json(row[0]).reason


def outlived(db: Connection, spare: Collection[int]) -> list[tuple[int, SealedSave]]:
    """Return the saves that ended, are not among the newest of those, and of which nothing is left here.

    Not one that was found at the first start, nor the highest order that is known.
    """
    rows = db.execute(
        "SELECT id, sealed, derived, weights FROM saves "
        "WHERE state != 'present' AND held=0 AND found_first=0 "
        "AND id NOT IN (SELECT save_id FROM deletions WHERE state='intended') "
        "ORDER BY id DESC LIMIT ? OFFSET ?",
        (_AT_ONCE, KEPT_ENDED),
    )
    found = []
    for save_id, sealed, derived, weights in rows:
        made = [DerivedRecord.model_validate_json(derived)]
        made += [DerivedRecord.model_validate(one) for one in json.loads(weights).values()]
        if save_id not in spare and not any(one.state in _MADE for one in made):
            found.append((save_id, SealedSave.model_validate_json(sealed)))
    return found


def forget_saves(db: Connection, saves: Iterable[tuple[int, SealedSave]], widest_seconds: float) -> None:
    """Remove rows of saves, and what hangs on them; their orders stay. In the caller's transaction."""
    for save_id, save in saves:
        order = json.dumps([save.branch, save.step, save.save_seq])
        for tag in (save.tag, ANY_TAG):
            past = _past_key(tag, save.fingerprints)
            db.execute("INSERT OR REPLACE INTO meta VALUES (?,?,NULL)", (past, order))
        db.execute("DELETE FROM saves WHERE id=?", (save_id,))
        db.execute("DELETE FROM ships WHERE save_id=?", (save_id,))
        db.execute("DELETE FROM objects WHERE save_id=? AND form NOT LIKE '%~'", (save_id,))
    db.execute("INSERT OR REPLACE INTO meta VALUES (?,?,NULL)", (WIDEST, repr(widest_seconds)))
    # ids are never used twice: the newest stays; the hourly limit counts those of an hour
    db.execute(
        "DELETE FROM deletions WHERE state != 'intended' AND id < (SELECT max(id) FROM deletions) AND at < ?",
        (time.time() - BELT_SECONDS,),
    )


def facts_of_gone(db: Connection, alive: Iterable[FileIdentity]) -> list[tuple[str]]:
    """Return the keys of inspections that are older than a day, of files that are not there."""
    keep = {identity_key(identity) for identity in alive}
    old = db.execute("SELECT DISTINCT identity FROM facts WHERE seen_at < ?", (time.time() - _FACTS_SECONDS,))
    return [(row[0],) for row in old.fetchall() if row[0] not in keep]


# --- checksums of rows -----------------------------------------------------------------------------------
# SQLite keeps none, and what the journal says is believed (docs/adr/0097). The checksum is the last column of
# every table. Triggers of the connection write it with whatever changes a row; whoever opens a journal
# compares all of them, once. A row that is not what was written means that the journal is set aside as lost.

_SUM = "row_sum"


def keep_sums(db: Connection) -> None:
    """Compare the checksums of all rows, and make every change of a row through this connection change its
    checksum in the same transaction.

    Raises:
        ValueError: a row is not what was written.
    """
    db.create_function(_SUM, -1, _sum_of, deterministic=True)
    db.execute("PRAGMA temp_store=MEMORY")
    for table, columns in _tables(db).items():
        query = f"SELECT count(*) FROM {table} WHERE {_SUM} IS NOT {_SUM}({columns})"  # noqa: S608 - names of ours
        if wrong := db.execute(query).fetchone()[0]:
            raise ValueError(f"{wrong} of the table {table}")
        for event in ("INSERT", f"UPDATE OF {columns}"):
            name = f"{table}_{event.split()[0]}"
            change = f"UPDATE {table} SET {_SUM}={_SUM}({columns}) WHERE rowid=NEW.rowid"  # noqa: S608 - names of ours
            after = f"AFTER {event} ON main.{table}"
            db.execute(f"CREATE TEMP TRIGGER IF NOT EXISTS {name} {after} BEGIN {change}; END")


def add_sums(db: Connection) -> None:
    """Add checksums to a journal of a schema that had none, from its rows as they are now, in one
    transaction.
    """
    for table in _tables(db):
        db.execute(f"ALTER TABLE {table} ADD COLUMN {_SUM} INTEGER")
    db.create_function(_SUM, -1, _sum_of, deterministic=True)
    for table, columns in _tables(db).items():
        db.execute(f"UPDATE {table} SET {_SUM}={_SUM}({columns})")  # noqa: S608 - names of ours


def _tables(db: Connection) -> dict[str, str]:
    """Return table → its columns but the checksum, as SQL has them."""
    names = [name for (name,) in db.execute("SELECT name FROM main.sqlite_master WHERE type='table'")]
    columns = {name: db.execute(f"SELECT * FROM main.{name} LIMIT 0").description for name in names}  # noqa: S608
    return {name: ", ".join(row[0] for row in rows if row[0] != _SUM) for name, rows in columns.items()}


def _sum_of(*values: str | float | bytes | None) -> int:
    """Return the CRC32 of the values with their types and lengths: an empty text is no 0."""
    total = 0
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        total = zlib.crc32(data, zlib.crc32(f"{type(value).__name__}{len(data)}:".encode(), total))
    return total
