"""Uploads that no attempt goes on with are given up one by one, never by the remote's name (§5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.records import ObjectRow
from ckptd.daemon.uploads.requests import _verified
from ckptd.storage.journal.journal import EARLY_ID, Journal

if TYPE_CHECKING:
    from pathlib import Path


def _half(journal: Journal, save_id: int, key: str, token: str) -> None:
    row = ObjectRow(key=key, bytes=100, flushed_bytes=10, crc64="0" * 16, proof=None, token=token)
    journal.put_object(save_id, "s3", "zero", row)
    journal.forget_objects(save_id, "s3", "zero")


def test_what_was_left_while_others_were_given_up_stays_on_the_list(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    _half(journal, 1, "a/x", "16:upload-a")
    ordered = journal.leftovers("s3")
    _half(journal, 2, "b/y", "16:upload-b")
    journal.forget_leftovers("s3", ordered)
    assert journal.leftovers("s3") == [("b/y", "16:upload-b")]
    journal.close()


def test_what_was_sent_early_becomes_the_saves_and_is_not_believed(tmp_path: Path) -> None:
    """It is known after a restart, too, and never among what an upload need not look at."""
    row = ObjectRow(key="a/x", bytes=100, flushed_bytes=100, crc64="0" * 16, proof="none")
    journal = Journal(tmp_path / "journal.db")
    for key in ("a/x", "a/y"):
        journal.put_object(EARLY_ID, "s3", "zero", row.model_copy(update={"key": key}))
    journal.close()
    journal = Journal(tmp_path / "journal.db")
    assert journal.with_early == {"s3"}
    journal.adopt_early(7, "s3", "a/x")
    assert journal.objects(7, "s3", "zero") == [row]
    assert _verified(journal.objects(7, "s3", "zero")) == ()
    verified = row.model_copy(update={"proof": "read-back"})
    journal.put_object(7, "s3", "zero", verified)
    journal.put_object(EARLY_ID, "s3", "zero", row)
    journal.adopt_early(7, "s3", "a/x")
    assert journal.objects(7, "s3", "zero") == [verified], "what was proved since stays proved"
    assert [one.key for one in journal.objects(EARLY_ID, "s3", "zero")] == ["a/y"]
    journal.forget_early("s3", ["a/y"])
    assert journal.objects(EARLY_ID, "s3", "zero") == []
    journal.close()
