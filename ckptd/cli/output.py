"""Escape text that came from a remote or a file for a terminal: no control character passes (P15).

Everything written to a terminal passes through here: a cell or a line that is shown as it is, or `Screen`.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from ckptd.base.humanize import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.text import Text


def cell(text: str, style: str = "") -> Text:
    """Make a table's cell, title or line that shows `text` as it is: brackets in a path are no markup."""
    from rich.text import Text

    return Text(printable(text), style=style)


def cells(*texts: str) -> list[Text]:
    """Make a row of cells."""
    return [cell(text) for text in texts]


def print_line(line: str) -> None:
    """Print one line on stdout."""
    print(printable(line))


def print_note(line: str) -> None:
    """Print one line on stderr."""
    print(f"ckptd: {printable(line)}", file=sys.stderr, flush=True)


def print_answer(path: str) -> None:
    """Print a result for scripts on stdout, byte for byte; on a terminal control characters are escaped."""
    print(printable(path) if sys.stdout.isatty() else path, flush=True)


__all__ = [
    "ENV_JOB",
    "ENV_JOB_OR_URL",
    "JOB_HELP",
    "JOB_HERE_HELP",
    "cell",
    "cells",
    "print_answer",
    "print_line",
    "print_note",
    "printable",
]

ENV_JOB = ["CKPTD_JOB", "CKPTD_SAVE_DIR"]
"""Environment variables that name the job if the command line does not (docs/contract.md)."""
JOB_HELP = "A job file, a job's name, its SAVE_DIR or the URL of its remote."
"""Describe JOB, in the help of every verb."""
JOB_HERE_HELP = f"{JOB_HELP} No URL: a job of this node."
"""Describe JOB in the help of a verb that needs more than a remote."""
ENV_JOB_OR_URL = [*ENV_JOB, "CKPTD_URL"]
"""Environment variables that name the job, or a remote where that is enough."""


# --- Progress of a recovery on a terminal: one bar a step, nothing where stderr is no terminal -----------


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a bar on a terminal, nothing elsewhere; call it with (what, bytes done, bytes total)."""
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
def reports_when_stopped() -> Iterator[Callable[[Callable[[], str]], None]]:
    """Print at Ctrl-C or SIGTERM what lies where and what to type to go on; yields a setter for the function
    that tells the first."""
    import shlex
    import sys

    from ckptd.base.process import stopped_by_sigterm

    known: list[Callable[[], str]] = []
    try:
        with stopped_by_sigterm():
            yield known.append
    except KeyboardInterrupt:
        text = known[-1]() if known else "stopped before anything was changed"
        print_note(f"{text} → to go on: {shlex.join(['ckptd', *sys.argv[1:]])}")
        raise
