"""`ckptd reload`: let the running daemon read its configuration again, and say what it made of it (P16)."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.daemon.request import daemon_pid, wait_until
from ckptd.cli.output import ENV_JOB, JOB_HERE_HELP, print_line, print_note
from ckptd.errors import BehindError, ConfigError, NotFoundError, NotPermitted
from ckptd.storage.local.job_names import must_be_of_this_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.observe.status import Status

WAIT_SECONDS = 30.0


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "reload",
        help="Let the running daemon read its configuration again. A job file that is wrong is named and "
        "left out; what runs goes on as it was.",
        epilog="ckptd reload llama-7b\nckptd reload llama-7b --dry-run",
    )
    def reload(
        job: str | None = typer.Argument(
            None,
            metavar="JOB",
            autocompletion=complete_job,
            envvar=ENV_JOB,
            help=f"{JOB_HERE_HELP} Default: every configured job.",
        ),
        dry_run: bool = typer.Option(
            False, "--dry-run", help="Only say what retention would then delete and keep."
        ),
        state_dir: str | None = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str | None = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from ckptd.maintenance.status.published import find_status

        must_be_of_this_node(job, "reload")

        places = tuple(Path(place) if place else None for place in (state_dir, config_dir))
        if dry_run:
            from ckptd.cli.daemon.plan import show_reload

            show_reload(job, *places)
            return

        def read_status() -> Status:
            return find_status(job, *places, say=print_note)

        before = read_status().daemon
        _signal(daemon_pid(before.pid, signal.SIGHUP, before.start_command))
        print_line(_answer(read_status, before.reloaded_at))


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGHUP)
    except PermissionError as error:
        msg = f"the daemon (process {pid}) is another user's"
        raise NotPermitted(msg, hint="run this as the user that ckptd runs as") from error


def _answer(read_status: Callable[[], Status], before: str | None) -> str:
    """Wait for the daemon's answer to the reload and return it as a line.

    Raises:
        ConfigError: something was refused; what runs goes on as it was (78).
        BehindError: no answer in time (3).
    """
    found: Status | None = None

    def is_answered() -> bool:
        nonlocal found
        with contextlib.suppress(NotFoundError):
            found = read_status()
        return found is not None and found.daemon.reloaded_at not in (None, before)

    if not wait_until(is_answered, WAIT_SECONDS) or found is None:
        msg = f"the daemon gave no answer within {WAIT_SECONDS:.0f} s"
        raise BehindError(msg, hint="ckptd status shows what it does")
    if found.daemon.reload_error:
        raise ConfigError(found.daemon.reload_error, hint="what was refused goes on as it was")
    return "reloaded: " + ", ".join(f"{job.name} {job.state}" for job in found.jobs)
