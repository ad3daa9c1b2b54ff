"""Beside the unchanged launch file of a trainer: `ckptd run SAVE_DIR URL`, a crash, a resume on other ranks.

    python -m examples.frameworks [NAME ...] [--out DIR] [--install]

For each trainer: ckptd is started, then training; once the first save is committed, training is killed
(SIGKILL); `ckptd resume` names the path for another number of ranks, and training goes on from there until
its next save is committed. Ends with 1 where that fails, or a loss is not what the killed training had.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from examples.frameworks.recipes import (
    ALLOWED_DIFFERENCE,
    HERE,
    OTHER_RANKS,
    RANKS,
    RECIPES,
    SAVE_STEPS,
    STEPS,
    Launch,
    Recipe,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_SECONDS = 600.0
COMPARED_STEPS = 4
"""At least, of those after the newest save."""
BUILD = HERE.parents[1] / ".build"


COLUMNS = (
    "trainer",
    "version",
    "first SAFE after",
    "killed at",
    "resumed from",
    "ended at",
    "largest loss difference",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one trainer came to."""

    name: str
    version: str
    safe_seconds: float
    """From `ckptd run`, before training was started."""
    killed_at: int
    resumed_from: int
    last_step: int
    difference: float

    def cells(self, install_seconds: float) -> tuple[str, ...]:
        """Return the line of the table; `install_seconds`: of ckptd, before all this."""
        return (
            self.name,
            self.version,
            f"{install_seconds + self.safe_seconds:.0f} s",
            f"step {self.killed_at}, {RANKS} ranks",
            f"step {self.resumed_from}, {OTHER_RANKS} rank",
            f"step {self.last_step}",
            f"{self.difference:.4f}",
        )


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows in columns, as Markdown."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


