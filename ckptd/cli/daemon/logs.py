"""`ckptd logs JOB`: what the daemon logged of a job, from the journal or from the file that it keeps."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from typing import TYPE_CHECKING

import typer

from ckptd.base.humanize import printable
from ckptd.cli.completion import complete_job
from ckptd.cli.output import ENV_JOB, JOB_HERE_HELP, print_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

POLL_SECONDS = 0.5
_OTHERS = 10
"""Lines of the journal that are read for each one shown: a service has several jobs."""

_HELP = (
    "Show what the daemon logged of a job. Of a service from the journal; else from daemon.log in the "
    "state directory, which keeps the last one or two MiB."
)


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("logs", help=_HELP, epilog="ckptd logs llama-7b\nckptd logs llama-7b -f")
    def logs(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB, help=JOB_HERE_HELP
        ),
        follow: bool = typer.Option(False, "-f", "--follow", help="Go on with what is logged, until Ctrl-C."),
        lines: int = typer.Option(100, "-n", "--lines", min=0, metavar="N", help="The last so many."),
        state_dir: str = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from pathlib import Path

        from ckptd.maintenance.status.published import is_meant, published
        from ckptd.storage.local.job_names import must_be_of_this_node

        must_be_of_this_node(job, "logs")
        places = [Path(place) if place else None for place in (state_dir, config_dir)]
        found = published(job, *places)[0]
        meant = [one.name for one in found.status.jobs if is_meant(one, job, places[1])]
        name, start = meant[0] if meant else job, found.status.daemon.start_command
        if start.startswith("systemctl "):
            _show_journal(start.split(), name, lines, follow=follow)
        else:
            _show_file(found.place, name, lines, follow=follow)


# --- a service: the journal ------------------------------------------------------------------------------


def _show_journal(start: list[str], job: str, lines: int, *, follow: bool) -> None:
    """Show the lines of a job; `start`: the command that starts its unit.

    Raises:
        NotFoundError: there is no journalctl. StorageError: it failed.
    """
    from ckptd.errors import NotFoundError, StorageError

    own = ["--user"] if "--user" in start else []
    read = ["journalctl", *own, "-u", start[-1], "-o", "cat", "--no-pager"]
    try:
        done = subprocess.run(
            [*read, "-n", str(lines * _OTHERS)], capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError as error:
        raise NotFoundError(
            "journalctl is not here", hint="ask on the node itself, not in a container"
        ) from error
    if done.returncode:
        raise StorageError(f"the journal cannot be read: {done.stderr.strip()}", hint=shlex.join(read))
    shown = [text for line in done.stdout.splitlines() if (text := line_of(line, job))]
    for text in shown[len(shown) - lines :] if lines else ():
        print_line(text)
    if not follow:
        return
    with subprocess.Popen(
        [*read, "-n", "0", "-f"], stdout=subprocess.PIPE, text=True, errors="replace"
    ) as more:
        assert more.stdout is not None
        for line in more.stdout:
            if text := line_of(line.rstrip("\n"), job):
                print(printable(text), flush=True)


def line_of(line: str, job: str) -> str:
    """Return a line of the journal as text; empty: it is of another job."""
    try:
        found = json.loads(line)
    except ValueError:
        return printable(line)
    if not isinstance(found, dict) or "text" not in found:
        return printable(line)
    if found.get("job") not in (None, job):
        return ""
    of = f" [{found['job']}]" if found.get("job") else ""
    text = f"{found.get('at')} {str(found.get('level')).upper()} {found.get('logger')}{of}: {found['text']}"
    return printable(text)


# --- by hand: the file in the state directory ------------------------------------------------------------


def _show_file(place: Path, job: str, lines: int, *, follow: bool) -> None:
    """Show the end of the file.

    Raises:
        NotFoundError: the daemon has kept none.
    """
    from ckptd.errors import NotFoundError
    from ckptd.observe.logs import LOG, OLD_LOG

    kept = [*_read(place, OLD_LOG, 0)[0], *_read(place, LOG, 0)[0]]
    if not kept and not follow:
        msg = f"there is no log of job {job} in {place}"
        hint = "it begins with the first checkpoint; until then the daemon says all on its stderr"
        raise NotFoundError(msg, hint=hint)
    for line in kept[len(kept) - lines :] if lines and len(kept) > lines else kept if lines else ():
        print_line(line)
    at, inode = _end_of(place, LOG)
    while follow:
        time.sleep(POLL_SECONDS)
        size, now = _end_of(place, LOG)
        if now != inode:
            # it was full: the rest of it has another name, and a new one has begun
            _print(_read(place, OLD_LOG, at)[0])
            at, inode = 0, now
        if size > at:
            found, at = _read(place, LOG, at)
            _print(found)


def _print(lines: list[str]) -> None:
    for line in lines:
        print(printable(line), flush=True)


def _end_of(place: Path, name: str) -> tuple[int, int]:
    """Return size and inode; zeros where there is no such file."""
    try:
        status = os.lstat(place / name)
    except OSError:
        return 0, 0
    return status.st_size, status.st_ino


def _read(place: Path, name: str, at: int) -> tuple[list[str], int]:
    """Return the whole lines after `at`, and where they end; a link is not followed."""
    from ckptd.base import files
    from ckptd.errors import CkptdError

    try:
        with files.opened_dir(place) as folder:
            data = files.read_beneath(folder, name)[at:]
    except (OSError, CkptdError):
        return [], at
    whole: Iterator[bytes] = iter(data.split(b"\n")[:-1])
    end = at + data.rfind(b"\n") + 1
    return [line.decode("utf-8", "replace") for line in whole], end
