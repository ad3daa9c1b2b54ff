"""`python -m bench.summary`: collects each limit of docs/performance.md and what was measured into one table.

Each benchmark writes its own limits as `* what, at most LIMIT: measured (reached)`, or as the last cell of a
table's row. They are read from the page, so that the summary can say nothing else than the sections do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.pictures import PAGE, replace_part

PART = "summary"
_VERDICT = re.compile(r"^\* (?P<aim>.+): (?P<measured>[^:]+?) \((?P<word>NOT reached|reached)\b")
_CELL = re.compile(r"(?P<aim>≤.+): (?P<word>NOT reached|reached)$")
_LIMIT = re.compile(r"(?P<way>at least|at most|less than|below|≤) (?P<figure>[\d.]+)")
_FIGURE = re.compile(r"-?[\d.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One limit, and what was measured against it."""

    section: str
    aim: str
    measured: str
    is_reached: bool

    @property
    def times_better(self) -> float | None:
        """How many times better than the limit, 1 at the limit; None where no two figures can be compared."""
        limit, found = _LIMIT.search(self.aim), _FIGURE.search(self.measured)
        if limit is None or found is None:
            return None
        wanted, got = float(limit["figure"]), float(found[0])
        if wanted <= 0 or got <= 0:
            return None
        return got / wanted if limit["way"] == "at least" else wanted / got


def verdicts(page: str) -> list[Verdict]:
    """Read all limits of the page, in its order."""
    found: list[Verdict] = []
    section, subject = "", ""
    for block in re.split(r"\n(?=[*#|\n<])", page):
        line = " ".join(block.split())
        if line.startswith("#"):
            section, subject = block.partition("\n")[0].lstrip("# "), ""
        elif line.startswith("**"):
            subject = f"{line.strip('*').partition('**')[0].partition(',')[0]}: "
        elif line.startswith("* "):
            found += _read(line, section, subject)
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if (cell := _CELL.search(cells[-1])) is not None:
                aim = f"{cells[0]} {cell['aim']}"
                is_reached = cell["word"] == "reached"
                found.append(Verdict(section=section, aim=aim, measured=cells[-2], is_reached=is_reached))
    return found


def _read(line: str, section: str, subject: str) -> list[Verdict]:
    seen = _VERDICT.match(line)
    if seen is None:
        return []
    is_reached = seen["word"] == "reached"
    return [
        Verdict(section=section, aim=subject + seen["aim"], measured=seen["measured"], is_reached=is_reached)
    ]


def table(found: list[Verdict]) -> str:
    """Return the summary as Markdown."""
    reached = sum(one.is_reached for one in found)
    lines = [
        f"**{reached} of {len(found)} limits are reached.** Sections say why others are not, if known.",
        "",
        "| section | what, limit | measured | times better than the limit | |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        times = "–" if one.times_better is None else f"{one.times_better:.2f}"
        anchor = re.sub(r"[^\w -]", "", one.section.lower()).replace(" ", "-")
        mark = "✓" if one.is_reached else "not reached"
        lines.append(f"| [{one.section}](#{anchor}) | {one.aim} | {one.measured} | {times} | {mark} |")
    return "\n".join(lines)


def without_summary(page: str) -> str:
    """Return the page without the summary itself."""
    return re.sub(rf"<!-- {PART}: begin -->.*?<!-- {PART}: end -->", "", page, flags=re.DOTALL)


def main() -> None:
    """Write the summary into the page, and draw it."""
    replace_part(table(verdicts(without_summary(PAGE.read_text()))), PART)


if __name__ == "__main__":
    main()
