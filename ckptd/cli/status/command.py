"""`ckptd status`: is my run safe? Reads status.json alone: with the daemon down, and for any user (H33).

Fast by importing little: the file is JSON, the table is rich's; no journal, no remote.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ckptd.cli.output import ENV_JOB, cell, print_line, print_note, printable_everywhere
from ckptd.cli.status import words
from ckptd.cli.status.of_url import is_remote, show_url
from ckptd.cli.status.places import STATUS, newest_of, state_places, written_in
from ckptd.cli.status.tables import checkpoints_table, remote_table
from ckptd.errors import CkptdError, NotFoundError, NotPermitted, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
            help="SAVE_DIR, job file or job name; default: every job. URL: all its nodes.",
        ),
        tag: str | None = typer.Argument(None, help="One checkpoint's whole story."),
        as_json: bool = typer.Option(
            False, "--json", help="The published document (docs/status.schema.json)."
        ),
        retention: bool = typer.Option(
            False,
            "--retention",
            help="Every checkpoint, and why it is kept; without it: the 20 newest, and what is not settled.",
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
    watch: bool,
    interval: float,
    live: bool,
    state_dir: str | None,
    config_dir: str | None,
) -> int:
    """Print what was asked for, and return the exit code."""
    places = [Path(place) if place else None for place in (state_dir, config_dir)]

    if job is not None and tag is None and is_remote(job):
        _must_be_of_a_node(job, live=live, retention=retention, watch=watch)
        return show_url(job, places[1], as_json=as_json)

    def look() -> dict[str, Any]:
        return find_status(job, *places)

    if live:
        return _liveness(look)
    if watch:
        if as_json or tag is not None:
            raise UsageError("--watch shows jobs; it takes neither --json nor a TAG")
        return _watch(lambda: _chosen(look(), job), retention, interval)
    document = look()
    life = words.life_of(document, time.time())
    if as_json:
        jobs = [one for one in document["jobs"] if job is None or is_meant(one, job)]
        _print_json(document | {"jobs": jobs}, tag, is_alive=life.is_well)
    else:
        jobs = _chosen(document, job)["jobs"]
        _print(document | {"jobs": jobs}, tag, retention)
    return words.exit_code(jobs, is_alive=life.is_well)


def _must_be_of_a_node(url: str, **options: bool) -> None:
    """Refuse options about a node's daemon when the status of a remote is asked for.

    Raises:
        UsageError: such an option was given.
    """
    for option, is_given in options.items():
        if is_given:
            msg = f"--{option} is of this node's daemon, and {url} is a remote"
            raise UsageError(msg, hint=f"ckptd status {shlex.quote(url)}, or name the job")


def _chosen(document: dict[str, Any], job: str | None) -> dict[str, Any]:
    """Return the document with the jobs that are meant.

    Raises:
        NotFoundError: its daemon runs others.
    """
    jobs = [one for one in document["jobs"] if job is None or is_meant(one, job)]
    if job is not None and not jobs:
        msg = f"the daemon does not run {job} any more"
        raise NotFoundError(msg, hint="its job file was removed or cannot run; the daemon's log says which")
    return document | {"jobs": jobs}


def _liveness(look: Callable[[], dict[str, Any]]) -> int:
    """Answer a probe: one line, 0 while the daemon's turns go on, whatever becomes of its jobs."""
    try:
        document = look()
    except CkptdError as error:
        print_line(f"not live: {error.message}")
        return 1
    life = words.life_of(document, time.time())
    process = document["daemon"]["pid"]
    print_line(f"live: process {process}" if life.is_well else f"not live: {life.reason}")
    return 0 if life.is_well else 1


def _print_json(document: dict[str, Any], tag: str | None, *, is_alive: bool) -> None:
    from ckptd.cli.status.detail import story_of

    document["daemon"]["alive"] = is_alive
    shown = document if tag is None else story_of(document["jobs"], tag)[0]
    print(json.dumps(shown, indent=2))


def _print(document: dict[str, Any], tag: str | None, retention: bool) -> None:
    from ckptd.cli.screen import screen as console_of_stdout
    from ckptd.cli.status.drawing import ELSEWHERE

    console = console_of_stdout(ELSEWHERE)
    if tag is None:
        for part in screen(document, time.time(), retention=retention):
            # a command to type is never broken
            console.print(part, soft_wrap=True)
        return
    from ckptd.cli.status.detail import story_of

    is_alive = words.life_of(document, time.time()).is_well
    for line in story_of(printable_everywhere(document["jobs"]), tag, is_alive=is_alive)[1]:
        console.print(cell(line), soft_wrap=True)


