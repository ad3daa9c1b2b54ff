"""Record in SQLite what was decided and done on this node.

The journal is expendable by design: every row can be rebuilt from the disk (identities, fingerprints) and the
remotes (COMMITs). It makes a restart cheap and a half-done deletion finishable. One writer: the deciding
thread. A journal of another schema, one that SQLite cannot read, one with a row that is not what was written
(history.py), or a link elsewhere (SQLite would write there) is set aside and a new one begun.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

from ckptd.base.identity import FileIdentity
from ckptd.base.owned_dirs import is_own_file
from ckptd.core.model.decision import Decision
from ckptd.core.model.facts import FileFacts
from ckptd.core.model.records import (
    DeletionIntent,
    DeletionRow,
    DerivedRecord,
    ObjectRow,
    SaveRow,
    SaveState,
    UploadRecord,
    UploadState,
)
from ckptd.core.model.save import SealedSave
from ckptd.errors import JournalDamaged
from ckptd.storage.journal import history as past
from ckptd.storage.journal.schema import Database, Transaction, connect, move_aside, prepare, whole

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from ckptd.core.model.save import Order

__all__ = ["DeletionIntent", "DeletionRow", "Journal", "ObjectRow", "SaveRow", "SaveState"]

log = logging.getLogger("ckptd.journal")

EARLY_ID = 0
"""Stands for the save of objects that were uploaded before it was sealed: no save has this id."""
_TAILS = ("-wal", "-shm", "-journal")


def _only(column: str, ids: tuple[int, ...]) -> str:
    return f"WHERE {column} IN ({','.join('?' * len(ids))})" if ids else ""


class Journal:
    """The journal of one job. Every method is one transaction, durable when it returns.

    Raises (everywhere):
        JournalFailed: the disk refuses; what the caller holds in memory may say more than the journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set_aside: Path | None = None
        try:
            self._db = self._open()
            self._read_all()
        except JournalDamaged as error:
            self.set_aside = move_aside(path)
            log.warning("%s; set aside, and rebuilt from disk and remotes", error.message)
            self._db = self._open()
            self._read_all()

    @whole
    def _open(self) -> Database:
        if not all(is_own_file(self._path.with_name(self._path.name + tail)) for tail in ("", *_TAILS)):
            raise JournalDamaged(f"the journal {self._path} is a link, or no file")
        db = connect(self._path)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            prepare(db)
            db.execute("INSERT OR REPLACE INTO meta VALUES ('opened_at', ?, NULL)", (str(time.time()),))
        except BaseException:
            db.close()
            raise
        return db

    @whole
    def _read_all(self) -> None:
        """Read all rows; one whose checksum is right and that this version cannot read is damage too."""
        try:
            _ = self.saves(), self.uploads(), self.open_deletions(), self.decisions()
            rows = self._db.execute("SELECT DISTINCT remote FROM objects WHERE form LIKE '%~'")
            self.with_leftovers: set[str] = {row[0] for row in rows}  # that no attempt goes on with
            early = "SELECT DISTINCT remote FROM objects WHERE save_id=?"
            self.with_early: set[str] = {row[0] for row in self._db.execute(early, (EARLY_ID,))}
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def give_up(self) -> None:
        """Close it and set it aside: the next one is rebuilt."""
        self._db.close()
        move_aside(self._path)

    # --- meta ------------------------------------------------------------------------------------------

    @whole
    def meta(self, key: str) -> str | None:
        """Return a remembered value."""
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Remember a value."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?,?,NULL)", (key, value))

    # --- inspected facts -------------------------------------------------------------------------------

    @whole
    def facts(self, path: str, identity: FileIdentity) -> FileFacts | None:
        """Return what an inspection of exactly this file said; None: it was not inspected."""
        row = self._db.execute(
            "SELECT facts FROM facts WHERE identity=? AND path=?", (past.identity_key(identity), path)
        ).fetchone()
        return None if row is None else FileFacts.model_validate_json(row[0])

    def put_facts(self, rows: Iterable[tuple[FileIdentity, FileFacts]]) -> None:
        """Keep inspections."""
        now = time.time()
        values = [(past.identity_key(i), f.path, f.model_dump_json(), now) for i, f in rows]
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?,?,?,?,NULL)", values)

    @whole
    def tidy(self, alive: Iterable[FileIdentity], spare: Collection[int], widest_seconds: float) -> list[int]:
        """Let go of what ended long ago and of files that are gone; ids of the saves that went."""
        gone, saves = past.facts_of_gone(self._db, alive), past.outlived(self._db, spare)
        if gone or saves:
            with self._transaction():
                self._db.executemany("DELETE FROM facts WHERE identity=?", gone)
                past.forget_saves(self._db, saves, widest_seconds)
        return [save_id for save_id, _ in saves]

    @whole
    def past_order(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
        """Return the order of a save whose row `tidy` deleted."""
        return past.past_order(self._db, tag, fingerprints)

    # --- saves -----------------------------------------------------------------------------------------

    def add_save(
        self,
        save: SealedSave,
        *,
        found_first: bool,
        adopted: bool,
        seen_at: float,
        state: SaveState = "present",
    ) -> int:
        """Add a newly sealed save; an earlier one of the tag that is still `present` becomes superseded by
        it.

        With another `state`: one that is no longer in its folder.
        """
        now = time.time()
        with self._transaction():
            if state == "present":
                self._db.execute(
                    "UPDATE saves SET state='superseded', ended_at=? WHERE tag=? AND state='present'",
                    (now, save.tag),
                )
            ended = None if state == "present" else now
            cursor = self._db.execute(
                "INSERT INTO saves (tag, sealed, state, found_first, adopted, seen_at, sealed_at, ended_at) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (save.tag, save.model_dump_json(), state, found_first, adopted, seen_at, now, ended),
            )
        return int(cursor.lastrowid or 0)

    @whole
    def saves(self, *ids: int) -> list[SaveRow]:
        """Return the saves that were sealed, oldest first; `ids`: these alone."""
        rows = self._db.execute(f"{past.SAVES} {_only('id', ids)} ORDER BY id", ids).fetchall()
        return [past.save_row(row) for row in rows]

    def replace_sealed(self, save_id: int, save: SealedSave) -> None:
        """Store a sealed save with refreshed identities, where a file's ctime alone changed (chmod, hard
        link).
        """
        self._db.execute("UPDATE saves SET sealed=? WHERE id=?", (save.model_dump_json(), save_id))

    def renumber_device(self, before: int, now: int) -> None:
        """Give a disk another number: in every identity of a file or folder, and in meta."""
        marks = (f'"dev":{before},', f'"dev":{now},')
        with self._transaction():
            self._db.execute("UPDATE saves SET sealed=replace(sealed, ?, ?)", marks)
            self._db.execute("UPDATE deletions SET intent=replace(intent, ?, ?)", marks)
            self._db.execute(
                "UPDATE OR REPLACE facts SET identity=? || substr(identity, ?) WHERE identity LIKE ?",
                (str(now), len(str(before)) + 1, f"{before}:%"),
            )
            self.set_meta("device", str(now))

    def end_save(self, save_id: int, state: SaveState) -> None:
        """Record that the save is no longer on this node."""
        with self._transaction():
            self._db.execute("UPDATE saves SET state=?, ended_at=? WHERE id=?", (state, time.time(), save_id))
            self._leave("save_id=?", (save_id,))

    def set_adopted(self, tags: Iterable[str] | None) -> None:
        """Adopt saves found at the first start; None: all of them."""
        with self._transaction():
            if tags is None:
                self._db.execute("UPDATE saves SET adopted=1")
            else:
                self._db.executemany("UPDATE saves SET adopted=1 WHERE tag=?", [(t,) for t in tags])

    def set_held(self, save_id: int, *, held: bool) -> None:
        """Whether clones of the save lie in `_ckptd/hold`."""
        self._db.execute("UPDATE saves SET held=? WHERE id=?", (held, save_id))

    def set_weights(self, save_id: int, weights: Mapping[str, DerivedRecord]) -> None:
        """Store the state of a save's weight exports, by form."""
        text = json.dumps({form: record.model_dump(mode="json") for form, record in weights.items()})
        self._db.execute("UPDATE saves SET weights=? WHERE id=?", (text, save_id))

    def set_derived(self, save_id: int, record: DerivedRecord) -> None:
        """Store the state of a save's local universal form."""
        self._db.execute("UPDATE saves SET derived=? WHERE id=?", (record.model_dump_json(), save_id))

    # --- uploads -----------------------------------------------------------------------------------------

    @whole
    def uploads(self, *ids: int) -> dict[int, dict[tuple[str, str], UploadRecord]]:
        """Return save id → (remote, form) → record; `ids`: these alone."""
        result: dict[int, dict[tuple[str, str], UploadRecord]] = {}
        for save_id, text in self._db.execute(f"{past.UPLOADS} {_only('save_id', ids)}", ids):
            record = UploadRecord.model_validate_json(text)
            result.setdefault(save_id, {})[record.remote, record.form] = record
        return result

    @whole
    def upload_times(self) -> dict[tuple[int, str, str], tuple[float | None, float | None]]:
        """Return (save id, remote, form) → (started, ended), unix seconds."""
        rows = self._db.execute("SELECT save_id, remote, form, started_at, ended_at FROM ships")
        return {(row[0], row[1], row[2]): (row[3], row[4]) for row in rows}

    def put_upload(self, save_id: int, record: UploadRecord) -> None:
        """Record the intent of an upload, or its outcome."""
        now = time.time()
        stored = record.model_copy(update={"retry_at_seconds": 0.0}).model_dump_json()
        ended = None if record.state is UploadState.UPLOADING else now
        with self._transaction():
            self._db.execute(
                "INSERT INTO ships VALUES (?,?,?,?,?,?,NULL) ON CONFLICT (save_id, remote, form) "
                "DO UPDATE SET record=excluded.record, ended_at=excluded.ended_at, "
                "started_at=coalesce(ships.started_at, excluded.started_at)",
                (save_id, record.remote, record.form, stored, now, ended),
            )
            if record.state is UploadState.COMMITTED:
                self._db.execute(
                    "DELETE FROM objects WHERE save_id=? AND remote=? AND form=?",
                    (save_id, record.remote, record.form),
                )

    def put_object(self, save_id: int, remote: str, form: str, row: ObjectRow) -> None:
        """Record how far one object is durable in the remote."""
        if save_id == EARLY_ID:
            self.with_early.add(remote)
        self._db.execute(
            "INSERT OR REPLACE INTO objects VALUES (?,?,?,?,?,?,?,?,?,NULL)",
            (save_id, remote, form, row.key, row.bytes, row.flushed_bytes, row.crc64, row.proof, row.token),
        )

    @whole
    def objects(self, save_id: int, remote: str, form: str) -> list[ObjectRow]:
        """Return the objects of an upload that is under way."""
        return past.objects(self._db, save_id, remote, form)

    def forget_objects(self, save_id: int, remote: str, form: str, *, are_whole: bool = False) -> None:
        """Drop earlier keys, whose half uploads become leftovers; or only those that `are_whole`."""
        which = f"save_id=? AND remote=? AND form=?{' AND proof IS NOT NULL' if are_whole else ''}"
        values = (save_id, remote, form)
        with self._transaction():
            self._leave(which, values)
            self._db.execute(f"DELETE FROM objects WHERE {which}", values)  # noqa: S608 - constants

    @whole
    def _leave(self, which: str, values: tuple[object, ...]) -> None:
        """Mark unfinished uploads as nobody's (form `…~`)."""
        unfinished = f"proof IS NULL AND form NOT LIKE '%~' AND {which}"
        rows = self._db.execute(
            f"SELECT DISTINCT remote FROM objects WHERE {unfinished}",  # noqa: S608 - constants
            values,
        )
        self.with_leftovers |= {row[0] for row in rows}
        self._db.execute(
            f"UPDATE OR REPLACE objects SET form = form || '~' WHERE {unfinished}",  # noqa: S608 - constants
            values,
        )

    def adopt_early(self, save_id: int, remote: str, key: str) -> None:
        """Give an object that was uploaded early to the save that has its file: known, and not believed."""
        self._db.execute(
            "UPDATE OR IGNORE objects SET save_id=? WHERE save_id=? AND remote=? AND key=?",
            (save_id, EARLY_ID, remote, key),
        )
        self.forget_early(remote, [key])

    def forget_early(self, remote: str, keys: Iterable[str]) -> None:
        """Forget objects that were uploaded early: they are gone, never came, or a COMMIT lists them."""
        query = "DELETE FROM objects WHERE save_id=? AND remote=? AND key=?"
        self._db.executemany(query, [(EARLY_ID, remote, key) for key in keys])

    @whole
    def leftovers(self, remote: str) -> list[tuple[str, str]]:
        """Return (key, token) of uploads in a remote that no attempt goes on with."""
        query = "SELECT key, token FROM objects WHERE remote=? AND form LIKE '%~'"
        return [(row[0], row[1]) for row in self._db.execute(query, (remote,))]

    def forget_leftovers(self, remote: str, uploads: Iterable[tuple[str, str]]) -> None:
        """Forget those (key, token), which were given up; what was left there meanwhile stays on the list."""
        query = "DELETE FROM objects WHERE remote=? AND form LIKE '%~' AND key=? AND token=?"
        self._db.executemany(query, [(remote, *upload) for upload in uploads])

    # --- deletions -------------------------------------------------------------------------------------

    def intend_deletion(self, save_id: int, trash: str, intent: DeletionIntent) -> int:
        """Record a prune before anything is renamed."""
        cursor = self._db.execute(
            "INSERT INTO deletions (save_id, trash, intent, state, at) VALUES (?,?,?,'intended',?)",
            (save_id, trash, intent.model_dump_json(), time.time()),
        )
        return int(cursor.lastrowid or 0)

    def end_deletion(self, deletion_id: int, *, done: bool) -> None:
        """Record that the prune was finished, or taken back."""
        state = "done" if done else "undone"
        self._db.execute("UPDATE deletions SET state=? WHERE id=?", (state, deletion_id))

    @whole
    def deletion_reason(self, save_id: int) -> str | None:
        """Return why the folder of a save was deleted, or is being deleted."""
        return past.why_deleted(self._db, save_id)

    @whole
    def lately(self, since: float) -> tuple[list[float], list[float]]:
        """Return when saves were sealed, and when prunes were begun that were not taken back; unix, oldest
        first.
        """
        sealed = "SELECT sealed_at FROM saves WHERE sealed_at > ? ORDER BY 1"
        pruned = "SELECT at FROM deletions WHERE at > ? AND state != 'undone' ORDER BY 1"
        of = [[row[0] for row in self._db.execute(query, (since,))] for query in (sealed, pruned)]
        return of[0], of[1]

    @whole
    def open_deletions(self) -> list[DeletionRow]:
        """Return the prunes that a crash interrupted."""
        rows = self._db.execute(
            "SELECT id, save_id, trash, intent FROM deletions WHERE state='intended'"
        ).fetchall()
        return [
            DeletionRow(
                id=r[0], save_id=r[1], trash=r[2], intent=DeletionIntent.model_validate(json.loads(r[3]))
            )
            for r in rows
        ]

    # --- decisions of a person -------------------------------------------------------------------------

    def put_decision(self, decision: Decision) -> None:
        """Remember a decision (its truth is the file in the state directory and the object in the remote)."""
        self._db.execute(
            "INSERT OR REPLACE INTO decisions VALUES (?,?,?,?,NULL)",
            (decision.kind, decision.tag, decision.serial, decision.model_dump_json()),
        )

    @whole
    def decisions(self) -> list[Decision]:
        """Return all decisions, oldest first."""
        rows = self._db.execute("SELECT body FROM decisions ORDER BY serial").fetchall()
        return [Decision.model_validate_json(r[0]) for r in rows]

    def _transaction(self) -> Transaction:
        return Transaction(self._db)
