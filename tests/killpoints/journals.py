"""The journal torn, flipped, gone, of the future: nothing committed is sent again (F28, P8).

One life of two saves is lived to its end; then its journal alone is damaged, again and again, and a new
process goes on from there. What that process does depends on what it finds in the journal: a damaged copy is
opened as the daemon opens it, and a life is lived once for each content that it is found with.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import math
import os
import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptd.errors import CkptdError
from ckptd.storage.journal.journal import Journal
from tests.killpoints import judge as judging
from tests.killpoints.life import Place, fork
from tests.killpoints.process import quiet

SAVES = 2
STEP_BYTES = 16
FILES = ("journal.db", "journal.db-wal")
KINDS = ("cut", "flip")
PAGE_BYTES = 4096
HEADER_BYTES, PAGE_HEADER_BYTES = 100, 12
LOG_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
STRIDE = 1_000_003
"""A prime: steps of so many go through all damages in an order that no list must hold."""
SPECIAL = (
    *(("journal.db", kind) for kind in ("gone", "empty", "garbage", "future", "folder")),
    *(("journal.db-wal", kind) for kind in ("gone", "empty", "garbage")),
)


@dataclass(frozen=True, slots=True)
class Damage:
    """`kind`: cut (at a byte), flip (its lowest bits), gone, empty, garbage, future, folder; of a file."""

    kind: str
    file: str = FILES[0]
    at: int = 0

    @property
    def name(self) -> str:
        """What a failure prints."""
        return f"journal {self.kind}:{self.file}:{self.at}"

    @staticmethod
    def parse(text: str) -> Damage:
        """The inverse of `name`."""
        kind, file, at = text.split()[1].split(":")
        return Damage(kind, file, int(at))


class Journals:
    """A finished life, and its journal as it was: all in the database, or all in the log."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._verdicts = place.root / "verdicts"
        self._verdicts.mkdir()
        self._state = place.save_dir / "_ckptd" / "state"
        if fork(place, upto=SAVES):
            message = f"the life before the damage failed: {place.told()[-3:]}"
            raise AssertionError(message)
        self.before = judging.judge(place)
        in_log = {name: (self._state / name).read_bytes() for name in FILES}
        with sqlite3.connect(self._state / FILES[0]) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        self.pristine = {
            FILES[0]: {FILES[0]: (self._state / FILES[0]).read_bytes()},
            FILES[1]: in_log,
        }
        """File that is damaged → all files, whole."""

    @property
    def number(self) -> int:
        """Of all damages."""
        return len(SPECIAL) + len(KINDS) * sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(len(self.pristine[name][name]) for name in FILES)

    def damages(self, seed: int) -> Iterator[Damage]:
        """Every byte of every header and every 16th, cut and flipped; then all others, if there is time."""
        rng = random.Random(seed)
        offset = rng.randrange(STEP_BYTES)
        first = [Damage(kind, file) for file, kind in SPECIAL]
        for file, size in zip(FILES, self._sizes, strict=True):
            places = sorted({*_headers(file, size), *range(offset, size, STEP_BYTES)})
            first += [Damage(kind, file, at) for at in places for kind in KINDS]
        rng.shuffle(first)
        yield from first
        taken, total, log = set(first), sum(self._sizes), self._sizes[0]
        assert math.gcd(STRIDE, 2 * total) == 1
        for number in range(2 * total):
            at, which = divmod(number * STRIDE % (2 * total), 2)
            file, at = (FILES[0], at) if at < log else (FILES[1], at - log)
            damage = Damage(KINDS[which], file, at)
            if damage not in taken:
                yield damage

    def run(self, damage: Damage) -> tuple[list[str], bool]:
        """What is wrong after it, and whether a life was lived to know; several processes may ask."""
        found = self._found(damage)
        known = self._verdicts / found
        if not found or not known.exists():
            with (self.place.root / "turn").open("w") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                if not found or not known.exists():
                    wrong = self.live(damage)
                    if found:
                        known.write_text(json.dumps(wrong))
                    return wrong, True
        told: list[str] = json.loads(known.read_text())
        return told, False

    def _found(self, damage: Damage) -> str:
        """A name for what a daemon finds in the damaged journal; "" if only a life can tell.

        That are damages of the database's own header and of the headers of its pages, and any after which
        SQLite finds more wrong than the daemon asks for.
        """
        is_header = damage.file == FILES[0] and damage.at in _headers(FILES[0], self._sizes[0])
        if damage.kind not in KINDS or (damage.kind == "flip" and is_header):
            return ""
        folder = self.place.root / f"copy-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        self._lay(folder, damage)
        try:
            with quiet():
                journal = Journal(folder / FILES[0])
        except CkptdError as error:
            return _hashed(type(error).__name__ + str(error).replace(str(folder), ""))
        try:
            return "lost" if journal.set_aside else _content(journal)
        finally:
            journal.close()

    def live(self, damage: Damage) -> list[str]:
        """Damage it, start a process, compare."""
        place = self.place
        self._lay(self._state, damage)
        place.history.write_text(f"written {SAVES}\ncommitted {json.dumps(sorted(self.before.keys))}\n")
        code = fork(place, upto=SAVES)
        after = judging.judge(place)
        wrong = list(after.wrong) + judging.sent_again(place, is_killed=True)
        wrong += [line for line in place.told() if line.startswith(("VIOLATION", "STANDSTILL"))]
        if code:
            wrong.append(f"the process ended with {code}")
        if after.committed != self.before.committed or after.keys != self.before.keys:
            wrong.append(f"committed were {self.before.committed}, now {after.committed}")
        if place.last_of("exit", "") != "0":
            wrong.append(
                f"the exit code would be {place.last_of('exit', '?')}: {place.last_of('problems', '')}"
            )
        return wrong

    def _lay(self, folder: Path, damage: Damage) -> None:
        for path in folder.glob("journal.db*"):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        for name, data in self.pristine[damage.file].items():
            (folder / name).write_bytes(data)
        _damage(folder / damage.file, damage)


