"""The power cuts that were made so far, and the figure that they come to."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.support.figures import FIGURES, commit_now
from tests.vm.disks import Lost
from tests.vm.image import ROOT

BUILD = ROOT / ".build" / "powercuts"
REMOVAL, ANY = "in a removal", "at any moment"


@dataclass(slots=True)
class Cut:
    """A power cut and what it came to."""

    seed: int
    number: int
    """In its epoch."""
    at: str = ANY
    """What it fell into."""
    seconds: float = 0.0
    disks: Lost = field(default_factory=Lost)
    commits: int = 0
    removals: int = 0
    resumed: int = -1
    """Step that `resume` offered before."""
    set_aside: int = 0
    """Journals that the daemon set aside."""
    wrong: list[str] = field(default_factory=list)
    code: str = field(default_factory=commit_now)

    def line(self) -> str:
        """Return what a run prints."""
        disks = self.disks
        text = (
            f"seed {self.seed} cut {self.number}: {self.at} after {self.seconds} s, {self.commits} commits, "
            f"{self.removals} removals, resumed {self.resumed}; blocks lost {disks.lost}, kept {disks.kept}, "
            f"torn {disks.torn}"
        )
        return "\n  VIOLATION ".join((text, *self.wrong))


class Record:
    """The cuts of one file system, a line each."""

    def __init__(self, fs: str, *, anew: bool) -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        self._fs, self._path = fs, BUILD / f"{fs}.jsonl"
        if anew:
            self._path.unlink(missing_ok=True)

    def cuts(self) -> list[Cut]:
        """Return them, also those of runs beside this one."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [Cut(**row | {"disks": Lost(**row["disks"])}) for row in rows]

    def add(self, cut: Cut) -> None:
        """Append one."""
        with self._path.open("a") as out:
            out.write(json.dumps(asdict(cut)) + "\n")

    def end(self, command: str) -> bool:
        """Print and keep the figure of all cuts; whether a promise was broken in one."""
        cuts = self.cuts()
        figure = {
            "name": f"powercuts-{self._fs}",
            "fault": "F3",
            "what": f"power cuts of {self._fs} under the real daemon, unflushed blocks lost",
            "command": command,
            "runs": len({cut.seed for cut in cuts}),
            "crashes": len(cuts),
            "in removals": sum(cut.at == REMOVAL for cut in cuts),
            "commits": sum(cut.commits for cut in cuts),
            "removals": sum(cut.removals for cut in cuts),
            "resumes": sum(cut.resumed >= 0 for cut in cuts),
            "journals set aside": sum(cut.set_aside for cut in cuts),
            "lost": sum(cut.disks.lost for cut in cuts),
            "kept": sum(cut.disks.kept for cut in cuts),
            "torn": sum(cut.disks.torn for cut in cuts),
            "violations": sum(bool(cut.wrong) for cut in cuts),
            "seconds": round(sum(cut.seconds for cut in cuts)),
            "code": Counter(cut.code for cut in cuts),
            "date": datetime.now(UTC).date().isoformat(),
        }
        text = json.dumps(figure)
        print(text, flush=True)
        FIGURES.mkdir(parents=True, exist_ok=True)
        (FIGURES / f"powercuts-{self._fs}.json").write_text(text + "\n")
        return bool(figure["violations"])
