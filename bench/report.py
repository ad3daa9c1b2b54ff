"""Turns the series of bench.convert into a part of docs/performance.md."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.convert import Series

NAMES = {
    "read": "reading the source only",
    "cp": "`cp -r`",
    "stock 1": "`ds_to_universal`, 1 worker",
    "stock 4": "`ds_to_universal`, 4 workers",
    "ckptd": "`ckptd convert`",
    "ckptd verify": "`ckptd convert --verify`",
}
TARGETS = (
    ("cold", "cp", 1.0, "at most {} × `cp -r`"),
    ("cold", "stock", 6.0, "at least {} × faster than stock"),
    ("warm", "cp", 1.0, "at most {} × `cp -r`"),
    ("warm", "stock", 6.0, "at least {} × faster than stock"),
)
CLONE_TIMES, CLONE_SHARE = 150.0, 0.005
CHILD_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stage:
    """All series of one checkpoint."""

    zero_stage: int
    ranks: int
    bytes: int
    series: list[Series]

    def find(self, tool: str, cache: str) -> Series | None:
        """One series; "stock" is the faster of its worker counts."""
        found = [s for s in self.series if s.cache == cache and s.tool.split(" ")[0] == tool.split(" ")[0]]
        if tool != "stock":
            found = [s for s in found if s.tool == tool]
        return min(found, key=lambda s: s.median("wall_seconds"), default=None)


def machine() -> str:
    """CPU, memory, kernel and versions."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "deepspeed"))
    return (
        f"{os.cpu_count()} × {model}, {memory:.0f} GiB RAM, Linux {platform.release().split('-')[0]}, "
        f"Python {sys.version.split()[0]}, {versions}; a virtual disk"
    )


def render(stages: list[Stage], latencies: dict[str, float]) -> str:
    """The measured part of the page."""
    load = os.getloadavg()[2]
    lines = [f"Machine: {machine()}; load {load:.1f} over the last quarter of an hour.", ""]
    for stage in stages:
        lines += _table(stage)
    lines += ["| command | median s |", "|---|---|"]
    lines += [
        f"| `{name.split(' (')[0]}`{_rest(name)} | {seconds:.2f} |" for name, seconds in latencies.items()
    ]
    return "\n".join(lines) + "\n"


def _rest(name: str) -> str:
    return f" ({name.split(' (', 1)[1]}" if " (" in name else ""


def _table(stage: Stage) -> list[str]:
    runs = len(stage.series[0].runs)
    what = f"ZeRO stage {stage.zero_stage}, {stage.ranks} ranks, 319 M parameters, bf16"
    lines = [
        f"**{what}: {stage.bytes / 1e9:.2f} GB**, {runs} interleaved runs each, median (least – greatest):",
        "",
        "| cache | tool | wall s | CPU s | peak RSS of the tree MiB | read GB | written GB | peak disk GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in stage.series:
        low, high = s.spread("wall_seconds")
        wall = f"{s.median('wall_seconds'):.2f} ({low:.2f} – {high:.2f})"
        lines.append(
            f"| {s.cache} | {NAMES.get(s.tool, s.tool)} | {wall} "
            f"| {s.median('cpu_seconds'):.1f} | {s.median('peak_rss_bytes') / 2**20:.0f} "
            f"| {s.median('read_bytes') / 1e9:.2f} | {s.median('written_bytes') / 1e9:.2f} "
            f"| {s.median('peak_disk_bytes') / 1e9:.3f} |"
        )
    lines.append("")
    lines += [f"* {words}" for words in verdicts(stage)]
    return [*lines, ""]


def verdicts(stage: Stage) -> list[str]:
    """Each target with the figure that was reached."""
    said = []
    for cache, tool, bound, words in TARGETS:
        ours, other = stage.find("ckptd", cache), stage.find(tool, cache)
        if ours is None or other is None:
            continue
        a, b = ours.median("wall_seconds"), other.median("wall_seconds")
        figure, ok = (a / b, a / b <= bound) if tool == "cp" else (b / a, b / a >= bound)
        said.append(f"{cache}, {words.format(bound)}: {figure:.2f} ({'reached' if ok else 'NOT reached'})")
    clones, stock = stage.find("ckptd, XFS clones", "cold"), stage.find("stock", "cold")
    if clones is not None and stock is not None:
        times = stock.median("wall_seconds") / clones.median("wall_seconds")
        share = clones.median("peak_disk_bytes") / stage.bytes
        fast, small = times >= CLONE_TIMES, share < CLONE_SHARE
        said.append(f"XFS, at least {CLONE_TIMES:.0f} × faster than stock: {times:.0f} ({_word(fast)})")
        said.append(f"XFS, less than {CLONE_SHARE:.1%} new disk: {share:.2%} ({_word(small)})")
    children = [b for s in stage.series for b in s.child_rss_bytes]
    if children:
        largest, ok = max(children), max(children) <= CHILD_LIMIT_BYTES
        words = "largest resident set of a converting child, at most 64 MiB"
        said.append(f"{words}: {largest / 2**20:.0f} MiB ({_word(ok)})")
    return said


def _word(ok: bool) -> str:
    return "reached" if ok else "NOT reached"
