"""`ckptd events JOB`: what happened to a job's checkpoints, each with an id from which to go on."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import typer

from ckptd.base.humanize import printable
from ckptd.cli.completion import complete_job
from ckptd.cli.output import ENV_JOB, JOB_HERE_HELP

if TYPE_CHECKING:
    from pathlib import Path

POLL_SECONDS = 0.5

_HELP = (
    "Print what happened to a job's checkpoints, by id. Each event is printed at least once: keep the id of "
    "the last one and go on with --since. Of events that are not kept any more a line of kind gap tells."
)


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("events", help=_HELP, epilog="ckptd events llama-7b\nckptd events llama-7b --json --follow")
    def events(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB, help=JOB_HERE_HELP
        ),
        follow: bool = typer.Option(False, "-f", "--follow", help="Go on with what happens, until Ctrl-C."),
        since: int | None = typer.Option(None, "--since", metavar="ID", help="Only what came after this id."),
        as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
        state_dir: str = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from pathlib import Path

        from ckptd.errors import CkptdError
        from ckptd.maintenance.status.published import published
        from ckptd.observe.event_log import version_of
        from ckptd.storage.local.job_names import must_be_of_this_node

        must_be_of_this_node(job, "events")
        places = [Path(place) if place else None for place in (state_dir, config_dir)]
        place = published(job, *places)[0].place
        since = _print(place, since, as_json=as_json)
        seen: tuple[int, int] | None = None
        while follow:
            now = version_of(place)
            if now == (0, 0):
                # no checkpoint was there yet, and the status lay elsewhere; or the file was just renamed,
                # and what was written last is still to be printed
                with contextlib.suppress(CkptdError):
                    place = published(job, *places)[0].place
            if now != seen:
                since, seen = _print(place, since, as_json=as_json), now
            time.sleep(POLL_SECONDS)


def _print(place: Path, since: int | None, *, as_json: bool) -> int | None:
    """Print the events after an id; return the id of the last."""
    from ckptd.observe.event_log import read_events

    for row in read_events(place, since):
        print(json.dumps(row) if as_json else _line(row), flush=True)
        since = row["id"]
    return since


def _line(row: dict[str, Any]) -> str:
    return printable(f"{row['id']} {row.get('at')} {row.get('kind')}: {row.get('text')}")
