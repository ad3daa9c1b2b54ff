"""`make figures`: what the long runs came to, from `.build/figures/*.json` into docs/faults.md.

A run that is not there this time keeps the row that it has in the table, so that each machine adds what it
ran. A smaller run of the same code does not take the place of a larger one; every row names its code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
FIGURES = ROOT / ".build" / "figures"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
HEAD = (
    "| fault | run | runs | deaths | violations | seconds | command | date | code |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
WITHOUT_NUMBER = {"sim": "F3", "sim-often": "F3"}
"""Runs that name no fault."""
SEEDED = "seeded"
"""Stands above its own table."""
KILLS = "killpoints"
"""Is spoken of in the text, with the number of points that there are."""

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
        "the trainer deletes while it is uploaded",
        (
            "`tests/faults/test_daemon_input.py` `test_the_trainer_deletes_while_it_is_uploaded`, "
            "`test_the_trainer_saves_again_while_it_is_uploaded`; "
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
            "`python -m tests.sim`; `tests/unit/core/policy/test_core_retention.py` "
            "`test_a_clock_that_jumps_lets_nothing_go`; `tests/unit/recover/test_recover_resume.py` "
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
            "`test_an_inspector_that_ends_well_without_findings`; "
            "`tests/unit/conversion/test_inspection_deaths.py`"
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
            "hints (internals/daemon.md) are not read, and only root and our own user are heard: "
            "`tests/unit/storage/local/test_trainer_side.py`; status is a file, commands go by files and "
            "signals; "
            "`tests/unit/daemon/health/test_metrics_page.py`"
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
        (
            "`make bench-idle`, `make bench-interference`: the aim for step times was not reached, "
            "docs/performance.md; no real trainer at 10 GB here"
        ),
    ),
    "F33": ("thousands of tags and shards", "`make bench-scale`, docs/performance.md"),
    "F34": ("manifests and journals of older versions", "`tests/golden`"),
}
"""Fault → what it is, and where it is tried or why not, besides the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One long run; cells as they stand in the table."""

    name: str
    faults: tuple[str, ...]
    runs: str
    deaths: str
    violations: str
    seconds: str
    command: str
    date: str
    code: str
    """What git calls the tree that was run; empty: of a figure that did not say."""
    said: str = ""

    @property
    def count(self) -> int:
        """Lives that were judged."""
        return int(self.runs.partition(" (")[0].replace(" ", ""))

    def cells(self) -> str:
        """All but the fault."""
        several = f" ({', '.join(self.faults)})" if len(self.faults) > 1 else ""
        run = f"`{self.name}`{several}" + (f": {self.said}" if self.said else "")
        rest = (self.runs, self.deaths, self.violations, self.seconds, self.command, self.date, self.code)
        return " | ".join((run, *rest))

    def replaces(self, recorded: Row | None) -> bool:
        """A smaller run counts only of other code, and not if it is less than half; violations always do."""
        if recorded is None or self.violations != "0" or self.count >= recorded.count:
            return True
        is_same_code = (
            self.code == recorded.code if self.code and recorded.code else self.date <= recorded.date
        )
        return not is_same_code and 2 * self.count >= recorded.count


def commit_now() -> str:
    """What git calls the tree, "-dirty" if something in it is not committed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no repository"


def rows_before(page: str) -> dict[str, Row]:
    """Runs that the table holds already, by their names."""
    found: dict[str, Row] = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if len(cells) == 7:  # before the table had seconds and code
            cells = [*cells[:5], "", *cells[5:], ""]
        name = re.match(r"`([^`]+)`(?: \((F[^)]*)\))?(?:: (.*))?$", cells[1]) if len(cells) == 9 else None
        if name is None or not cells[2]:
            continue
        runs, deaths, violations, seconds, command, date, code = cells[2:]
        found[name[1]] = Row(
            name=name[1],
            faults=tuple((name[2] or cells[0].split(" ")[0]).split(", ")),
            runs=runs,
            deaths=deaths,
            violations=violations,
            seconds=seconds,
            command=command,
            date=date,
            code=code,
            said=name[3] or "",
        )
    return found


