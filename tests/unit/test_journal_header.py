"""A journal whose header was hit by a flipped bit is set aside, never waited for."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ckptd.errors import JournalDamaged, JournalFailed
from ckptd.journal import Journal
from ckptd.journal_db import Database


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 5
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "is_lost"), [(0, True), (16, True), (18, True), (19, True), (28, True), (56, False)]
)
def test_a_flipped_byte_of_the_header(tmp_path: Path, at: int, is_lost: bool) -> None:
    """What SQLite makes of it differs (no database, of the future, read-only); the journal works after it."""
    path = tmp_path / "journal.db"
    Journal(path).close()
    _flip(path, at)
    journal = Journal(path)
    journal.set_meta("key", "value")
    assert journal.meta("key") == "value"
    assert (journal.set_aside is not None) == is_lost
    journal.close()


def test_a_journal_that_may_not_be_written_is_not_set_aside(tmp_path: Path) -> None:
    """A read-only file system passes, and the journal with it stays; but the file itself may forbid it."""
    path = tmp_path / "journal.db"
    Journal(path).close()
    for what in (JournalFailed, JournalDamaged):
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, factory=Database)
        db.path = path
        with pytest.raises(JournalFailed, match="readonly") as told:
            db.execute("INSERT INTO meta VALUES ('key', 'value')")
        assert type(told.value) is what
        db.close()
        _flip(path, 18)
