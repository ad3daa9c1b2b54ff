"""What of a folder no COMMIT and no supplement lists: it is shipped beside it, or the folder stays (P1)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptd.core.manifest import parse_stem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.core.identity import FileIdentity
    from ckptd.core.listing import FolderListing, ListedFile
    from ckptd.core.save import SealedFile, SealedSave
    from ckptd.core.view import ShipRecord


def late_now(save: SealedSave, now: Mapping[str, FileIdentity]) -> tuple[SealedFile, ...]:
    """Files that came after the save and are as they were when they were made durable."""
    return tuple(file for file in save.late if now.get(file.path) == file.identity)


def newcomers(save: SealedSave, folder: FolderListing) -> tuple[ListedFile, ...]:
    """Files that are no part of the save and not yet durable as they are; none with the name of a shard."""
    known = {file.path for file in save.files}
    durable = {file.path: file.identity for file in save.late}
    shards = {file.path for file in folder.shards}
    return tuple(
        file
        for file in folder.own
        if file.path not in known and file.path not in shards and durable.get(file.path) != file.identity
    )


def lacking(save: SealedSave, record: ShipRecord, late: tuple[SealedFile, ...]) -> tuple[SealedFile, ...]:
    """Of files that came late, and of those that its COMMIT was found not to list: what is listed nowhere."""
    listed = {row for one in record.supplements for row in one.files}
    absent = [file for file in save.files if file.path in record.unlisted]
    return tuple(
        file
        for file in (*absent, *late)
        if (file.path, file.identity.size_bytes, file.fingerprint) not in listed
    )


def supplement_of(key: str) -> tuple[str, int, str, int] | None:
    """(tag, generation, form, k) of a SUPPLEMENT's key; None: it is none's."""
    head, mark, number = key.rsplit("/", 1)[-1].removesuffix(".json").rpartition("~x")
    where = parse_stem(head) if mark and re.fullmatch(r"[1-9]\d{0,8}", number) else None
    return None if where is None else (*where, int(number))
