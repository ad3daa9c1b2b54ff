"""`python -m tests.releases [--minutes M] [--jobs 2] [RELEASE …]`: install and measure each release.

The table is docs/releases.md.

What is done stays in `.build/releases/<version>/results.json`, so a run that was cut goes on; `--anew` starts
over, `--table` writes the table of what is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.releases import table
from tests.releases.cases import RELEASES, Release
from tests.support.real import REPOSITORY

PLACE = REPOSITORY / ".build" / "releases"
SHIMS = Path(__file__).with_name("hook")


def install(release: Release, folder: Path) -> None:
    """Install a release and the packages of its time, without their dependencies, once.

    Raises:
        CalledProcessError: the package index does not have it.
    """
    if (folder / "installed").exists():
        return
    shutil.rmtree(folder / "packages", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    named = [f"deepspeed=={release.version}", *release.requirements]
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    subprocess.run([*command, "--target", str(folder / "packages"), *named], env=environment, check=True)
    (folder / "installed").touch()


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment in which an installed release comes before the one of this environment."""
    path = (SHIMS, folder / "packages", REPOSITORY)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "CKPTD_TESTS_BUILD": str(folder / "saves"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def measure(release: Release, deadline: float, arguments: list[str]) -> str:
    """Install and measure a release, at most until `deadline` (monotonic seconds); return how it went."""
    folder = PLACE / release.version
    folder.mkdir(parents=True, exist_ok=True)
    left = deadline - time.monotonic()
    if left <= 0:
        return "left for the next run"
    install(release, folder)
    command = [sys.executable, "-m", "tests.releases.measure", str(folder / "results.json"), *arguments]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment_of(folder),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = child.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return "cut by --minutes; what was done is kept"
    return "measured" if code == 0 else f"failed ({code}): see {folder / 'log'}"


def main() -> int:
    """Measure; 1 if a release failed, or the table holds a fault of ckptd's."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases")
    parser.add_argument("releases", nargs="*", help="versions; default: all of cases.RELEASES")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kills", type=int, default=6, help="groups of savers, for each release")
    parser.add_argument("--anew", action="store_true", help="forget what was measured")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    given = parser.parse_args()
    chosen = [r for r in RELEASES if not given.releases or r.version in given.releases]
    deadline = time.monotonic() + 60 * given.minutes
    failed = threading.Event()

    def one(release: Release) -> None:
        if given.anew:
            (PLACE / release.version / "results.json").unlink(missing_ok=True)
        said = measure(release, deadline, ["--kills", str(given.kills)])
        print(f"{release.version}: {said}", flush=True)
        if said.startswith("failed"):
            failed.set()

    if not given.table:
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(one, chosen))
    faults = table.write({r.version: PLACE / r.version / "results.json" for r in RELEASES})
    print(*faults, sep="\n")
    return 1 if failed.is_set() or faults else 0


if __name__ == "__main__":
    sys.exit(main())