@functools.cache
def _headers(file: str, size: int) -> frozenset[int]:
    """Bytes of the headers: the file's and each page's, or the log's, its frames' and their pages'."""
    if file == FILES[0]:
        pages = [at + (HEADER_BYTES if at == 0 else 0) for at in range(0, size, PAGE_BYTES)]
        spans = [(0, HEADER_BYTES), *((at, PAGE_HEADER_BYTES) for at in pages)]
    else:
        frames = range(LOG_HEADER_BYTES, size, FRAME_HEADER_BYTES + PAGE_BYTES)
        spans = [(0, LOG_HEADER_BYTES), *((at, FRAME_HEADER_BYTES + PAGE_HEADER_BYTES) for at in frames)]
    return frozenset(at for start, length in spans for at in range(start, min(start + length, size)))


def _content(journal: Journal) -> str:
    """All that it holds, but for when it was opened; "" if SQLite finds something wrong in it."""
    db = journal._db
    try:
        if [row[0] for row in db.execute("PRAGMA integrity_check")] != ["ok"]:
            return ""
        rows = [db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY 2").fetchall()]
        tables = [name for kind, name, *_ in rows[0] if kind == "table"]
        rows += [db.execute(f'SELECT rowid, * FROM "{name}" ORDER BY 1').fetchall() for name in tables]
    except (CkptdError, ValueError, sqlite3.Error):
        return ""
    return _hashed(repr([[row for row in table if "opened_at" not in row] for table in rows]))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _damage(path: Path, damage: Damage) -> None:
    data = path.read_bytes()
    match damage.kind:
        case "cut":
            path.write_bytes(data[: damage.at])
        case "flip":
            path.write_bytes(data[: damage.at] + bytes([data[damage.at] ^ 5]) + data[damage.at + 1 :])
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "garbage":
            path.write_bytes(random.Random(1).randbytes(len(data)))
        case "folder":
            path.unlink()
            path.mkdir()
        case "future":
            with sqlite3.connect(path) as db:
                db.execute("PRAGMA user_version=99")
            db.close()