def rows_now(figures: list[dict[str, Any]]) -> dict[str, Row]:
    """Runs of this machine, by their names; one whose fault is not known has none."""
    found: dict[str, Row] = {}
    for figure in figures:
        faults = re.findall(r"\bF\d+", f"{figure['name']} {figure.get('fault', '')}")
        faults = faults or [WITHOUT_NUMBER.get(figure["name"], "")]
        seconds = float(figure.get("seconds") or 0)
        found[figure["name"]] = Row(
            name=figure["name"],
            faults=tuple(fault for fault in dict.fromkeys(faults) if fault in FAULTS),
            runs=f"{_grouped(figure['runs'])}{_of(figure)}",
            deaths=_grouped(figure["crashes"]) if figure.get("crashes") else "",
            violations=str(figure["violations"]),
            seconds="" if not seconds else _grouped(round(seconds)) if seconds >= 100 else f"{seconds:.1f}",
            command=f"`{figure['command']}`",
            date=str(figure["date"])[:10],
            code=_code(figure),
            said=figure.get("said", ""),
        )
    return found


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _code(figure: dict[str, Any]) -> str:
    """The commit, or those of a run that went on from day to day, the one of most lives first."""
    many = figure["code"] if isinstance(figure.get("code"), dict) else {}
    commits = list(
        dict.fromkeys(key.partition(":")[0] for key in sorted(many, key=lambda key: many[key], reverse=True))
    )
    more = f" and {len(commits) - 2} more" if len(commits) > 2 else ""
    return ", ".join(commits[:2]) + more if commits else str(figure.get("commit", ""))


def _of(figure: dict[str, Any]) -> str:
    """What of what was run, where that is known."""
    return f" ({figure['reach'].replace(', ', '; ')})" if figure.get("reach") else ""


def table(rows: dict[str, Row]) -> str:
    """Every fault has its lines; a run stands with the first fault that it names."""
    lines = [HEAD]
    for fault, (title, elsewhere) in FAULTS.items():
        mine = [row for row in rows.values() if row.faults[:1] == (fault,)]
        also = [f"`{row.name}`" for row in rows.values() if fault in row.faults[1:]]
        for number, row in enumerate(mine):
            shown = f"{fault} {title}" if number == 0 else f"{fault} ″"
            lines.append(f"| {shown} | {row.cells()} |")
        if not mine:
            where = ", ".join([*(f"with {name}" for name in also), *([elsewhere] if elsewhere else [])])
            lines.append(f"| {fault} {title} | {where or 'not run yet'} | | | | | | | |")
    return "\n".join(lines)


def seeded_line(figure: dict[str, Any]) -> str:
    """What the last run of `make seeded` came to, for above its table."""
    commit, date = figure.get("commit", ""), str(figure["date"])[:10]
    at = f" ({commit})" if commit else ""
    return f"Last run: {figure['caught'].replace('/', ' of ')} found, {figure['seconds']:.0f} s, {date}{at}."


def points_words(page: str, row: Row, figures: list[dict[str, Any]]) -> str:
    """How many points of a life were taken: each death of the row is one."""
    known = re.search(r"Of some ([\d,]+) points", page)
    points = [int(known[1].replace(",", ""))] if known else []
    points += [int(figure["points"]) for figure in figures if figure["name"] == KILLS and "points" in figure]
    some = f"Of some {round(points[-1], -3):,} points " if points else "Points: "
    return f"{some}{int(row.deaths.replace(' ', '')):,} were taken so far"


def put(page: str, name: str, text: str) -> str:
    """The page with `text` between the two marks of that name; as it is where it has none."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in page or end not in page:
        return page
    head, _, rest = page.partition(begin)
    return f"{head}{begin}{text}{end}{rest.partition(end)[2]}"


def main() -> int:
    """Rewrite table and text; exit 1 when the page has no place for it, or a run names no fault."""
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        print(f"{PAGE} has no {BEGIN} … {END}")
        return 1
    figures = [json.loads(path.read_text()) for path in sorted(FIGURES.glob("*.json"))]
    seeded = next((figure for figure in figures if figure["name"] == SEEDED), None)
    before, now = rows_before(page), rows_now([f for f in figures if f is not seeded])
    nameless = [name for name, row in now.items() if not row.faults]
    rows = dict(before)
    for name, row in now.items():
        if row.replaces(before.get(name)):
            rows[name] = row
        else:
            print(f"{name}: the run of {before[name].runs} that is recorded stays; this one has {row.runs}")
    page = put(page, "figures", f"\n{table(rows)}\n")
    if seeded is not None:
        page = put(page, "seeded figure", seeded_line(seeded))
    if KILLS in rows:
        shown = [figure for figure in figures if rows[KILLS] is now.get(figure["name"])]
        page = put(page, "points", points_words(page, rows[KILLS], shown))
    PAGE.write_text(page)
    print(f"{len(rows)} runs in {PAGE.relative_to(ROOT)}")
    for name in nameless:
        print(f"{name} names no fault: add it to WITHOUT_NUMBER in tests/support/figures.py")
    return 1 if nameless else 0


if __name__ == "__main__":
    sys.exit(main())
