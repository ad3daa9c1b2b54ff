"""Two trees of ckptd, measured in turns on this machine: what a change of the code costs.

    python -m bench.paired OTHER_TREE [--runs 5] [--layers 4] [--work DIR]

OTHER_TREE is a checkout of another commit (`git worktree add DIR COMMIT`), run by this interpreter. Each
measure is taken of one tree and then of the other, again and again: converting a ZeRO-2 checkpoint of
0.2 GB a layer on this file system and, as root, on XFS with reflinks; uploading it to a directory, from the
start of `run --once` to its end; restoring it from there; `ckptd status` of that job; the resident memory of
a daemon and its children at rest. The table says the ratio of this tree to the other: median and spread.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from bench import loop, saves
from bench.measure import make_cold, measure
from tests.support.real import REPOSITORY

RANKS = 2
XFS_BYTES = 24 << 30
REST_SECONDS = 12.0
JOB = """
save_dir = "{save_dir}"
settle = "1s"
[local]
forms = []
[[remote]]
name = "nas"
url = "{nas}"
forms = ["zero"]
same_filesystem = true
"""


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout, and what a command of it needs."""

    root: Path

    def command(self, *words: str) -> list[str]:
        """`ckptd WORDS` of this tree."""
        return [sys.executable, "-m", "ckptd", *words]

    @property
    def environment(self) -> dict[str, str]:
        """Its package before the installed one; state and configuration of nobody else."""
        return os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": ""}


@dataclass(slots=True)
class Measured:
    """Seconds, or bytes, of each run: this tree's and the other's."""

    name: str
    unit: str
    here: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    @property
    def row(self) -> str:
        """A line of the table."""
        ratios = sorted(a / b for a, b in zip(self.here, self.other, strict=True))
        spread = f"{ratios[0]:.2f} – {ratios[-1]:.2f}"
        both = f"{median(self.other):.3g} | {median(self.here):.3g}"
        return f"| {self.name} ({self.unit}) | {both} | {median(ratios):.3f} | {spread} |"


def in_turns(
    name: str, unit: str, runs: int, trees: tuple[Tree, Tree], run: Callable[[Tree], float]
) -> Measured:
    """Measure both trees `runs` times after one run of each; which goes first changes from pair to pair."""
    found = Measured(name, unit)
    for number in range(-1, runs):
        order = trees if number % 2 else trees[::-1]
        taken = {tree.root: run(tree) for tree in order}
        if number >= 0:
            found.here.append(taken[trees[0].root])
            found.other.append(taken[trees[1].root])
    print(found.row, flush=True)
    return found


def convert_seconds(tree: Tree, source: Path, work: Path) -> float:
    """Convert a cold source; the flush of the output counts."""
    make_cold([path for path in source.rglob("*") if path.is_file()])
    out = work / "out"
    try:
        command = tree.command("convert", str(source), str(out))
        return measure(command, cwd=work, env=tree.environment, flush=work).wall_seconds
    finally:
        shutil.rmtree(out, ignore_errors=True)


@contextlib.contextmanager
def job(source: Path, work: Path) -> Iterator[Path]:
    """A job file over a save_dir of its own that holds the checkpoint, with an empty remote."""
    with tempfile.TemporaryDirectory(dir=work, prefix="job-") as root:
        save_dir, nas = Path(root, "nvme", "run"), Path(root, "nas")
        save_dir.mkdir(parents=True)
        nas.mkdir()
        shutil.copytree(source, save_dir / source.name, copy_function=os.link)
        (save_dir / "latest").write_text(source.name)
        file = Path(root, "run.toml")
        file.write_text(JOB.format(save_dir=save_dir, nas=nas))
        yield file


def upload(tree: Tree, file: Path, work: Path) -> float:
    """Run the job once, until its checkpoint is committed."""
    command = tree.command("run", "--job", str(file), "--once")
    return measure(command, cwd=work, env=tree.environment, flush=work).wall_seconds


def restore_seconds(tree: Tree, nas: Path, work: Path) -> float:
    """Restore the newest from the remote alone."""
    out = work / "restored"
    try:
        command = tree.command("restore", str(nas), "--to", str(out))
        return measure(command, cwd=work, env=tree.environment, flush=work).wall_seconds
    finally:
        shutil.rmtree(out, ignore_errors=True)


def status_seconds(tree: Tree, file: Path) -> float:
    """Median of ten; what it says does not matter."""
    taken = []
    for _ in range(10):
        began = time.monotonic()
        command = tree.command("status", str(file))
        subprocess.run(command, cwd=file.parent, env=tree.environment, capture_output=True, check=False)
        taken.append(time.monotonic() - began)
    return median(taken)


def idle_bytes(tree: Tree, file: Path) -> float:
    """Resident sets of a daemon and its children that have nothing to do."""
    daemon = subprocess.Popen(
        tree.command("run", "--job", str(file)),
        cwd=file.parent,
        env=tree.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(REST_SECONDS)
        process = psutil.Process(daemon.pid)
        family = [process, *process.children(recursive=True)]
        return float(sum(one.memory_info().rss for one in family))
    finally:
        daemon.terminate()
        daemon.wait(60)


def main(arguments: list[str]) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.paired", description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="4: 0.8 GB, where what a start costs counts")
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".build" / "bench-paired")
    chosen = parser.parse_args(arguments)
    trees = Tree(REPOSITORY), Tree(chosen.other.resolve())
    source = saves.shards(f"paired-{chosen.layers}", chosen.layers, RANKS).folder
    chosen.work.mkdir(parents=True, exist_ok=True)
    work, runs = chosen.work, chosen.runs
    print("| measure | other | this | this ÷ other | spread |\n|---|---|---|---|---|")
    in_turns("convert, here", "s", runs, trees, lambda tree: convert_seconds(tree, source, work))
    if loop.available():
        with loop.mounted(work, XFS_BYTES) as place:
            copy = Path(shutil.copytree(source, place / source.name))
            in_turns("convert, XFS", "s", runs, trees, lambda tree: convert_seconds(tree, copy, place))

    def upload_seconds(tree: Tree) -> float:
        with job(source, work) as file:
            return upload(tree, file, work)

    in_turns("upload to COMMIT", "s", runs, trees, upload_seconds)
    with contextlib.ExitStack() as stack:
        files = {tree.root: stack.enter_context(job(source, work)) for tree in trees}
        for tree in trees:
            upload(tree, files[tree.root], work)
        in_turns(
            "restore",
            "s",
            runs,
            trees,
            lambda tree: restore_seconds(tree, files[tree.root].parent / "nas", work),
        )
        in_turns("status", "s", runs, trees, lambda tree: status_seconds(tree, files[tree.root]))
        in_turns("idle memory", "bytes", runs, trees, lambda tree: idle_bytes(tree, files[tree.root]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
