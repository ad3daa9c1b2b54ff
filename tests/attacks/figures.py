"""What a run of attacks came to, kept in `.build/figures` for docs/faults.md."""

from __future__ import annotations

import datetime
import json
import os
import shlex
from pathlib import Path

from tests.support.figures import commit_now

FOLDER = Path(__file__).resolve().parents[2] / ".build" / "figures"


def note(name: str, fault: str, *, runs: int, violations: int, seconds: float = 0.0, said: str = "") -> None:
    """With CKPTD_FULL=1: how many runs a fault had, in how many a promise was broken; `said` beside it."""
    if not os.environ.get("CKPTD_FULL"):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    row = {
        "name": name,
        "fault": fault,
        "command": f"CKPTD_FULL=1 pytest {shlex.quote(test) if ' ' in test else test}",
        "runs": runs,
        "violations": violations,
        "seconds": round(seconds, 1),
        "said": said,
        "commit": commit_now(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(row) + "\n")
