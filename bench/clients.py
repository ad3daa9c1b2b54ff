"""`python -m bench.clients`: the S3 store over botocore and over s3fs, in turns; writes docs/performance.md.

Against a null S3 server, so that what is measured is the client. Each round runs both, and who begins
changes; a ratio is that of the two runs of one round. CPU is that of ckptd and its child, or of the restore.
`--tiny` tries the benchmark itself and writes nothing.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from statistics import median

from bench import transfer_runs as runs
from bench.pictures import replace_part
from bench.report import machine
from bench.saves import CACHE
from bench.transfer import Case, Series, run, sizes, ways

TOOLS = ("ckptd", runs.BY_S3FS)
HEAD = (
    "| | botocore | s3fs | s3fs / botocore, round by round |",
    "|---|---|---|---|",
)
MEASURES = (("cpu_seconds", "CPU s", 1.0), ("wall_seconds", "wall s", 1.0), ("peak_rss_bytes", "MiB", 2**20))


def _spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def _rows(case: str, botocore: Series, s3fs: Series) -> list[str]:
    """One row a measure; of rounds in which both ended."""
    found = []
    for field, unit, scale in MEASURES:
        digits = 0 if unit == "MiB" else 2
        one, other = ([getattr(s, field) / scale for s in series.samples] for series in (botocore, s3fs))
        ratios = [b / a for a, b in zip(one, other, strict=False)]
        what = "peak of all processes, MiB" if unit == "MiB" else unit
        row = f"| {case}: {what} | {_spread(one, digits)} | {_spread(other, digits)} | {_spread(ratios, 2)} |"
        found.append(row)
    return found


def main() -> None:
    """Run the cases and write their part of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    it, rounds = sizes(is_tiny=given.tiny), 1 if given.tiny else given.rounds
    lines, loads = list(HEAD), [os.getloadavg()[0]]
    with ways() as running:
        near = running.near
        cases = [
            Case("up, 1 GB", it.one, {t: partial(runs.up, t, it.one, near) for t in TOOLS}, rounds),
            Case(
                "up, 3,000 files of 16 KiB",
                it.small,
                {t: partial(runs.up, t, it.small, near) for t in TOOLS},
                rounds,
            ),
            Case(
                "down, 1 GB (`restore`)",
                it.one,
                {t: partial(runs.down, t, it.one, near) for t in TOOLS},
                rounds,
                partial(runs.up, "ckptd", it.one, near),
            ),
        ]
        for case in cases:
            botocore, s3fs = run(case)
            if botocore.failed or s3fs.failed:
                raise SystemExit(f"{case.name}: {botocore.failed or s3fs.failed}")
            lines += _rows(case.name, botocore, s3fs)
            loads.append(os.getloadavg()[0])
    load = f"load {min(loads):.0f} to {max(loads):.0f}"
    text = (
        "\n".join([f"Machine: {machine()}; {rounds} rounds; {load} (other work ran beside).", "", *lines])
        + "\n"
    )
    print(text)
    if not given.tiny:
        replace_part(text, "clients")


if __name__ == "__main__":
    main()
