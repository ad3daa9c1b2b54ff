"""`ckptd pause [JOB] [--off]`: transfers, conversions and deletions of a job rest, on this node (P8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import ENV_JOB, JOB_HERE_HELP, print_line

if TYPE_CHECKING:
    from ckptd.cli.daemon.request import RequestedJob

ANSWER_SECONDS = 30.0


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "pause",
        help="Stop uploads, conversions and deletions of a job. On this node, also after a restart, until "
        "`pause --off`: then they go on where they stopped. Watching, holds and alarms go on meanwhile.",
        epilog="ckptd pause llama-7b\nckptd pause llama-7b --off",
    )
    def pause(
        job: str = typer.Argument(
            None,
            metavar="JOB",
            autocompletion=complete_job,
            envvar=ENV_JOB,
            help=f"{JOB_HERE_HELP} Default: every configured job.",
        ),
        off: bool = typer.Option(False, "--off", help="Go on; nothing that is committed is uploaded again."),
        state_dir: str = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        _set(job, state_dir, config_dir, is_paused=not off)


def _set(job: str | None, state_dir: str | None, config_dir: str | None, *, is_paused: bool) -> None:
    import getpass
    import time
    from functools import partial
    from pathlib import Path

    from ckptd.cli.daemon.request import requested_jobs, send_request, wait_until
    from ckptd.daemon.actions.control import PAUSE, PauseFile
    from ckptd.errors import BehindError
    from ckptd.storage.local.job_names import must_be_of_this_node

    word = "paused" if is_paused else "goes on"
    must_be_of_this_node(job, "pause" if is_paused else "pause --off")
    places = [Path(place) if place else None for place in (state_dir, config_dir)]
    for one in requested_jobs(job, *places):
        send_request(
            one, PAUSE, PauseFile(is_paused=is_paused, by=getpass.getuser(), at_unix_seconds=time.time())
        )
        if one.pid is None:
            print_line(f"{one.name}: {word} from the daemon's next start on; none runs now")
        elif wait_until(partial(_is_set, one, is_paused), ANSWER_SECONDS):
            print_line(f"{one.name}: {word}")
        else:
            msg = f"the daemon (process {one.pid}) gave no answer within {ANSWER_SECONDS:.0f} s"
            raise BehindError(msg, hint="the request is recorded; ckptd status shows what the daemon does")


def _is_set(one: RequestedJob, is_paused: bool) -> bool:
    """Tell whether the daemon says that the job is paused."""
    job = one.job()
    return job is not None and (job.paused is not None) == is_paused
