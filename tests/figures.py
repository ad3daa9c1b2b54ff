"""`make figures`: what the long runs came to, from `.build/figures/*.json` into the table of docs/faults.md.

A run that is not there this time keeps the row that it has in the table, so that each machine adds what it
ran.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
FIGURES = ROOT / ".build" / "figures"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
HEAD = "| fault | run | runs | deaths | violations | command | date |\n|---|---|---|---|---|---|---|"
WITHOUT_NUMBER = {"sim": "F3", "commits": "F1", "generations": "F19", "fleet": "F19"}
"""Runs that name no fault."""

FAULTS = {
    "F1": ("kill -9 at every durable call of a whole life", ""),
    "F2": ("a second kill during recovery", ""),
    "F3": ("power loss: unsynced data and names lost, torn, reordered", "`python -m tests.sim`"),
    "F4": ("no space, quota, file too large, no inodes here", ""),
    "F5": ("the same in the remote", "table below; `test_daemon_remote.py`"),
    "F6": ("EIO; a flush is never tried again", ""),
    "F7": ("read-only, denied, stale", ""),
    "F8": (
        "truncated, empty, missing, extra shards",
        "`tests/attacks/test_damage.py`, `test_daemon_input.py`",
    ),
    "F9": ("bits that flip", "`tests/attacks/test_damage.py`; table below"),
    "F10": (
        "growing shards, `latest` ahead, aborted and repeated saves",
        "`tests/attacks/test_interleavings.py`",
    ),
    "F11": (
        "the trainer deletes while it is shipped",
        (
            "`tests/faults/test_daemon_input.py` `test_the_trainer_deletes_while_it_is_shipped`, "
            "`test_the_trainer_saves_again_while_it_is_shipped`; "
            "`tests/faults/test_daemon_rotation.py` "
            "`test_one_that_vanishes_while_it_is_sent_ends_with_the_file_under_way`"
        ),
    ),
    "F12": ("slow, stalled, half-open links", "table below"),
    "F13": ("storms of 503, errors inside 200", "table below"),
    "F14": ("partitions, flapping, RST", "table below"),
    "F15": ("lost answers", "table below"),
    "F16": ("weak and lying stores", "table below; `tests/stores`"),
    "F17": (
        "a COMMIT damaged before the prune",
        (
            "`tests/faults/test_daemon_remote.py` `test_a_commit_that_vanishes_before_the_prune`; "
            "steps `forget` and `vanish` of `python -m tests.sim`"
        ),
    ),
    "F18": (
        "clocks that jump, stop, go back",
        (
            "`python -m tests.sim`; `tests/unit/test_core_retention.py` "
            "`test_a_clock_that_jumps_lets_nothing_go`; `tests/unit/test_recover_resume.py` "
            "`test_no_clock_decides`"
        ),
    ),
    "F19": ("two daemons, two nodes", "`tests/attacks`; `python -m tests.model`"),
    "F20": ("configuration mutants", "`tests/attacks/test_config_mutants.py`"),
    "F21": ("rights or credentials lost while it runs", "table below"),
    "F22": ("inotify overflows, watch limits, a directory replaced", "`test_local_watch.py`"),
    "F23": ("symlinks and mounts swapped under it", "`tests/attacks/test_swaps.py`"),
    "F24": ("hostile pickles, archives, remotes", "`tests/attacks`"),
    "F25": (
        "children killed, stopped, short of memory, wrong",
        (
            "`tests/faults/test_convert_killed.py`; `tests/faults/test_hungry.py` "
            "`test_a_child_that_the_kernel_kills_for_memory`, "
            "`test_an_executor_that_is_stopped_is_ended`, "
            "`test_an_executor_that_ends_well_without_a_result`, "
            "`test_an_executor_that_ends_well_and_said_nonsense`, "
            "`test_a_planner_that_ends_well_without_a_plan`, "
            "`test_an_inspector_that_ends_well_without_findings`"
        ),
    ),
    "F26": (
        "the daemon short of memory, descriptors, threads",
        (
            "`tests/faults/test_hungry.py` `test_too_few_descriptors_are_said_and_nothing_is_lost`, "
            "`test_too_few_processes_and_threads_are_said_and_nothing_is_lost`, "
            "`test_a_daemon_that_the_kernel_kills_for_memory_goes_on`"
        ),
    ),
    "F27": (
        "a worker that hangs",
        (
            "`tests/faults/test_transfer_nfs.py` `test_a_mount_that_hangs_hurts_only_its_own_child` "
            "(a FUSE mount whose process is stopped)"
        ),
    ),
    "F28": ("the journal lost, torn, flipped, of the future", ""),
    "F29": (
        "stop, reload, upgrade",
        (
            "`tests/faults/test_daemon_service.py` `test_reload_with_good_and_bad_files`; "
            "`tests/e2e/test_daemon_life.py` `test_sigterm_in_mid_upload`; `tests/golden`"
        ),
    ),
    "F30": (
        "strangers on a socket",
        (
            "hints (adr/0109) are not read, and only root and our own user are heard: "
            "`tests/unit/test_trainer_side.py`; status is a file, commands go by files and signals; "
            "`tests/unit/test_metrics_page.py`"
        ),
    ),
    "F31": (
        "secrets in outputs",
        (
            "`tests/attacks/test_secrets.py` `test_nothing_planted_is_found_anywhere`; "
            "`tests/faults/test_s3_words.py` `test_secrets_are_nowhere`"
        ),
    ),
    "F32": (
        "interference with training",
        "`make bench-idle`, docs/performance.md; no real trainer at 10 GB here",
    ),
    "F33": ("thousands of tags and shards", "`make bench-scale`, docs/performance.md"),
    "F34": ("manifests and journals of older versions", "`tests/golden`"),
}
"""Fault → what it is, and where it is tried or why not, besides the runs."""


def rows_before(page: str) -> dict[str, dict[str, Any]]:
    """Runs that the table holds already, by their names."""
    found: dict[str, dict[str, Any]] = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.match(r"`([^`]+)`( \((.*)\))?$", cells[1]) if len(cells) == 7 and cells[2] else None
        if name is not None:
            faults = (name[3] or cells[0].split(" ")[0]).split(", ")
            found[name[1]] = {"cells": cells[1:], "faults": faults}
    return found


def rows_now(folder: Path) -> dict[str, dict[str, Any]]:
    """Runs of this machine."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        figure = json.loads(path.read_text())
        faults = re.findall(r"\bF\d+", f"{figure['name']} {figure.get('fault', '')}")
        faults = faults or [WITHOUT_NUMBER.get(figure["name"], "")]
        faults = [fault for fault in dict.fromkeys(faults) if fault in FAULTS]
        several = f" ({', '.join(faults)})" if len(faults) > 1 else ""
        cells = [
            f"`{figure['name']}`{several}",
            f"{figure['runs']:,}{_of(figure)}".replace(",", " "),
            f"{figure['crashes']:,}".replace(",", " ") if figure.get("crashes") else "",
            str(figure["violations"]),
            f"`{figure['command']}`",
            str(figure["date"])[:10],
        ]
        found[figure["name"]] = {"cells": cells, "faults": faults}
    return found


def _of(figure: dict[str, Any]) -> str:
    """What of what was run, where that is known."""
    return f" ({figure['reach'].replace(', ', '; ')})" if figure.get("reach") else ""


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Every fault has its lines; a run stands with the first fault that it names."""
    lines = [HEAD]
    for fault, (title, elsewhere) in FAULTS.items():
        mine = [row for row in rows.values() if row["faults"][:1] == [fault]]
        also = [row["cells"][0].partition(" (")[0] for row in rows.values() if fault in row["faults"][1:]]
        for number, row in enumerate(mine):
            shown = f"{fault} {title}" if number == 0 else f"{fault} ″"
            lines.append(f"| {shown} | {' | '.join(row['cells'])} |")
        if not mine:
            where = ", ".join([*(f"with {name}" for name in also), *([elsewhere] if elsewhere else [])])
            lines.append(f"| {fault} {title} | {where or 'not run yet'} | | | | | |")
    return "\n".join(lines)


def main() -> int:
    """Rewrite the table; exit 1 when the page has no place for it."""
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        print(f"{PAGE} has no {BEGIN} … {END}")
        return 1
    rows = rows_before(page) | rows_now(FIGURES)
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}")
    print(f"{len(rows)} runs in {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
