"""What an idle daemon costs: 10 jobs × 100 committed checkpoints, memory of each process, CPU over a minute.

    make bench-idle            (or one of its rows: python -m bench.idle --remote s3 --jobs 1)

The checkpoints are one real, tiny ZeRO-2 save under a hundred tags. Memory is the resident set of the daemon
and of each of its children; CPU is the kernel's account of all of them over five windows. Without arguments
both kinds of remote are measured and docs/performance.md gets the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from bench.pictures import replace_part
from bench.report import machine
from ckptd.daemon.idle import REST_AFTER_SECONDS
from tests.stores import servers
from tests.support.real import Recipe, prepare, save_dir_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = Recipe(stage=2, world_size=2, hidden=16, layers=1, heads=2, save_at=(1,))
WINDOWS = 5
HEAD = (
    "| remotes | jobs × checkpoints | daemon MB | children MB | CPU of one core, median (least – most) |\n"
    "|---|---|---|---|---|"
)
SETTLE_SECONDS = REST_AFTER_SECONDS + 60.0
"""Until the daemon calls itself at rest."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Resident MB of the daemon and of its children; CPU seconds of all per second, for each window."""

    daemon_mb: float
    children_mb: list[float]
    cpu_shares: list[float]


def lay_out(root: Path, jobs: int, checkpoints: int, endpoint: str | None) -> None:
    """Save_dirs full of checkpoints, and a job file for each."""
    prepare([RECIPE])
    source = save_dir_of(RECIPE) / "global_step1"
    (root / "etc" / "jobs.d").mkdir(parents=True)
    (root / "nas").mkdir()
    (root / "etc" / "ckptd.toml").write_text(f'state_dir = "{root}/state"\n')
    for job in range(jobs):
        save_dir = root / "nvme" / f"job{job}"
        for number in range(checkpoints):
            shutil.copytree(source, save_dir / f"step{number + 1}")
        place = f'url = "{root}/nas/job{job}"\nsame_filesystem = true'
        if endpoint:
            place = f'url = "s3://{servers.BUCKET}/job{job}"\nendpoint_url = "{endpoint}"'
        (root / "etc" / "jobs.d" / f"job{job}.toml").write_text(
            f'save_dir = "{save_dir}"\nexisting = "all"\nsettle = "1s"\n[local]\nforms = []\n'
            f'[[remote]]\nname = "remote"\n{place}\nforms = ["zero"]\n'
        )


def committed(root: Path, server: servers.Server | None) -> int:
    """COMMITs in all remotes."""
    if server is None:
        return sum(1 for _ in root.glob("nas/*/_ckptd/commits/*.json"))
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=servers.BUCKET)
    return sum("/_ckptd/commits/" in e["Key"] for page in pages for e in page.get("Contents", ()))


def measure(process: psutil.Process, seconds: float) -> Cost:
    """Over a window in which nothing happens."""
    shares = []
    for _ in range(WINDOWS):
        before, began = _cpu_seconds(process), time.monotonic()
        time.sleep(seconds / WINDOWS)
        shares.append((_cpu_seconds(process) - before) / (time.monotonic() - began))
    children = process.children(recursive=True)
    return Cost(
        daemon_mb=process.memory_info().rss / 1e6,
        children_mb=sorted(child.memory_info().rss / 1e6 for child in children),
        cpu_shares=shares,
    )


def _cpu_seconds(process: psutil.Process) -> float:
    """Of the daemon, its children, and those that have ended meanwhile."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
            if one.pid == process.pid:
                total += times.children_user + times.children_system
    return total


@contextlib.contextmanager
def s3(root: Path, *, wanted: bool) -> Iterator[servers.Server | None]:
    """A local S3 server, or none."""
    if not wanted:
        yield None
        return
    with servers.moto(root) as server:
        yield server


def run(jobs: int, checkpoints: int, remote: str, seconds: float) -> Cost:
    """Lay out, let everything be committed, rest, measure."""
    root = Path(tempfile.mkdtemp(prefix="ckptd-idle-"))
    try:
        with s3(root, wanted=remote == "s3") as server:
            lay_out(root, jobs, checkpoints, server.endpoint if server else None)
            log = (root / "log").open("wb")
            daemon = subprocess.Popen(
                [sys.executable, "-m", "ckptd", "run", "--config-dir", str(root / "etc")],
                stdout=log,
                stderr=log,
                env=os.environ | servers.environment(server),
            )
            try:
                wait(root, server, daemon, jobs * checkpoints)
                time.sleep(SETTLE_SECONDS)
                return measure(psutil.Process(daemon.pid), seconds)
            finally:
                daemon.terminate()
                daemon.wait(30)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def wait(root: Path, server: servers.Server | None, daemon: subprocess.Popen[bytes], wanted: int) -> None:
    """Until so many are committed."""
    end = time.monotonic() + 900
    while (found := committed(root, server)) < wanted:
        if daemon.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{found} of {wanted} committed\n{(root / 'log').read_text()[-2000:]}")
        print(f"\r{found} of {wanted} committed", end="", flush=True)
        time.sleep(2)
    print()


def row(remote: str, jobs: int, checkpoints: int, cost: Cost) -> str:
    """One line of the table."""
    children = f"{cost.children_mb[0]:.0f} – {cost.children_mb[-1]:.0f}" if cost.children_mb else "none"
    cpu = f"{median(cost.cpu_shares):.2%} ({min(cost.cpu_shares):.2%} – {max(cost.cpu_shares):.2%})"
    return f"| {remote} | {jobs} × {checkpoints} | {cost.daemon_mb:.0f} | {children} | {cpu} |"


def verdicts(directory: Cost, s3: Cost) -> list[str]:
    """What was aimed at, and whether it is reached."""
    aims = [
        ("daemon with directory remotes at most 80 MB", directory.daemon_mb, 80.0),
        ("a directory's child at most 45 MB", max(directory.children_mb), 45.0),
        ("CPU at most 0.5 % of one core", 100 * median(directory.cpu_shares), 0.5),
        ("daemon and child with S3 at most 110 MB", s3.daemon_mb + sum(s3.children_mb), 110.0),
    ]
    return [f"* {text}: {is_:.3g} ({'reached' if is_ <= aim else 'NOT reached'})" for text, is_, aim in aims]


def main() -> None:
    """Measure one row, or all and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--remote", choices=["directory", "s3"])
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args()
    if given.remote:
        jobs = given.jobs or 10
        cost = run(jobs, given.checkpoints, given.remote, given.seconds)
        print(f"{HEAD}\n{row(given.remote, jobs, given.checkpoints, cost)}")
        return
    directory = run(10, given.checkpoints, "directory", given.seconds)
    s3 = run(1, given.checkpoints, "s3", given.seconds / 2)
    lines = [HEAD, row("directory", 10, given.checkpoints, directory), row("S3", 1, given.checkpoints, s3)]
    text = "\n".join([f"Machine: {machine()}", "", *lines, "", *verdicts(directory, s3)])
    print(text)
    replace_part(text, "idle")


if __name__ == "__main__":
    main()
