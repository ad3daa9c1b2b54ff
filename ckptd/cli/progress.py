"""Progress of a recovery on a terminal: one bar a step, nothing where stderr is no terminal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere: tells (what, bytes done, bytes total)."""
    import sys

    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    from ckptd.cli.screen import Screen

    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Screen(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield tell


@contextlib.contextmanager
def says_when_stopped() -> Iterator[Callable[[Callable[[], str]], None]]:
    """At Ctrl-C say what lies where and what to type to go on; takes the function that knows the first."""
    import shlex
    import sys

    from ckptd.cli.text import say

    known: list[Callable[[], str]] = []
    try:
        yield known.append
    except KeyboardInterrupt:
        text = known[-1]() if known else "stopped before anything was changed"
        say(f"{text} → to go on: {shlex.join(['ckptd', *sys.argv[1:]])}")
        raise
