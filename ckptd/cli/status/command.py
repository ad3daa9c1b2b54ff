"""`ckptd status`: is my run safe? Reads status.json alone: with the daemon down, and for any user (H33).

Fast by importing little: the file is JSON, the table is rich's; no journal, no remote, and no Typer, which
is a fifth of all that is imported (see `parse`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ckptd.base.humanize import printable_everywhere
from ckptd.cli.completion import complete_job, complete_tag
from ckptd.cli.output import ENV_JOB, JOB_HELP, cell, print_line, print_note
from ckptd.cli.status.of_url import show_url
from ckptd.cli.status.tables import checkpoints_table, remote_table
from ckptd.errors import CkptdError, UsageError
from ckptd.maintenance.status import words
from ckptd.maintenance.status.published import find_statuses, is_meant, jobs_meant
from ckptd.maintenance.status.rows import checkpoints_of
from ckptd.maintenance.status.verdict import exit_code, life_of, verdict
from ckptd.storage.local.job_names import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import typer

    from ckptd.maintenance.status.published import Published
    from ckptd.observe.status import Status


_INTERVAL_SECONDS, _LEAST_INTERVAL_SECONDS = 2.0, 0.1

_SIGNS = """Signs:
  ✓ committed: every byte was compared there     ○ waits for its turn
  ✗ failed, refused or stopped                   – not there
  ██▌ 50 %, 4 min: is uploaded, and time left
  kept copy: deleted by the trainer, kept here until it is committed
  ! needs a person    ~ is behind    · is worth knowing
  without UTF-8: + o x - # and *"""
