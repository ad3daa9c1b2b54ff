"""What `python -m examples.demo` does before anything runs: packages, directory, numbers of ranks.

Separate from the command, which only parses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ckptd.errors import NotFoundError, TargetExists, UsageError
from examples.demo.remotes import DIRECTORY, KINDS, S3, open_remote
from examples.demo.scene import FULL, SHORT, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED = ("torch", "deepspeed", "matplotlib", "ninja")
NEEDED_FOR_S3 = ("moto", "flask")
COLUMNS = 132
"""Width of tables when there is no terminal to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command's options; `resume_world_size` 0 = choose."""

    stage: int
    world_size: int
    resume_world_size: int
    keep: Path | None
    out: Path
    convert_only: bool
    remote: str = DIRECTORY
    short: bool = False


def start(request: Request) -> None:
    """Run the quickstart that was asked for.

    Raises:
        NotFoundError: a package of the extra `demo` is missing.
        TargetExists: `--keep DIR` is not empty.
        UsageError: a number of ranks that does not divide the batch, an unknown kind of remote.
        QuickstartFailed: a promise did not hold.
    """
    if request.remote not in KINDS:
        msg = f"--remote {request.remote!r} is neither {' nor '.join(KINDS)}"
        raise UsageError(msg, hint="the quickstart brings its own directory or S3 server")
    _check_packages(NEEDED + (NEEDED_FOR_S3 if request.remote == S3 else ()))
    resume_ranks = request.resume_world_size or _other_ranks(request.world_size)
    for ranks in (request.world_size, resume_ranks):
        if ranks & (ranks - 1):
            msg = f"{ranks} ranks do not divide the batch of 16"
            raise UsageError(msg, hint="use 1, 2, 4 or 8 (2, 4 or 8 for the first training)")
    # brackets in the user's own paths are no markup
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, highlight=False, width=COLUMNS)
    with _directory(request.keep) as root:
        if request.convert_only:
            from examples.demo.convert_only import convert_only

            convert_only(
                root, request.out, stage=request.stage, world_size=request.world_size, console=console
            )
        else:
            _play(request, root, resume_ranks, console)
    if request.keep is not None:
        console.print(f"kept: {request.keep}", soft_wrap=True)
        if not request.convert_only:
            console.print(f"judge again: python -m examples.demo.judge {request.keep}", soft_wrap=True)


def _play(request: Request, root: Path, resume_ranks: int, console: Console) -> None:
    from examples.demo.full import quickstart

    script = SHORT if request.short else FULL
    with open_remote(request.remote, root) as remote:
        scene = Scene(root, request.stage, request.world_size, resume_ranks, remote, script)
        try:
            quickstart(scene, request.out, console)
        finally:
            if request.keep is not None:
                with contextlib.suppress(OSError):  # its server may be what failed
                    remote.keep(root)


def _other_ranks(world_size: int) -> int:
    more = world_size * 2
    return more if len(os.sched_getaffinity(0)) >= more <= 8 else world_size // 2


def _check_packages(needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        msg = f"the quickstart trains for real and needs {', '.join(missing)}"
        raise NotFoundError(msg, hint="pip install 'ckptd[demo]', or `make run` in a checkout")


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ckptd-quickstart-", ignore_cleanup_errors=True) as name:
            yield Path(name).resolve()
        return
    if keep.exists() and any(keep.iterdir()):
        msg = f"{keep} is not empty"
        raise TargetExists(msg)
    keep.mkdir(parents=True, exist_ok=True)
    yield keep
