"""How long `ckptd status` takes, and what it imports: one job of 100 committed checkpoints on this node.

    make bench-status          (python -m bench.status --runs 20)

A real daemon ships one tiny save under a hundred tags to a local S3 server. Then every way of asking is timed
as a process, from start to exit, with the daemon at rest and once more after SIGKILL. Everything is compiled
to bytecode beforehand, as pip does it when it installs. The parts of a run are what `python -X importtime`
counts for each package's own modules.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import idle
from bench.pictures import replace_part
from bench.report import machine
from tests.stores import servers

AIM_SECONDS, URL_AIM_SECONDS = 0.2, 2.0
REST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way of asking, the seconds of each run, also of CPU time, and milliseconds of imports by package."""

    name: str
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    imports: tuple[tuple[str, float], ...]

    @property
    def row(self) -> str:
        """A line of the table."""
        told = ", ".join(f"{name} {taken:.0f}" for name, taken in self.imports)
        low, high = min(self.seconds), max(self.seconds)
        cpu = f"{median(self.cpu_seconds):.2f}"
        return f"| {self.name} | {median(self.seconds):.2f} ({low:.2f} – {high:.2f}) | {cpu} | {told} |"


def ask(name: str, arguments: list[str], environment: dict[str, str], runs: int) -> Way:
    """Time it.

    Raises:
        SystemExit: the command does not answer.
    """
    taken: list[float] = []
    worked: list[float] = []
    for _ in range(runs + 1):
        began, before = time.monotonic(), _cpu_of_children()
        done = subprocess.run(
            [Path(sys.executable).with_name("ckptd"), "status", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        taken.append(time.monotonic() - began)
        worked.append(_cpu_of_children() - before)
        if done.returncode not in (0, 1, 3) or not done.stdout:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr}")
    # the first one compiles
    return Way(name, tuple(taken[1:]), tuple(worked[1:]), imports(arguments, environment))


def _cpu_of_children() -> float:
    """Of those that have ended; the daemon and the server have not."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def installed(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """An environment in which bytecode is kept, in a folder of its own."""
    kept = {key: value for key, value in environment.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder)}


def imports(arguments: list[str], environment: dict[str, str]) -> tuple[tuple[str, float], ...]:
    """Own milliseconds of the modules of each package, the four dearest; the standard library is one."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckptd", "status", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    found: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        own, _, name = line.removeprefix("import time:").partition("|")
        if line.startswith("import time:") and own.strip().isdigit():
            package = name.partition("|")[2].strip().partition(".")[0]
            found["standard library" if package in sys.stdlib_module_names else package] += int(own)
    return tuple((name, taken / 1000) for name, taken in found.most_common(4))


def measure(root: Path, checkpoints: int, runs: int) -> list[Way]:
    """Ship, rest, ask; then kill, ask again."""
    with servers.moto(root) as server:
        idle.lay_out(root, 1, checkpoints, server.endpoint)
        environment = os.environ | servers.environment(server) | {"CKPTD_CONFIG_DIR": str(root / "etc")}
        environment = installed(environment, root / "bytecode")
        with (root / "log").open("wb") as log:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "ckptd", "run", "--config-dir", str(root / "etc")],
                stdout=log,
                stderr=log,
                env=environment,
            )
        try:
            idle.wait(root, server, daemon, checkpoints)
            time.sleep(REST_SECONDS)
            places = {
                "`ckptd status`": [],
                "`ckptd status NAME`": ["job0"],
                "`ckptd status SAVE_DIR`": [f"{root}/nvme/job0"],
                "`ckptd status NAME TAG`": ["job0", "step7"],
                "`ckptd status --json`": ["--json"],
                "`ckptd status SAVE_DIR --live`": [f"{root}/nvme/job0", "--live"],
            }
            ways = [ask(name, words, environment, runs) for name, words in places.items()]
            url = environment | {"CKPTD_REMOTE_ENDPOINT_URL": server.endpoint}
            place = f"s3://{servers.BUCKET}/job0"
            ways.append(ask("`ckptd status URL` (S3, moto)", [place], url, max(3, runs // 4)))
        finally:
            daemon.kill()
            daemon.wait(30)
        return [*ways, ask("`ckptd status`, daemon killed", [], environment, runs)]


def render(ways: list[Way], checkpoints: int) -> str:
    """The part of the page."""
    here = max(median(w.seconds) for w in ways if "URL" not in w.name)
    there = max(median(w.seconds) for w in ways if "URL" in w.name)
    lines = [
        f"Machine: {machine()}; load {os.getloadavg()[0]:.1f} in the last minute. {checkpoints} checkpoints.",
        "",
        "| command | s, median (least – greatest) | CPU s, median | ms of imports, the dearest |",
        "|---|---|---|---|",
        *(way.row for way in ways),
        "",
        f"* on the node, at most {AIM_SECONDS} s: {here:.2f} ({_word(here, AIM_SECONDS)})",
        f"* of a URL, at most {URL_AIM_SECONDS:.0f} s: {there:.2f} ({_word(there, URL_AIM_SECONDS)})",
    ]
    return "\n".join(lines) + "\n"


def _word(is_: float, aim: float) -> str:
    return "reached" if is_ <= aim else "NOT reached"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--print", action="store_true", dest="is_trial", help="write nothing")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ckptd-status-"))
    try:
        text = render(measure(root, given.checkpoints, given.runs), given.checkpoints)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(text)
    if not given.is_trial:
        replace_part(text, "status")


if __name__ == "__main__":
    main()
