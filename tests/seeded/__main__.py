"""`python -m tests.seeded [NN…] [--jobs N]`: every seeded defect must be found by the test that it names.

First the named tests run in a tree without any defect, where they must pass. Figures go to
`.build/figures/seeded.json`, the table into docs/faults.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tests.seeded.bugs import ROOT, Bug, Outcome, bugs, copy_tree, pytest, try_bug
from tests.support.figures import PAGE, SEEDED, commit_now, put, seeded_line

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when all were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded", description=__doc__)
    parser.add_argument("numbers", nargs="*", metavar="NN")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(arguments)
    wanted = [bug for bug in bugs() if not asked.numbers or bug.number in asked.numbers]
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-seeded-") as folder,
        ThreadPoolExecutor(asked.jobs) as pool,
    ):
        place = Path(folder)
        clean = place / "clean"
        clean.mkdir()
        copy_tree(clean)
        commands = sorted({bug.tests for bug in wanted})
        red = [said for said in pool.map(lambda tests: _clean(clean, tests), commands) if said]
        outcomes = []
        for outcome in pool.map(lambda bug: try_bug(bug, place), wanted):
            outcomes.append(outcome)
            print(_line(outcome), flush=True)
    for said in red:
        print(f"red without a defect: {said}")
    caught = sum(outcome.is_caught for outcome in outcomes)
    seconds = time.monotonic() - started
    print(f"{caught} of {len(outcomes)} found in {seconds:.0f} s")
    if not asked.numbers:
        _publish(outcomes, seconds, len(red))
    return 0 if caught == len(outcomes) and not red else 1


def _clean(tree: Path, tests: str) -> str:
    status, output = pytest(tree, tests)
    return "" if status == 0 else f"{tests}: exit {status}: {' / '.join(output.strip().splitlines()[-4:])}"


def _line(outcome: Outcome) -> str:
    bug = outcome.bug
    verdict = "found" if outcome.is_caught else "NOT FOUND"
    return f"{bug.number} {bug.name:42} {bug.promise:8} {verdict:9} {outcome.seconds:6.1f} s {outcome.words}"


def _publish(outcomes: Sequence[Outcome], seconds: float, red: int) -> None:
    caught = sum(outcome.is_caught for outcome in outcomes)
    figure = {
        "name": SEEDED,
        "command": "make seeded",
        "runs": len(outcomes),
        "violations": len(outcomes) - caught + red,
        "seconds": round(seconds, 1),
        "commit": commit_now(),
        "date": datetime.now(UTC).date().isoformat(),
        "caught": f"{caught}/{len(outcomes)}",
    }
    target = ROOT / ".build" / "figures" / "seeded.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figure, indent=1) + "\n")
    found = {outcome.bug.number for outcome in outcomes if outcome.is_caught}
    rows = table([outcome.bug for outcome in outcomes], found)
    page = put(PAGE.read_text(), "seeded figure", seeded_line(figure))
    PAGE.write_text(put(page, SEEDED, f"\n{rows}\n"))


def table(listed: Sequence[Bug], found: set[str]) -> str:
    """The table of docs/faults.md."""
    rows = ["| defect | promise | what would be lost | found by |", "|---|---|---|---|"]
    for bug in listed:
        tests = f"`{bug.tests}`" if bug.number in found else "**not found**"
        rows.append(f"| {bug.name} | {bug.promise} | {bug.lost} | {tests} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
