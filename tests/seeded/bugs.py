"""A seeded defect: a patch with a header that says which promise it breaks, what is lost, and who finds it.

It lives in `NN-name.patch` beside this; `python -m tests.seeded` applies each to a copy of the tree.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 240.0
_COPIED = ("ckptd", "tests", "bench", "config", "systemd", "docs", "examples")
_FILES = (
    *("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("Makefile", "constraints.txt", "mkdocs.yml", "LICENSE"),
)
_HEADER = re.compile(r"^(Promise|Lost|Tests|Reason): (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """`tests`: arguments of pytest; `reason`: what the failing test says."""

    number: str
    name: str
    patch: Path
    promise: str
    lost: str
    tests: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether the named tests failed for the reason meant; `words`: what they said otherwise."""

    bug: Bug
    is_caught: bool
    seconds: float
    words: str


def bugs() -> tuple[Bug, ...]:
    """All of them, in order."""
    paths = sorted(HERE.glob("[0-9]*-*.patch"), key=lambda path: int(path.name.partition("-")[0]))
    return tuple(_read(path) for path in paths)


def _read(path: Path) -> Bug:
    head = dict(_HEADER.findall(path.read_text()))
    number, _, name = path.stem.partition("-")
    return Bug(
        number=number,
        name=name,
        patch=path,
        promise=head["Promise"],
        lost=head["Lost"],
        tests=head["Tests"],
        reason=head["Reason"],
    )


def applies(patches: list[Path], root: Path = ROOT) -> str:
    """What git says of patches that do not apply to `root`, each by itself; "" when all do."""
    said = []
    for patch in patches:
        done = _git_apply(patch, root, "--check")
        if done.returncode:
            said.append(f"{patch.name}: {done.stderr.strip()}")
    return "\n".join(said)


def _git_apply(patch: Path, root: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "apply", "-p1", *more, str(patch)]
    # outside of any repository, so that paths are those below `root`
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_DIR": "/dev/null"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def copy_tree(target: Path) -> None:
    """What tests need of the tree; real checkpoints are shared."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy2(ROOT / name, target / name)
    (ROOT / ".build").mkdir(exist_ok=True)
    (target / ".build").symlink_to(ROOT / ".build")


def pytest(tree: Path, arguments: str, seconds: float = LIMIT_SECONDS) -> tuple[int, str]:
    """(exit status, output) of pytest in a copy; 124: it took too long."""
    import shlex

    with tempfile.TemporaryDirectory(dir=tree.parent, ignore_cleanup_errors=True) as own:
        # else pytest removes at its end what all runs of this machine left, which may take minutes
        options = ["-q", "-x", "-p", "no:cacheprovider", "--basetemp", f"{own}/t"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *shlex.split(arguments)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return 124, output
        return process.returncode, output


def try_bug(bug: Bug, place: Path) -> Outcome:
    """Apply, run its tests, judge."""
    started = time.monotonic()
    tree = place / f"{bug.number}-{bug.name}"
    tree.mkdir()
    try:
        copy_tree(tree)
        applied = _git_apply(bug.patch, tree)
        if applied.returncode:
            return Outcome(bug=bug, is_caught=False, seconds=0.0, words=f"does not apply: {applied.stderr}")
        status, output = pytest(tree, bug.tests)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    failed = status == 1 and "failed" in output.splitlines()[-1]
    is_caught = failed and re.search(bug.reason, output) is not None
    words = "" if is_caught else f"exit {status}; " + " / ".join(output.strip().splitlines()[-6:])
    return Outcome(bug=bug, is_caught=is_caught, seconds=time.monotonic() - started, words=words)