def _watch(look: Callable[[], dict[str, Any]], retention: bool, interval_seconds: float) -> int:
    """Show it until Ctrl-C; the exit code of what was shown last."""
    import gc

    from rich.console import Group

    from ckptd.cli.screen import Screen
    from ckptd.cli.status.watch import quietly, watch_lines, watch_screen

    code = 1

    def looked() -> dict[str, Any]:
        nonlocal code
        code = 1
        document = look()
        is_alive = words.life_of(document, time.time()).is_well
        code = words.exit_code(document["jobs"], is_alive=is_alive)
        return document

    def first_lines() -> list[str]:
        document, now = looked(), time.time()
        life = words.life_of(document, now)
        return [
            f"{one['name']}  {words.headline(one, life, now)}"
            for one in printable_everywhere(document["jobs"])
        ]

    gc.enable()  # one look needs none, days of them do
    console = Screen()
    if console.is_terminal:
        quietly(
            lambda: watch_screen(
                lambda: Group(*screen(looked(), time.time(), retention=retention)), interval_seconds, console
            )
        )
    else:
        quietly(lambda: watch_lines(first_lines, interval_seconds))
    return code


_STYLES = {"attention": "red", "behind": "yellow"}


def screen(document: dict[str, Any], now: float, *, retention: bool) -> list[Any]:
    """Return everything that is shown, top to bottom, for a console of rich."""
    from ckptd.cli.status.drawing import clauses_line, headline, prose

    life = words.life_of(document, now)
    parts: list[Any] = []
    for job in printable_everywhere(document["jobs"]):
        parts += [cell("")] if parts else []
        parts.append(headline(job["name"], words.verdict(job, life), words.clauses(job, life, now)))
        if not life.is_well and job["state"] != "invalid":
            parts.append(cell(f"  → {words.start_it(job, life)}"))
        for severity, line in words.problem_lines(job, now):
            style = _STYLES.get(severity, "")
            is_step = line.startswith(words.NEXT)
            parts.append(cell(f"  {line}", style) if is_step else prose(line, style))
        if job["checkpoints"]:
            parts.append(checkpoints_table(job, retention=retention, is_alive=life.is_well))
        parts += [remote_table(remote) for remote in job.get("remotes", []) if retention]
        said = [words.shared_line(job)]
        said += [words.abilities(remote, is_all=retention) for remote in job.get("remotes", [])]
        parts += [prose(line, "dim") for line in said if line]
        if said_of_disk := words.disk_clauses(job):
            parts.append(clauses_line(said_of_disk, "dim"))
    for key, text in (("notify_error", "nobody was told:"), ("metrics_error", "no metrics at")):
        if error := document["daemon"].get(key):
            parts.append(cell(f"! {text} {error}", "yellow"))
    return parts


def find_status(job: str | None, state_dir: Path | None, config_dir: Path | None = None) -> dict[str, Any]:
    """Return the published document of the daemon that runs a job (None: the newest that is known).

    Raises:
        UsageError: a URL with a TAG: what a daemon publishes lies on its node.
        NotFoundError: nothing is published where it would be.
    """
    if job is not None and "://" in job:
        raise UsageError(f"{job} is a remote, no job of this node", hint=f"ckptd list {job}")
    return _joined([document for _, document in published(job, state_dir, config_dir)])


def published(
    job: str | None, state_dir: Path | None, config_dir: Path | None = None
) -> list[tuple[Path, dict[str, Any]]]:
    """Return state directories with the documents in them; of one job the first that has one.

    Raises:
        NotFoundError: nothing is published where it would be. NotPermitted: this user may not look there.
    """
    if state_dir is None and job is not None:
        _must_be_no_file(job)
    found: list[tuple[Path, dict[str, Any]]] = []
    looked: list[str] = []
    denied: NotPermitted | None = None
    try:
        for place in _given(state_dir) if state_dir else state_places(job, config_dir):
            looked.append(str(place / STATUS))
            try:
                document = _read(place / STATUS)
            except NotPermitted as error:
                denied = denied or error
                continue
            if document is not None:
                found.append((place, newest_of(place, document, _read)))
                if job is not None:
                    break
    except NotFoundError:
        if denied is None:
            raise
    if denied is not None and not found:
        raise denied
    if denied is not None and job is None:
        print_note(str(denied))
    if found:
        return found
    if job is None and not looked:
        raise _no_job(config_dir)
    msg = f"no daemon has published a status (looked at {', '.join(dict.fromkeys(looked))})"
    raise NotFoundError(msg, hint=_where_then(job))


