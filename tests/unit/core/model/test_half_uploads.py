"""Uploads that no attempt goes on with are given up one by one, never by the remote's name (§5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.records import ObjectRow
from ckptd.storage.journal.journal import Journal

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
