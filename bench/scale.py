"""`python -m bench.scale`: converting checkpoints of hundreds of ranks: sparse files on a loop-mounted XFS.

Nobody has a terabyte to spare for a benchmark: here pickles, zip framing, names and sizes are real, storages
are holes (`bench.sparse`). Measured is all that depends on files, parameters and ranks; not the copying of
data. Needs root (mount) and some 100 MB of disk; writes docs/scale.png and the scale part of
docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import loop, sparse
from bench.measure import Run, measure
from bench.pictures import replace_part
from bench.report import machine
from tests.support.real import REPOSITORY

WORK = REPOSITORY / ".build" / "bench" / "scale"
IMAGE_BYTES = 14 << 40
MAX_WRITTEN_BYTES = 6 << 30
"""More than this in the image means that holes are being filled: the run is ended before the disk is."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what is aimed at (0: no aim); `plan_only`: planned, not converted."""

    model: sparse.Model
    seconds: float = 0
    rss_bytes: int = 0
    plan_only: bool = False

    @property
    def fragments(self) -> int:
        """(parameter, rank) pairs that hold something, about."""
        model = self.model
        ranks = model.dp * model.tp
        return (
            len(model.shapes) * ranks if model.stage >= 3 else len(model.shapes) * model.tp + ranks * model.pp
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One conversion, and its planning alone (`--dry-run`)."""

    case: Case
    run: Run
    """The planning again where nothing is converted."""
    report: dict[str, int | float]
    planning: Run
    plan_report: dict[str, int | float]
    source_bytes: int
    source_files: int
    disk_bytes: int


GPT_104B = sparse.gpt(11600, 64, 51200)
GPT_176B = sparse.gpt(14336, 70, 250880)
LLAMA_70B = sparse.llama(8192, 80, 32000, 28672, 1024)
AIMED = [
    Case(sparse.Model("104B ZeRO-1", GPT_104B, 1, 256), 10, 128 * MIB),
    Case(sparse.Model("104B ZeRO-1 without CRC32s", GPT_104B, 1, 256, has_crcs=False), 10, 128 * MIB),
    Case(sparse.Model("70B ZeRO-3", LLAMA_70B, 3, 256), 40, 300 * MIB),
    Case(sparse.Model("176B ZeRO-1", GPT_176B, 1, 8, 4, 12), 60, 300 * MIB, plan_only=True),
]
SERIES = [
    *[Case(sparse.Model("104B ZeRO-1", GPT_104B, 1, dp)) for dp in (64, 128, 512, 1024)],
    *[Case(sparse.Model("70B ZeRO-3", LLAMA_70B, 3, dp)) for dp in (32, 64, 128, 512)],
    *[
        Case(sparse.Model(f"{n} layers ZeRO-3", sparse.llama(8192, n, 32000, 28672, 1024), 3, 256))
        for n in (10, 20, 40)
    ],
]
TINY = [
    Case(sparse.Model("tiny ZeRO-1", sparse.gpt(1024, 4, 1000), 1, 16), 10, 128 * MIB),
    Case(
        sparse.Model("tiny ZeRO-1 without CRC32s", sparse.gpt(1024, 4, 1000), 1, 16, has_crcs=False),
        10,
        128 * MIB,
    ),
    Case(sparse.Model("tiny TP × PP", sparse.gpt(1024, 4, 1000), 1, 2, 4, 2), 40, 300 * MIB),
    Case(sparse.Model("tiny ZeRO-3", sparse.llama(1024, 4, 1000, 2816, 256), 3, 16), 40, 300 * MIB),
]


@contextlib.contextmanager
def guarded(image: Path) -> Iterator[None]:
    """End this program's children when the image begins to fill the disk below it."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if image.stat().st_blocks * 512 > MAX_WRITTEN_BYTES:
                print("the image fills up: holes are being written; stopped", flush=True)
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def convert(case: Case, place: Path) -> Result:
    """Write, plan, convert and remove one case."""
    source, out = place / "source", place / "universal"
    sparse.write(source, case.model)
    sizes = [p.stat().st_size for p in source.iterdir()]
    subprocess.run(["sync", "-f", str(place)], check=True)
    command = [sys.executable, "-m", "ckptd", "convert", str(source), str(out), "--json"]
    planning = measure([*command, "--dry-run"], cwd=REPOSITORY, env=dict(os.environ), flush=place)
    before = _used(place)
    run, disk = planning, 0
    if not case.plan_only:
        run = measure(command, cwd=REPOSITORY, env=dict(os.environ), flush=place)
        disk = _used(place) - before
        shutil.rmtree(out)
    shutil.rmtree(source)
    report, plan = json.loads(run.stdout), json.loads(planning.stdout)
    result = Result(case, run, report, planning, plan, sum(sizes), len(sizes), disk)
    print("| " + " | ".join(_row(result)) + " |", flush=True)
    return result


def _used(place: Path) -> int:
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


HEADINGS = (
    "checkpoint",
    "ranks",
    "source files",
    "apparent TB",
    "parameters × ranks",
    "output files",
    "planning s",
    "whole s",
    "CPU s",
    "largest child MiB",
    "tree MiB",
    "cloned",
    "new disk MB",
)


def _row(r: Result) -> list[str]:
    share = r.report["bytes_cloned"] / r.report["bytes"]
    return [
        r.case.model.name,
        _ranks(r.case.model),
        str(r.source_files),
        f"{r.source_bytes / 1e12:.3f}",
        f"{r.case.fragments:,}",
        f"{r.report['files']:,}",
        f"{r.plan_report['seconds']:.2f}",
        "–" if r.case.plan_only else f"{r.run.wall_seconds:.2f}",
        f"{r.run.cpu_seconds:.1f}",
        f"{r.report['peak_rss_bytes'] / MIB:.0f}",
        f"{r.run.peak_rss_bytes / MIB:.0f}",
        f"{share:.1%}",
        f"{r.disk_bytes / 1e6:.0f}",
    ]


def _ranks(model: sparse.Model) -> str:
    return str(model.dp) if model.tp * model.pp == 1 else f"TP {model.tp} × PP {model.pp} × DP {model.dp}"


def render(results: list[Result]) -> str:
    """The part of the page between the marks."""
    load = os.getloadavg()[1]
    lines = [
        f"Machine: {machine()}; load {load:.1f} (other work ran beside).",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(_row(r)) + " |" for r in results]
    lines.append("")
    for r in results:
        if r.case.seconds:
            peak = r.report["peak_rss_bytes"]
            ok = r.run.wall_seconds <= r.case.seconds and peak <= r.case.rss_bytes
            lines.append(
                f"* {r.case.model.name}{', planning' * r.case.plan_only}, {_ranks(r.case.model)} ranks, "
                f"at most {r.case.seconds:.0f} s and "
                f"{r.case.rss_bytes / MIB:.0f} MiB: {r.run.wall_seconds:.1f} s, {peak / MIB:.0f} MiB "
                f"({'reached' if ok else 'NOT reached'})"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small cases, no report: tries the benchmark")
    parser.add_argument("--aimed", action="store_true", help="only the cases with an aim, no report")
    given = parser.parse_args()
    if not loop.available():
        print("bench.scale needs root and mkfs.xfs (make system-packages): nothing measured")
        return
    cases = TINY if given.tiny else AIMED if given.aimed else [*AIMED, *SERIES]
    results: list[Result] = []
    for case in cases:  # a new file system each: no case inherits the fragments of another
        with loop.mounted(WORK, IMAGE_BYTES) as place, guarded(WORK / "xfs.image"):
            results.append(convert(case, place))
    text = render(results)
    if given.tiny or given.aimed:
        print(text)
        return
    replace_part(text, "scale")


if __name__ == "__main__":
    main()
