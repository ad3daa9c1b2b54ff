"""`python -m tests.model`: all worlds of the commit protocol and of claims of a run; states, and violations.

Writes `.build/figures/generations.json`: `runs` are the states that were looked into.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.model import test_claims
from tests.model.explorer import Violation
from tests.model.test_commit_protocol import FULL, QUICK, explore
from tests.support.figures import commit_now

FIGURES = Path(__file__).resolve().parents[2] / ".build" / "figures" / "generations.json"


def main() -> int:
    """Exit status: 0 when nothing was found."""
    started, states, violations = time.monotonic(), 0, 0
    for name, (world, is_pointing) in {**QUICK, **FULL}.items():
        print(f"\n{name}", end="", flush=True)
        try:
            states += explore(world, is_pointing=is_pointing)
        except Violation as violation:
            violations += 1
            print(f"\n{violation}")
    for name, claims in test_claims.WORLDS.items():
        print(f"\n{name}", end="", flush=True)
        try:
            states += test_claims.explore(claims)
        except Violation as violation:
            violations += 1
            print(f"\n{violation}")
    figures = {
        "name": "generations",
        "fault": "F19",
        "command": "python -m tests.model",
        "runs": states,
        "violations": violations,
        "seconds": round(time.monotonic() - started, 1),
        "commit": commit_now(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\n{states:,} states, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
