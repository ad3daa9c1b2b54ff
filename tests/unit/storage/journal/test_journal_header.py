"""A journal whose header or rows were hit by a flipped bit is set aside: never waited for, never believed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ckptd.errors import JournalDamaged, JournalFailed
from ckptd.storage.journal.journal import Journal
from ckptd.storage.journal.schema import SCHEMA, Database, connect, prepare
from tests.golden.make import HERE


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
            db.execute("INSERT INTO meta VALUES ('key', 'value', NULL)")
        assert type(told.value) is what
        db.close()
        _flip(path, 18)


def test_no_row_is_believed_that_is_not_what_was_written(tmp_path: Path) -> None:
    """A bit of a sealed save, of an id, of a flag: SQLite reads them without a word (adr/0097)."""
    path = tmp_path / "journal.db"
    whole = (HERE / f"journal-{SCHEMA}.db").read_bytes()
    places = [whole.rindex(b"golden"), *range(whole.rindex(b'{"tag"'), whole.rindex(b"present") + 8, 11)]
    assert len(places) > 50
    for at in places:
        path.write_bytes(whole)
        _flip(path, at)
        with pytest.raises((JournalDamaged, ValueError)):
            prepare(connect(path))
    journal = Journal(path)
    assert journal.set_aside is not None
    assert journal.saves() == []
    journal.close()


def test_a_change_that_did_not_go_through_the_journal(tmp_path: Path) -> None:
    """Another program's; and what the journal itself changes is its own after every kind of statement."""
    path = tmp_path / "journal.db"
    path.write_bytes((HERE / f"journal-{SCHEMA}.db").read_bytes())
    for word, is_lost in (("golden", False), ("other", True)):
        journal = Journal(path)
        journal.set_meta("job_id:nas", "golden")
        journal.set_held(1, held=True)
        journal.set_adopted(None)
        journal.close()
        with sqlite3.connect(path) as db:
            db.execute("UPDATE meta SET value=? WHERE key='job_id:nas'", (word,))
        db.close()
        journal = Journal(path)
        assert (journal.set_aside is not None) == is_lost
        journal.close()