class Training:
    """A launch in the background, with what it prints in a file."""

    def __init__(self, recipe: Recipe, name: str, launch: Launch, log: Path) -> None:
        self.recipe, self.log = recipe, log
        environment = os.environ | {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(log.parent / "hf"),
            "PATH": f"{launch.bin}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                recipe.command(launch),
                cwd=HERE / (recipe.folder or name),
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def losses(self) -> list[float]:
        """Return what was printed so far, a loss a step."""
        return [float(found) for found in self.recipe.loss.findall(self.log.read_text(errors="replace"))]

    def kill(self) -> None:
        """SIGKILL to every process of it, as when a node goes down; those of torchrun are no group."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def fail(self, why: str) -> SystemExit:
        """Return the error that ends the demonstration, with the end of the log."""
        return SystemExit(f"{why}\n{self.log.read_text(errors='replace')[-4000:]}")


class Demonstration:
    """One trainer in a folder of its own."""

    def __init__(self, name: str, work: Path, ckptd: list[str], python: Path) -> None:
        self.name, self.recipe, self.work, self.ckptd = name, RECIPES[name], work, ckptd
        self.bin = python.parent
        self.out = work / "output"
        self.save_dir = self.out / self.recipe.save_dir if self.recipe.save_dir else self.out
        self.remote = work / "remote"
        self.save_dir.mkdir(parents=True)
        self.remote.mkdir()

    def perform(self) -> Row:
        """Train, kill, resume, train on.

        Raises:
            SystemExit: something was not as it should be; the message says what.
        """
        if self.recipe.prepare:
            folder = HERE / (self.recipe.folder or self.name)
            script, place = folder / self.recipe.prepare, self.work / "tiny"
            self._ask([str(self.bin / "python"), str(script), str(place)])
        begun = time.monotonic()
        with self._daemon():
            first = self._train(RANKS, None, "first.log")
            try:
                self._wait_committed(SAVE_STEPS, first)
                safe_seconds = time.monotonic() - begun
                while len(first.losses()) % SAVE_STEPS < COMPARED_STEPS and first.process.poll() is None:
                    time.sleep(0.05)  # so that the resumed training makes some of its steps again
                if len(first.losses()) >= STEPS:
                    raise first.fail("training had ended before its first checkpoint was committed")
            finally:
                first.kill()
            before = first.losses()
            path, start = self._resume()
            second = self._train(OTHER_RANKS, path, "second.log")
            try:
                self._wait_committed(start + SAVE_STEPS, second)
            finally:
                second.kill()
        after = second.losses()
        both = list(zip(before[start:], after, strict=False))
        if not both:
            raise second.fail(f"no step was made twice: killed at {len(before)}, resumed from {start}")
        difference = max(abs(old - new) for old, new in both)
        if difference > ALLOWED_DIFFERENCE:
            raise second.fail(f"losses differ by {difference}: {both}")
        return Row(
            name=self.name,
            version=self._version(),
            safe_seconds=safe_seconds,
            killed_at=len(before),
            resumed_from=start,
            last_step=start + len(after),
            difference=difference,
        )

    def _version(self) -> str:
        code = f"import importlib.metadata as m; print(m.version({self.recipe.package!r}))"
        return self._ask([str(self.bin / "python"), "-c", code]).stdout.strip()

    @contextlib.contextmanager
    def _daemon(self) -> Iterator[None]:
        command = [*self.ckptd, "run", str(self.save_dir), str(self.remote)]
        if os.stat(self.save_dir).st_dev == os.stat(self.remote).st_dev:
            command.append("--same-filesystem")
        print(f"{self.name}: {' '.join(['ckptd', *command[len(self.ckptd) :]])} &", flush=True)
        with (self.work / "ckptd.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def _train(self, ranks: int, resume: Path | None, log: str) -> Training:
        launch = Launch(bin=self.bin, out=self.out, ranks=ranks, port=_free_port(), resume=resume)
        command = self.recipe.command(launch)
        print(f"{self.name}: {' '.join([Path(command[0]).name, *command[1:]])}", flush=True)
        return Training(self.recipe, self.name, launch, self.work / log)

    def _wait_committed(self, step: int, training: Training) -> None:
        """Wait for a step's COMMIT; an end of training before it is an error."""
        asked = [*self.ckptd, "wait", str(self.save_dir), "--step", str(step), "--timeout", "5s"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            has_ended = training.process.poll() not in (None, 0)
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            if has_ended or time.monotonic() > deadline:
                log = (self.work / "ckptd.log").read_text()[-2000:]
                raise training.fail(f"step {step} was not committed: {done.stderr}\n{log}")

    def _resume(self) -> tuple[Path, int]:
        """Return what to load, and its step."""
        command = [*self.ckptd, "resume", str(self.save_dir), "--world-size", str(OTHER_RANKS)]
        print(f"{self.name}: {' '.join(['ckptd', *command[len(self.ckptd) :]])}", flush=True)
        done = self._ask(command)
        found = re.search(r"resume from step (\d+)", done.stderr)
        if found is None:
            raise SystemExit(f"ckptd resume names no step:\n{done.stderr}")
        return Path(done.stdout.strip()), int(found[1])

    def _ask(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return done


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _python_of(recipe: Recipe) -> Path:
    """Return the interpreter that has the trainer."""
    return Path(sys.executable) if recipe.extra is None else BUILD / recipe.extra / "bin" / "python"


def _installed() -> tuple[float, list[str]]:
    """Install ckptd as its users do; return how long it took, and its command."""
    place = BUILD / "ckptd-alone"
    shutil.rmtree(place, ignore_errors=True)
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "-c", str(BUILD.parent / "constraints.txt"), str(BUILD.parent)], check=True)
    seconds = time.monotonic() - begun
    print(f"pip install ckptd: {seconds:.0f} s", flush=True)
    return seconds, [str(place / "bin" / "ckptd")]


def main() -> int:
    """Perform each, print one table."""
    parser = argparse.ArgumentParser(prog="python -m examples.frameworks", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--out", type=Path, help="keep logs and checkpoints there")
    parser.add_argument(
        "--install", action="store_true", help="install ckptd into a new environment first, and count that"
    )
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in RECIPES]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(RECIPES)}")
    rows: list[Row] = []
    install_seconds, ckptd = _installed() if given.install else (0.0, [sys.executable, "-m", "ckptd"])
    failed = False
    for name in given.names or RECIPES:
        with _folder(given.out, name) as work:
            try:
                rows.append(Demonstration(name, work, ckptd, _python_of(RECIPES[name])).perform())
            except SystemExit as error:
                failed = True
                print(f"{name}: FAILED: {error}", flush=True)
    shown = [COLUMNS, *(row.cells(install_seconds) for row in rows)]
    print(f"\n{table(shown)}")
    return int(failed)


@contextlib.contextmanager
def _folder(out: Path | None, name: str) -> Iterator[Path]:
    if out is not None:
        work = out.resolve() / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work
        return
    with tempfile.TemporaryDirectory(prefix=f"ckptd-{name}-") as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    sys.exit(main())