"""The legend of the screen, for --help."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    import typer

    @app.command(
        "status",
        help="Is my run safe? What is under way, what needs a person, and what to type. Exit code 0: safe; "
        "3: behind, or nothing is committed yet (also before the first checkpoint); 1: a person is needed "
        f"or no daemon watches.\n\n{_SIGNS}",
        epilog="ckptd status\nckptd status llama-7b --watch\nckptd status s3://my-bucket/llama-7b",
    )
    def status(
        job: str | None = typer.Argument(
            None,
            envvar=ENV_JOB,
            metavar="JOB",
            autocompletion=complete_job,
            help=f"{JOB_HELP} Default: every daemon of yours; of a URL all its nodes.",
        ),
        tag: str | None = typer.Argument(
            None, autocompletion=complete_tag, help="One checkpoint's whole story."
        ),
        as_json: bool = typer.Option(
            False, "--json", help="The published document (docs/status.schema.json)."
        ),
        retention: bool = typer.Option(
            False,
            "--retention",
            help="Every checkpoint, and why it is kept; without it: the 20 newest, and what is not settled.",
        ),
        html: str | None = typer.Option(
            None, "--html", metavar="FILE", help="Write all of it as one page, with nothing from outside."
        ),
        watch: bool = typer.Option(False, "--watch", help="Again and again, until Ctrl-C."),
        interval: float = typer.Option(
            _INTERVAL_SECONDS,
            "--interval",
            min=_LEAST_INTERVAL_SECONDS,
            metavar="SECONDS",
            help="Between two looks of --watch.",
        ),
        live: bool = typer.Option(False, "--live", help="Exit 0 while the daemon's turns go on, else 1."),
        state_dir: str | None = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str | None = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        raise typer.Exit(
            show(
                job,
                tag,
                as_json=as_json,
                retention=retention,
                html=html,
                watch=watch,
                interval=interval,
                live=live,
                state_dir=state_dir,
                config_dir=config_dir,
            )
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    """Parse the command line of `status` without Typer, as keywords of `show`.

    None where something does not parse, or help is asked for: Typer, which knows the same options,
    then says so in its words.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    named = (value for name in ENV_JOB if (value := os.environ.get(name)))
    parser.add_argument("job", nargs="?", default=next(named, None))
    parser.add_argument("tag", nargs="?")
    for flag in ("--retention", "--watch", "--live"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--html")
    parser.add_argument("--interval", type=float, default=_INTERVAL_SECONDS)
    parser.add_argument("--state-dir")
    parser.add_argument("--config-dir")
    try:
        found = parser.parse_intermixed_args(arguments)
    except UsageError:
        return None
    return found if found.interval >= _LEAST_INTERVAL_SECONDS else None


def show(
    job: str | None,
    tag: str | None,
    *,
    as_json: bool,
    retention: bool,
    html: str | None,
    watch: bool,
    interval: float,
    live: bool,
    state_dir: str | None,
    config_dir: str | None,
) -> int:
    """Print what was asked for, and return the exit code."""
    places = [Path(place) if place else None for place in (state_dir, config_dir)]
    if html is not None:
        if as_json or retention or watch or live or tag is not None:
            raise UsageError("--html writes all of a job; it takes no other form, and no TAG")
        return _write_page(html, job, *places)

    if job is not None and tag is None and is_remote(job):
        _must_be_of_a_node(job, live=live, retention=retention, watch=watch)
        return show_url(job, places[1], as_json=as_json)

    def look() -> list[Published]:
        return find_statuses(job, *places, say=print_note)

    if live:
        return _liveness(lambda: [one.status for one in look()])
    if watch:
        if as_json or tag is not None:
            raise UsageError("--watch shows jobs; it takes neither --json nor a TAG")
        return _watch(lambda: [jobs_meant(one, job, places[1]).status for one in look()], retention, interval)
    documents = look()
    if as_json:
        documents = [
            document.only(lambda one: job is None or is_meant(one, job, places[1])) for document in documents
        ]
        _print_json(documents, tag)
    else:
        documents = [jobs_meant(document, job, places[1]) for document in documents]
        _print([document.status for document in documents], tag, retention)
    return _worst([document.status for document in documents])


def _worst(documents: Sequence[Status]) -> int:
    """Return the exit code of the daemon that is worst off."""
    now = time.time()
    codes = [exit_code(one.jobs, is_alive=life_of(one, now).is_well) for one in documents]
    return min(codes, key=(1, 3, 0).index)


def _write_page(file: str, job: str | None, state_dir: Path | None, config_dir: Path | None) -> int:
    """Write the page into a file, whole or not at all, and return the exit code of what is on it."""
    from ckptd.base.files import opened_dir, write_atomic
    from ckptd.page.render import page_html
    from ckptd.page.sources import read_page, wanted

    page = read_page(wanted([] if job is None else [job], state_dir, config_dir))
    path = Path(os.path.abspath(file))
    if path.is_dir():
        raise UsageError(f"{file} is a directory", hint=f"name the file: {os.path.join(file, 'ckptd.html')}")
    data = page_html(page).encode()
    with opened_dir(path.parent) as folder:
        write_atomic(folder, path.name, data)
    print_line(f"{page.summary}: {file}")
    return page.exit_code


def _must_be_of_a_node(url: str, **options: bool) -> None:
    """Refuse options about a node's daemon when the status of a remote is asked for.

    Raises:
        UsageError: such an option was given.
    """
    for option, is_given in options.items():
        if is_given:
            msg = f"--{option} is of this node's daemon, and {url} is a remote"
            raise UsageError(msg, hint=f"ckptd status {shlex.quote(url)}, or name the job")


def _liveness(look: Callable[[], list[Status]]) -> int:
    """Answer a probe: a line for each daemon, 0 while their turns go on, whatever becomes of their jobs."""
    try:
        documents = look()
    except CkptdError as error:
        print_line(f"not live: {error.message}")
        return 1
    lives = [(document.daemon.pid, life_of(document, time.time())) for document in documents]
    for process, life in lives:
        print_line(f"live: process {process}" if life.is_well else f"not live: {life.reason}")
    return 0 if all(life.is_well for _, life in lives) else 1


def _print_json(documents: Sequence[Published], tag: str | None) -> None:
    from ckptd.cli.status.detail import story_as_written

    first, *others = (
        one.written | {"daemon": one.written["daemon"] | {"alive": life_of(one.status, time.time()).is_well}}
        for one in documents
    )
    shown = first | ({"other_daemons": others} if others else {})
    print(json.dumps(shown if tag is None else story_as_written(first["jobs"], tag), indent=2))


def _print(documents: Sequence[Status], tag: str | None, retention: bool) -> None:
    from ckptd.cli.screen import screen as console_of_stdout
    from ckptd.cli.status.drawing import ELSEWHERE

    console = console_of_stdout(ELSEWHERE)
    if tag is None:
        for part in screens(documents, time.time(), retention=retention):
            # a command to type is never broken
            console.print(part, soft_wrap=True)
        return
    from ckptd.cli.status.detail import story_of

    (document,) = documents
    is_alive = life_of(document, time.time()).is_well
    for line in story_of(printable_everywhere(document.jobs), tag, is_alive=is_alive):
        console.print(cell(line), soft_wrap=True)


def _watch(look: Callable[[], list[Status]], retention: bool, interval_seconds: float) -> int:
    """Show it until Ctrl-C; the exit code of what was shown last."""
    import gc

    from rich.console import Group

    from ckptd.cli.screen import Screen
    from ckptd.cli.status.watch import quietly, watch_lines, watch_screen

    code = 1

    def looked() -> list[Status]:
        nonlocal code
        code = 1
        documents = look()
        code = _worst(documents)
        return documents

    def first_lines() -> list[str]:
        now = time.time()
        return [
            f"{one.name}  {words.headline(one, life_of(document, now), now)}"
            for document in looked()
            for one in printable_everywhere(document.jobs)
        ]

    gc.enable()  # one look needs none, days of them do
    console = Screen()
    if console.is_terminal:
        quietly(
            lambda: watch_screen(
                lambda: Group(*screens(looked(), time.time(), retention=retention)), interval_seconds, console
            )
        )
    else:
        quietly(lambda: watch_lines(first_lines, interval_seconds))
    return code


_STYLES = {"attention": "red", "behind": "yellow"}


def screens(documents: Sequence[Status], now: float, *, retention: bool) -> list[Any]:
    """Return what is shown of each daemon, one below the other; of several with the process."""
    if len(documents) == 1:
        return screen(documents[0], now, retention=retention)
    parts: list[Any] = []
    for document in documents:
        daemon = document.daemon
        parts += [cell("")] if parts else []
        parts += screen(document, now, retention=retention)
        if life_of(document, now).is_well:
            how = f": {daemon.start_command}" if daemon.start_command else ""
            parts.append(cell(f"  process {daemon.pid}{how}", "dim"))
    return parts


def screen(document: Status, now: float, *, retention: bool) -> list[Any]:
    """Return everything that is shown, top to bottom, for a console of rich."""
    from ckptd.cli.status.drawing import clauses_line, headline, prose

    life = life_of(document, now)
    parts: list[Any] = []
    for job in printable_everywhere(document.jobs):
        parts += [cell("")] if parts else []
        parts.append(headline(job.name, verdict(job, life), words.clauses(job, life, now)))
        if not life.is_well and job.state != "invalid":
            parts.append(cell(f"  → {words.start_it(job, life)}"))
        for severity, line in words.problem_lines(job, now):
            style = _STYLES.get(severity, "")
            is_step = line.startswith(words.NEXT)
            parts.append(cell(f"  {line}", style) if is_step else prose(line, style))
        if job.checkpoints if retention else checkpoints_of(job):
            parts.append(checkpoints_table(job, retention=retention, is_alive=life.is_well))
        parts += [remote_table(remote) for remote in job.remotes if retention]
        said = [words.shared_line(job)]
        said += [words.abilities(remote, is_all=retention) for remote in job.remotes]
        parts += [prose(line, "dim") for line in said if line]
        if said_of_disk := words.disk_clauses(job):
            parts.append(clauses_line(said_of_disk, "dim"))
    parts += [cell(f"! {text}", "yellow") for text in words.daemon_errors(document.daemon)]
    return parts
