"""What the long runs have finished, by the code that they ran, and the figure that it comes to.

A run goes on where the one before was cut, with the code of its day: the figure names every commit with what
was run of it. After a defect of ckptd that such a point found, the ways of living that its fix touches
begin anew (`--anew clones`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.killpoints.points import Outcome
from tests.support.figures import commit_now

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / ".build"
KINDS = {
    "kill": ("killpoints", "F1", "kill -9 before, within and after every durable call of a whole life"),
    "pairs": ("killpairs", "F2", "a second kill while the first is recovered from"),
    "errors": (
        "errors",
        "F4, F6, F7",
        "every call fails, those that read as well, once or for five minutes, with each of seven errnos",
    ),
    "real": (
        "realkills",
        "F1",
        "SIGKILL in the real daemon and in its children, at counted calls and at any moment",
    ),
    "journal": (
        "journals",
        "F28",
        "the journal cut or flipped at each byte of a header and every 16th, gone, of the future",
    ),
}


REAL = {"real.py", "victim.py"}


def digest(kind: str = "") -> str:
    """Of all code that a point of this kind runs."""
    sha = hashlib.sha256()
    around = {"__main__.py", "record.py", "defects.py"} | (set() if kind == "real" else REAL)
    for folder in (ROOT / "ckptd", ROOT / "tests" / "killpoints"):
        for path in sorted(folder.rglob("*.py")):
            is_around = path.name in around or path.name.startswith("test_")
            if folder.name != "killpoints" or not is_around:
                sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


@contextmanager
def ground(*, is_full: bool) -> Iterator[tuple[Path, Path | None]]:
    """Where lives are lived: memory, and an XFS that clones where there may be one."""
    shm = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="ckptd-points-", dir=shm if os.access(shm, os.W_OK) else None))
    mounted: Path | None = None
    try:
        if is_full and os.geteuid() == 0 and shutil.which("mkfs.xfs"):
            image, folder = base / "image", base / "xfs"
            with image.open("wb") as out:
                out.truncate(512 << 20)
            folder.mkdir()
            subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
            done = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False)
            mounted = folder if done.returncode == 0 else None
        yield base, mounted
    finally:
        if mounted is not None:
            subprocess.run(["umount", "-l", str(mounted)], check=False)
        shutil.rmtree(base, ignore_errors=True)


def no_clones() -> str:
    """Why `ground` has none, though asked for."""
    if os.geteuid() != 0:
        return "an XFS for its clones is mounted by root alone"
    return "an XFS could not be mounted" if shutil.which("mkfs.xfs") else "no mkfs.xfs to make clones in"


def _first(row: dict[str, Any]) -> str:
    return str(row["point"]).partition(" ")[0]


class Record:
    """One kind of points: what is finished, what is wrong."""

    def __init__(self, kind: str, part: str, *, is_kept: bool, anew: Sequence[str] = ()) -> None:
        """`anew`: the first words of points that are forgotten; "all": all of them."""
        self._kind, self._is_kept, self._is_whole = kind, is_kept, not part
        self._name, self._fault, self._what = KINDS[kind]
        self._path = BUILD / "killpoints" / f"{self._name}{part and '-'}{part}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_there = is_kept and self._path.exists()
        self._code = f"{commit_now()}: {digest(kind)}"
        self._rows = [json.loads(row) for row in self._path.read_text().splitlines()] if is_there else []
        if is_there and anew:
            self._rows = [row for row in self._rows if "all" not in anew and _first(row) not in anew]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in self._rows))
        self.done = {row["point"] for row in self._rows}

    def add(self, name: str, outcome: Outcome, seconds: float) -> None:
        """One point was run."""
        row = {
            "point": name,
            "code": self._code,
            "deaths": outcome.deaths,
            "recovering": outcome.recovering,
            "died": outcome.died,
            "hits": outcome.hits,
            "wrong": outcome.wrong,
            "seconds": round(seconds, 3),
        }
        self._rows.append(row)
        if self._is_kept:
            with self._path.open("a") as out:
                out.write(json.dumps(row) + "\n")
        if outcome.wrong:
            print(f"VIOLATION {name}: {'; '.join(outcome.wrong)}", flush=True)

    def _reach(self, points: int, sites: int, errors: int) -> str:
        """What of what was run."""
        hits = [hit for row in self._rows for hit in row["hits"]]
        taken = sum(row["point"].count("/") for row in self._rows)
        if self._kind == "errors":
            met = {hit.partition(" ")[2] for hit in hits}
            return (
                f"{len(hits):,} of {points:,} points, {len(met):,} of {sites:,} call sites, "
                f"{len(set(hits)):,} of {errors:,} sites × errno × duration"
            )
        if self._kind == "journal":
            return f"{len(self._rows):,} of {points:,} damages, {len(hits):,} lives"
        return f"{taken:,} of {points:,} points" if self._kind == "kill" else ""

    def end(self, points: int, jobs: int, *, sites: int = 0, errors: int = 0) -> bool:
        """Print the figure, keep it for `make figures`; whether anything is wrong.

        `points` are all that there are; they are made at so many `sites`, which can fail in so many ways.
        """
        figure = {
            "name": self._name,
            "fault": self._fault,
            "what": self._what,
            "command": "python -m tests.killpoints.real"
            if self._kind == "real"
            else f"python -m tests.killpoints --only {self._kind}",
            "runs": len(self._rows),
            "points": points,
            "reach": self._reach(points, sites, errors),
            "crashes": sum(row["deaths"] for row in self._rows),
            "recovering": sum(row["recovering"] for row in self._rows),
            "died": Counter(who for row in self._rows for who in row["died"]),
            "hits": sum(len(row["hits"]) for row in self._rows),
            "violations": sum(1 for row in self._rows if row["wrong"]),
            "seconds": round(sum(row["seconds"] for row in self._rows) / jobs),
            "code": Counter(row["code"] for row in self._rows),
            "date": datetime.now(UTC).date().isoformat(),
        }
        if not self._is_kept:
            figure["met"] = sorted({hit for row in self._rows for hit in row["hits"]})
        print(json.dumps(figure), flush=True)
        if self._is_kept and self._is_whole:
            (BUILD / "figures").mkdir(parents=True, exist_ok=True)
            (BUILD / "figures" / f"{self._name}.json").write_text(json.dumps(figure) + "\n")
        return bool(figure["violations"])
