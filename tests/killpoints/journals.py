"""The journal torn, flipped, gone, of the future: nothing committed is sent again (F28, P8).

One life of two saves is lived to its end; then its journal alone is damaged, again and again, and a new
process goes on from there.
"""

from __future__ import annotations

import json
import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from tests.killpoints import judge as judging
from tests.killpoints.life import Place, fork

SAVES = 2
STEP_BYTES = 16
FILES = ("journal.db", "journal.db-wal")


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

    def damages(self, seed: int) -> list[Damage]:
        """Cuts and flips at every byte of the database and of its log.

        First at every 16th of the database and of the end of the log, and at some more of it; then at all
        others, for as long as there is time.
        """
        rng = random.Random(seed)
        sizes = {name: len(self.pristine[name][name]) for name in FILES}
        offset = rng.randrange(STEP_BYTES)
        made = [Damage(kind) for kind in ("gone", "empty", "garbage", "future", "folder")]
        made += [Damage(kind, FILES[1]) for kind in ("gone", "empty", "garbage")]
        places = {
            FILES[0]: list(range(offset, sizes[FILES[0]], STEP_BYTES)),
            FILES[1]: [
                *range(max(0, sizes[FILES[1]] - 3 * 4120), sizes[FILES[1]], STEP_BYTES),
                *(rng.randrange(sizes[FILES[1]]) for _ in range(1000)),
            ],
        }
        made += [Damage(k, name, at) for name in FILES for at in places[name] for k in ("cut", "flip")]
        rng.shuffle(made)
        first = set(made)
        every = (Damage(k, name, at) for name in FILES for at in range(sizes[name]) for k in ("cut", "flip"))
        others = [damage for damage in every if damage not in first]
        rng.shuffle(others)
        return [*dict.fromkeys(made), *others]

    def run(self, damage: Damage) -> list[str]:
        """Damage it, start a process, compare."""
        place = self.place
        self._lay(damage)
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

    def _lay(self, damage: Damage) -> None:
        for path in self._state.glob("journal.db*"):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        for name, data in self.pristine[damage.file].items():
            (self._state / name).write_bytes(data)
        _damage(self._state / damage.file, damage)


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
