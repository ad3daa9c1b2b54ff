"""Blocks marked `console` in the README and in docs/ are run, and what they print is compared.

A page is a scene: its paths `/nvme` and `/mnt/nas` are directories of the test, its `toml` blocks that begin
with `# NAME.toml` are files, and `<!-- scene: save TAG -->` writes a checkpoint (a page without that has one
from the start). In what is expected `…` stands for anything within a line, and alone on a line for any number
of lines. A comment ends a command. `ckptd run` without `--once` stays until the page ends; what make would do
is only looked up.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.synthetic import write_stage12

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("/nvme", "/mnt/nas")
_PART = re.compile(
    r"^```(?P<kind>console|toml)\n(?P<body>.*?)^```$|^<!-- scene: save (?P<tag>\S+) -->$",
    re.MULTILINE | re.DOTALL,
)
_GROUPS = [{"w": (16, 8), "b": (8,)}]
SETTLED_SECONDS = 200.0


@dataclass(frozen=True, slots=True)
class Command:
    """One `$ …` of a block and the lines that are expected after it; None: nothing is said of them."""

    text: str
    expected: tuple[str, ...] | None


def pages() -> list[Path]:
    """Every page with at least one block."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if "\n```console\n" in page.read_text()]


def commands(body: str) -> list[Command]:
    """The commands of a block."""
    found: list[Command] = []
    lines = body.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = re.split(r"\s+#\s", lines[begin][2:], maxsplit=1)[0].strip()
        expected = tuple(line.rstrip() for line in lines[begin + 1 : end] if line.strip())
        found.append(Command(text, expected or None))
    return found


def is_like(expected: str, printed: str) -> bool:
    """Whether a line is what was expected; runs of blanks are one."""
    parts = (re.escape(part) for part in " ".join(expected.split()).split("…"))
    return re.fullmatch(".*".join(parts), " ".join(printed.split())) is not None


def agree(expected: tuple[str, ...], printed: list[str]) -> bool:
    """Whether lines are what was expected, with `…` lines for any number of them."""
    if not expected:
        return not printed
    if expected[0].strip() == "…":
        return any(agree(expected[1:], printed[n:]) for n in range(len(printed) + 1))
    return bool(printed) and is_like(expected[0], printed[0]) and agree(expected[1:], printed[1:])


@dataclass
class Scene:
    """Where a page's commands run."""

    root: Path
    daemons: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.here = self.root / "here"
        for place in (self.here, *(self.at(f"{place}/llama-7b") for place in PLACES)):
            place.mkdir(parents=True, exist_ok=True)

    def at(self, path: str) -> Path:
        """Where a path of the page lies."""
        return self.root / "places" / path.lstrip("/")

    def mapped(self, text: str) -> str:
        """A command or a file with the scene's paths."""
        return re.sub(rf"(?<![\w./-])({'|'.join(PLACES)})(?=[/\s\"']|$)", lambda m: str(self.at(m[1])), text)

    def unmapped(self, text: str) -> str:
        """What was printed, with the page's paths."""
        return text.replace(f"{self.root}/places", "")

    def write(self, body: str) -> None:
        """A `toml` block that has a name."""
        if match := re.match(r"# (\S+\.toml)\b", body):
            text = self.mapped(body).replace("[[remote]]", "[[remote]]\nsame_filesystem = true")
            (self.here / match[1]).write_text(f'settle = "0.2s"\n{text}')

    def save(self, tag: str) -> None:
        """A checkpoint as DeepSpeed writes it, in the only save_dir."""
        save_dir = self.at("/nvme/llama-7b")
        made = self.root / "made"
        write_stage12(made, _GROUPS, 2, step=int(re.sub(r"\D", "", tag)))
        shutil.move(made, save_dir / tag)
        (save_dir / "latest").write_text(tag)

    def run(self, command: Command) -> str | None:
        """Run one command; what is wrong with it, None when nothing is.

        What it is compared with may take a moment to be so: a daemon works meanwhile.
        """
        words = command.text.split()
        if words[0] == "make":
            is_there = re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if is_there else f"there is no target {words[1]}"
        if words[:2] == ["ckptd", "run"] and "--once" not in words:
            self.start(command.text)
            return None
        end = time.monotonic() + SETTLED_SECONDS
        while True:
            done = subprocess.run(
                ["sh", "-c", self.mapped(command.text)],
                cwd=self.here,
                env=self.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            printed = [line.rstrip() for line in self.unmapped(done.stdout).splitlines() if line.strip()]
            if command.expected is None and (done.returncode == 0 or not self.daemons):
                return None if done.returncode == 0 else f"{command.text}: {done.returncode}\n{done.stdout}"
            says_nothing = set(command.expected or ()) == {"…"} and done.returncode != 0
            if command.expected is not None and agree(command.expected, printed) and not says_nothing:
                return None
            if time.monotonic() > end or not self.daemons:
                return f"$ {command.text}\n{self.unmapped(done.stdout)}\nexpected\n{command.expected}"
            time.sleep(0.3)

    def start(self, text: str) -> None:
        """A daemon; back when it publishes."""
        log = self.root / "daemon.log"
        with log.open("a") as out:
            command = ["sh", "-c", f"exec {self.mapped(text)}"]
            process = subprocess.Popen(
                command, cwd=self.here, env=self.environment(), stdout=out, stderr=out, text=True
            )
        self.daemons.append(process)
        end = time.monotonic() + SETTLED_SECONDS
        while "watching" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    def environment(self) -> dict[str, str]:
        """`ckptd` is this source tree's; a wide terminal without colours."""
        tool = self.root / "bin" / "ckptd"
        if not tool.exists():
            tool.parent.mkdir()
            tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptd "$@"\n')
            tool.chmod(0o755)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
        own = {"COLUMNS": "240", "NO_COLOR": "1", "HOME": str(self.here), "PYTHONPATH": str(ROOT)}
        return kept | own | {"PATH": f"{tool.parent}:{os.environ['PATH']}", "LANG": "C.UTF-8"}

    def end(self) -> None:
        """Nothing outlives the page."""
        for process in self.daemons:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


@contextlib.contextmanager
def scene(root: Path) -> Iterator[Scene]:
    """A scene whose daemons end with it."""
    made = Scene(root)
    try:
        yield made
    finally:
        made.end()


def play(page: Path, root: Path) -> list[str]:
    """Run a page from its top; what went wrong."""
    wrong: list[str] = []
    text = page.read_text()
    with scene(root) as here:
        for match in _PART.finditer(text):  # files first: pages show them after their use
            if match["kind"] == "toml":
                here.write(match["body"])
        if "<!-- scene:" not in text:
            here.save("global_step5")
        for match in _PART.finditer(text):
            if match["tag"]:
                here.save(match["tag"])
            elif match["kind"] == "console":
                wrong += [found for command in commands(match["body"]) if (found := here.run(command))]
    return wrong
