"""`ckptd status --watch`: the same answer again and again, until Ctrl-C.

On a terminal one screen that is redrawn, and that stays while the document cannot be read; elsewhere one line
per job and interval, fit for a log.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ckptd.base.humanize import ago, printable
from ckptd.cli.output import cell
from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from collections.abc import Callable


def watch_lines(look: Callable[[], list[str]], interval_seconds: float, *, rounds: int | None = None) -> None:
    """Print what `look` says each interval; a status that cannot be read is a line too."""
    while rounds is None or rounds > 0:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            lines = look()
        except CkptdError as error:
            lines = [f"no status: {error.message}"]
        for line in lines:
            print(printable(f"{at} {line}"), flush=True)
        if rounds is not None:
            rounds -= 1
        time.sleep(interval_seconds if rounds != 0 else 0)


def watch_screen(
    look: Callable[[], Any], interval_seconds: float, console: Any, *, rounds: int | None = None
) -> None:
    """Redraw what `look` gives; while it fails the last good screen stays, with the reason below it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    good: Any = Text("")
    failing_since: float | None = None
    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
        while rounds is None or rounds > 0:
            try:
                good, failing_since = look(), None
                live.update(good, refresh=True)
            except CkptdError as error:
                failing_since = failing_since or time.monotonic()
                span = ago(time.monotonic() - failing_since)
                note = cell(f"not read for {span}: {error.message}", "yellow")
                live.update(Group(good, note), refresh=True)
            if rounds is not None:
                rounds -= 1
            time.sleep(interval_seconds if rounds != 0 else 0)


def quietly(watch: Callable[[], None]) -> None:
    """End a watch at Ctrl-C and at a closed pipe without an error."""
    try:
        watch()
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # what is flushed at exit has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