def _must_be_no_file(job: str) -> None:
    """Raises: NotFoundError: it is a file, and by its name none of a job."""
    if "/" in job and not job.endswith(".toml") and os.path.isfile(job.rstrip("/")):
        msg = f"{job} is a file, no SAVE_DIR"
        raise NotFoundError(msg, hint="the name of a job file ends in .toml")


def _no_job(config_dir: Path | None) -> NotFoundError:
    """Report that nothing is configured or can run; a daemon may go on with what it read before."""
    from ckptd.cli.status.places import wrong_file

    wrong = wrong_file(config_dir)
    if wrong is None:
        from ckptd.config.commands import default_config_dir

        msg = f"there is no job in {(config_dir or default_config_dir(os.environ)) / 'jobs.d'}"
        return NotFoundError(msg, hint="name a job file or a SAVE_DIR, or say where --state-dir is")
    hint = f"{wrong.hint or 'put it right'}; `ckptd check` reads it; meanwhile ask by SAVE_DIR"
    return NotFoundError(f"no job can be told from the configuration: {wrong.message}", hint=hint)


def _where_then(job: str | None) -> str:
    """Return the command to type where nothing is published of a job."""
    if job is not None and "/" in job and not os.path.exists(job):
        return f"{job} is not there: a remote that is not mounted, or a SAVE_DIR that is spelt otherwise?"
    if job is not None and job.endswith(".toml"):
        return f"is it running? start it with: ckptd run {shlex.quote(job)}"
    place = shlex.quote(job) if job is not None and os.path.isdir(job) else "SAVE_DIR"
    return f"is it running? start it with: ckptd run {place} URL"


def _read(path: Path) -> dict[str, Any] | None:
    """Read a published document; None where there is none.

    Raises:
        NotPermitted: this user may not look there. NotFoundError: it cannot be read.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        _judge(document)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        msg = f"{path} may not be read by this user"
        hint = "ask as the user that ckptd runs as, or let others enter its folders (chmod o+x)"
        raise NotPermitted(msg, hint=hint) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise NotFoundError(msg, hint="a daemon that runs writes it again within 20 s") from error
    return document


def _judge(document: object) -> None:
    """Raises: ValueError: it is no status of ckptd."""
    shape = {"generated_at": str, "daemon": dict, "jobs": list}
    if not isinstance(document, dict) or any(not isinstance(document.get(k), v) for k, v in shape.items()):
        raise ValueError("it is no status of ckptd")


def _given(state_dir: Path) -> list[Path]:
    """Return the state directories below one that was given: a job's own, or those of several."""
    if os.path.exists(state_dir / STATUS) or not os.path.isdir(state_dir):
        return [state_dir]
    return sorted(path.parent for path in state_dir.glob(f"*/{STATUS}")) or [state_dir]


def _joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the jobs of one daemon, of which each state directory holds its own; the newest document leads."""
    newest = max(documents, key=lambda document: str(document["generated_at"]))
    jobs: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        # a process id alone comes again: after a reboot small ones are given out in the same order
        if all(document["daemon"][key] == newest["daemon"][key] for key in ("pid", "started_at")):
            for job in document["jobs"]:
                jobs.setdefault((job["name"], job["save_dir"]), job)
    return newest | {"jobs": list(jobs.values())}


def is_meant(status: dict[str, Any], job: str) -> bool:
    """Tell whether a job that is published is JOB: a name, a save_dir, or a job file, by what stands in
    it.
    """
    # a name needs no working directory, which may have gone
    if status["name"] == job:
        return True
    written = written_in(job)
    if written is None or status["state"] == "invalid":
        # what does not run is published by its file's name
        is_named = status["name"] == Path(job).stem
    else:
        is_named = status["name"] == written[0] or status["save_dir"] == str(written[1])
    return is_named or bool(status["save_dir"] == os.path.normpath(os.path.abspath(job)))
