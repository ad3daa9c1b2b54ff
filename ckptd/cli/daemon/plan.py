"""`ckptd plan JOB --with keep_last=5`: what other retention keys would delete, keep and cost.

A running daemon is asked, which plans with what it knows; else its planner is asked here, under the job's
lock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import JOB_HERE_HELP, print_note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckptd.cli.daemon.request import RequestedJob
    from ckptd.config.schema import JobConfig
    from ckptd.core.policy.retention import RetentionKeys
    from ckptd.daemon.job import Job
    from ckptd.errors import NotFoundError
    from ckptd.observe.status import ForeseenPlaceStatus, HoldingStatus, PlanStatus

ANSWER_SECONDS = 60.0
SHOWN_SAVES = 3
_NOT_KNOWN = 69
"""Exit code: a remote is not known yet."""

_HELP = (
    "Say what retention deletes, keeps and costs. Here and in each remote, now and after the next saves; "
    "with --with as other settings would have it. Nothing is done. Saves to come count like the newest."
)
_EXAMPLES = """\
ckptd plan llama-7b
ckptd plan llama-7b --with local.keep_bytes=2TB --with nas.keep_last=20
ckptd plan llama-7b --with other.toml --saves 10"""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("plan", help=_HELP, epilog=_EXAMPLES)
    def plan(
        job: str = typer.Argument(..., metavar="JOB", autocompletion=complete_job, help=JOB_HERE_HELP),
        changes: list[str] = typer.Option(
            None,
            "--with",
            metavar="SETTING",
            help="KEY=VALUE everywhere, local.KEY=VALUE, NAME.KEY=VALUE in a remote, or another job file; "
            "may be repeated.",
        ),
        saves: int = typer.Option(SHOWN_SAVES, metavar="N", min=0, max=100, help="Look so many saves ahead."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import json
        import os
        from dataclasses import asdict
        from pathlib import Path

        from ckptd.cli.daemon.request import requested_job
        from ckptd.config.commands import default_config_dir
        from ckptd.recover.select.job import job_named
        from ckptd.storage.local.job_names import must_be_of_this_node

        must_be_of_this_node(job, "plan")
        directory = Path(config_dir) if config_dir else default_config_dir(os.environ)
        config = job_named(job, os.environ, config_dir=directory)
        where = requested_job(job, config, directory)
        other = job_with(config, changes or [])
        note_remotes(where, config, other)
        places = ask(where, config, directory, other.retention_keys, saves)
        if as_json:
            rows = [asdict(place) for place in places]
            print(json.dumps({"schema_version": 1, "name": config.name, "places": rows}, indent=1))
        else:
            show(config, places)
        if (planned := len(places[0].held) - 1) < saves:
            print_note(f"the time was up after {planned} of {saves} saves → --saves {planned}")
        if not all(place.is_known for place in places):
            raise typer.Exit(_NOT_KNOWN)


def job_with(config: JobConfig, changes: Sequence[str]) -> JobConfig:
    """Return the job with what a person typed: settings, or another job file and the settings after it.

    Raises:
        UsageError, ConfigError, NotFoundError: it cannot be read as either, or no job file may say it.
    """
    import os
    from pathlib import Path

    from ckptd.config.loader import load_job
    from ckptd.config.overrides import with_settings

    settings: list[str] = []
    for change in changes:
        # a path may hold a "="
        if change.endswith(".toml") and ("=" not in change or os.path.isfile(change)):
            config, settings = load_job(Path(change), check_paths=False), []
        else:
            settings.append(change)
    return with_settings(config, settings)


def note_remotes(where: RequestedJob, config: JobConfig, other: JobConfig) -> None:
    """Print what is not looked at, where the remotes are others than those of the daemon that runs."""
    job = where.job() if where.pid is not None else None
    now = {one.name: one.url for one in (config if job is None else job).remotes}
    then = {remote.name: remote.url for remote in other.remotes}
    source = other.file or "the job's arguments"
    for name in sorted(now.keys() - then.keys()):
        print_note(f"{source} has no remote {name}: what it holds stays, and counts for nothing")
    for name in sorted(then.keys() - now.keys()):
        print_note(f"{source} adds the remote {name}, which is not looked at: it is taken as empty")
    for name in sorted(now.keys() & then.keys()):
        if now[name] != then[name]:
            print_note(f"{source} gives {name} another url: what lies there is not looked at")


def show_reload(job: str | None, state_dir: Path | None, config_dir: Path | None) -> None:
    """Print for each job what its file, as it is now, would delete and keep once it is reloaded.

    Raises:
        ConfigError: a file is wrong (78).
        typer.Exit: of a job a remote is not known (69), or there is no checkpoint (66).
    """
    import os

    from ckptd.cli.daemon.request import requested_jobs
    from ckptd.cli.output import print_line
    from ckptd.config.commands import default_config_dir
    from ckptd.errors import NotFoundError
    from ckptd.recover.select.job import job_named

    directory = config_dir or default_config_dir(os.environ)
    code = 0
    for where in requested_jobs(job, state_dir, config_dir):
        config = job_named(job or where.name, os.environ, config_dir=directory)
        print_line(f"{config.name}, as {config.file or 'its arguments'} says now:")
        note_remotes(where, config, config)
        try:
            places = ask(where, config, directory, config.retention_keys, SHOWN_SAVES)
        except NotFoundError as error:
            print_line(error.message)
            code = code or error.exit_code
        else:
            show(config, places)
            code = code if all(place.is_known for place in places) else _NOT_KNOWN
    if code:
        raise typer.Exit(code)


def ask(
    where: RequestedJob, config: JobConfig, directory: Path, keys: RetentionKeys, saves: int
) -> list[ForeseenPlaceStatus]:
    """Return the places as the daemon, or the job's planner asked here, answers.

    Raises:
        BehindError: there was no answer in time (3). NotFoundError: there is no checkpoint yet (66).
        CkptdError: the job cannot be looked at.
    """
    from ckptd.cli.daemon.request import send_request, wait_until
    from ckptd.daemon.actions.control import PLAN, PlanFile
    from ckptd.errors import BehindError
    from ckptd.observe.status import rfc3339

    asked = PlanFile(asked_at_unix_seconds=time.time(), seconds=ANSWER_SECONDS, keys=keys, saves=saves)
    found: list[PlanStatus] = []

    def take(answer: PlanStatus | None) -> bool:
        if answer is not None and answer.asked_at == rfc3339(asked.asked_at_unix_seconds):
            found.append(answer)
        return bool(found)

    def is_answered() -> bool:
        job = where.job()
        return take(job.plan if job is not None else None)

    send_request(where, PLAN, asked)
    if where.pid is None:
        _work_alone(config, directory, take)
    elif not wait_until(is_answered, ANSWER_SECONDS):
        msg = f"the daemon of {where.name} (process {where.pid}) gave no answer"
        raise BehindError(msg, hint="`ckptd status` says how it is")
    (answer,) = found
    if answer.error is not None:
        raise BehindError(f"{where.name} could not be planned: {answer.error}")
    if not any(place.checkpoints or not place.is_known for place in answer.places):
        raise _no_checkpoint(config)
    return list(answer.places)


def _work_alone(config: JobConfig, directory: Path, take: Callable[[PlanStatus | None], bool]) -> None:
    """Ask the planner of a job that no daemon runs, until `take` has its answer.

    Raises:
        NotFoundError, BehindError, CkptdError: as `ask`. KeyboardInterrupt: a signal ended it.
    """
    from ckptd.cli.daemon.request import work_alone
    from ckptd.errors import BehindError

    ends = time.monotonic() + ANSWER_SECONDS

    def is_done(jobs: Sequence[Job]) -> bool:
        for job in jobs:
            if take(job.control.plan_answer):
                return True
            failures = [p.text for p in job.problems.all() if p.code == "job-interrupted"]
            if job.turns and not job.needs_turn and job.phase != "active" and not failures:
                raise _no_checkpoint(config)
            if time.monotonic() > ends:
                why = "; ".join(failures) or "its planner gave no answer"
                raise BehindError(f"{config.name} could not be planned: {why}", hint="ckptd status")
        return False

    work_alone(config, directory, is_done)
    if not take(None):
        raise KeyboardInterrupt


def _no_checkpoint(config: JobConfig) -> NotFoundError:
    from ckptd.errors import NotFoundError

    msg = f"{config.save_dir} has no checkpoint yet"
    return NotFoundError(msg, hint="there is nothing to plan before; ckptd status")


def show(config: JobConfig, places: Sequence[ForeseenPlaceStatus]) -> None:
    """Print what is deleted where, and what each place then holds."""
    from rich.table import Table

    from ckptd.base.humanize import size_of
    from ckptd.cli.output import cells
    from ckptd.cli.screen import screen

    columns = ("where", "checkpoint", "forms", "size", "when", "why")
    deletions = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        deletions.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for place in places:
        for one in place.deletions:
            after = one.after_saves
            when = f"after {after} save{'s' if after > 1 else ''}" if after else "now"
            row = (_name(place), one.tag, ", ".join(one.forms), size_of(one.bytes), when, one.why)
            deletions.add_row(*cells(*row))
    console = screen()
    if deletions.row_count:
        console.print("would be deleted:")
        console.print(deletions)
    else:
        console.print("nothing would be deleted")
    saves = len(places[0].held) - 1
    ahead = (f"after {saves} save{'s' if saves > 1 else ''}",) if saves else ()
    holds = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("where", "is there", "left", *ahead):
        holds.add_column(column, overflow="fold")
    for place in places:
        held = [_amount(one) for one in (place, place.held[0], place.held[-1])[: 2 + len(ahead)]]
        holds.add_row(*cells(_name(place), *(held if place.is_known else ("not known",))))
        if not place.is_known:
            print_note(f"{place.remote} did not answer → ckptd status {config.name}")
    console.print(holds)


def _amount(held: ForeseenPlaceStatus | HoldingStatus) -> str:
    from ckptd.base.humanize import size_of

    return f"{held.checkpoints}, {size_of(held.bytes)}"


def _name(place: ForeseenPlaceStatus) -> str:
    return place.remote or "here"
