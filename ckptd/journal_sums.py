"""A sum of each row of the journal: SQLite keeps none, and what was noted is believed (docs/adr/0139).

It is the last column of every table. Triggers of the connection write it with whatever changes a row; who
opens a journal compares all of them, once. A row that is not what was written makes the journal a lost one.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite3 import Connection

_SUM = "row_sum"


def keep_sums(db: Connection) -> None:
    """From here on every change of a row through this connection is one of its sum, in its transaction."""
    db.create_function(_SUM, -1, _sum_of, deterministic=True)
    db.execute("PRAGMA temp_store=MEMORY")
    for table, columns in _tables(db).items():
        for event in ("INSERT", f"UPDATE OF {columns}"):
            name = f"{table}_{event.split()[0]}"
            change = f"UPDATE {table} SET {_SUM}={_SUM}({columns}) WHERE rowid=NEW.rowid"  # noqa: S608 - names of ours
            after = f"AFTER {event} ON main.{table}"
            db.execute(f"CREATE TEMP TRIGGER IF NOT EXISTS {name} {after} BEGIN {change}; END")


def add_sums(db: Connection) -> None:
    """To a journal of a schema that had none, as its rows are now; in the caller's transaction."""
    for table in _tables(db):
        db.execute(f"ALTER TABLE {table} ADD COLUMN {_SUM} INTEGER")
    db.create_function(_SUM, -1, _sum_of, deterministic=True)
    for table, columns in _tables(db).items():
        db.execute(f"UPDATE {table} SET {_SUM}={_SUM}({columns})")  # noqa: S608 - names of ours


def compare_sums(db: Connection) -> None:
    """Of all rows.

    Raises:
        ValueError: one is not what was written.
    """
    for table, columns in _tables(db).items():
        query = f"SELECT count(*) FROM {table} WHERE {_SUM} IS NOT {_SUM}({columns})"  # noqa: S608 - names of ours
        if wrong := db.execute(query).fetchone()[0]:
            raise ValueError(f"{wrong} of the table {table}")


def _tables(db: Connection) -> dict[str, str]:
    """Table → its columns but the sum, as SQL has them."""
    names = db.execute("SELECT name FROM main.sqlite_master WHERE type='table'").fetchall()
    columns = {name: db.execute(f"PRAGMA main.table_info({name})").fetchall() for (name,) in names}
    return {name: ", ".join(row[1] for row in rows if row[1] != _SUM) for name, rows in columns.items()}


def _sum_of(*values: str | float | bytes | None) -> int:
    """CRC32 of the values with their types and lengths: an empty text is no 0."""
    total = 0
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        total = zlib.crc32(data, zlib.crc32(f"{type(value).__name__}{len(data)}:".encode(), total))
    return total
