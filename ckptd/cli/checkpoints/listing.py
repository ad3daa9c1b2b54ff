"""`ckptd list JOB`: what is committed, in (branch, step) order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import ENV_JOB_OR_URL, JOB_HELP

if TYPE_CHECKING:
    from rich.table import Table

    from ckptd.errors import CkptdError
    from ckptd.maintenance.listing import RemoteListing

_WHAT_IS_LEFT = {"model-only": "only a model", "weights-only": "only weights: nothing to resume from"}


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        name="list",
        help="List committed checkpoints, oldest first.",
        epilog="ckptd list llama-7b\nckptd list s3://my-bucket/llama-7b --json",
    )
    def list_command(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB_OR_URL, help=JOB_HELP
        ),
        remote: str = typer.Option(None, metavar="NAME", help="Only this remote of the job."),
        run: str | None = typer.Option(
            None, metavar="RUN", help="Only this run, named by the beginning of its id."
        ),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import json
        from dataclasses import asdict
        from pathlib import Path

        from ckptd.api import checkpoints
        from ckptd.cli.output import print_note
        from ckptd.cli.screen import screen
        from ckptd.config.remote_names import said_of

        failures: dict[str, CkptdError] = {}
        directory = Path(config_dir) if config_dir else None
        listings = checkpoints(
            job, run=run, remote=remote, config_dir=directory, say=print_note, failures=failures
        )
        if as_json:
            shown = {"schema_version": 1, "remotes": [asdict(listing) for listing in listings]}
            print(json.dumps(shown, indent=1))
        else:
            console = screen()
            for listing in listings:
                console.print(_table(listing))
                if len(listing.runs) > 1:
                    console.print(_runs(listing))
                for problem in listing.problems:
                    print_note(said_of(listing.name, listing.url, problem))
        if failures:
            raise typer.Exit(next(iter(failures.values())).exit_code)


def _table(listing: RemoteListing) -> Table:
    from rich.table import Table

    from ckptd.base.humanize import size_of
    from ckptd.cli.output import cell, cells
    from ckptd.config.quantities import show_seconds
    from ckptd.core.model.runs import short

    title = f"{listing.name}: {listing.url} (job {listing.job})"
    table = Table(title=cell(title), title_justify="left", box=None, header_style="bold", pad_edge=False)
    # a tag that is cut off cannot be typed
    table.add_column("tag", no_wrap=True, overflow="fold")
    has_runs = len(listing.runs) > 1
    if has_runs:
        table.add_column("run")
    for column in ("gen", "branch", "step", "form", "size", "files", "committed", "age", ""):
        table.add_column(
            column, justify="right" if column in ("gen", "branch", "step", "size", "files") else "left"
        )
    for row in listing.checkpoints:
        for index, form in enumerate(row.forms):
            marks = [f"← {name}" for name in form.pointers] + ["pinned"] * (row.pinned and index == 0)
            if index == 0 and row.kind in _WHAT_IS_LEFT:
                marks.append(_WHAT_IS_LEFT[row.kind])
            if form.late_files:
                marks.append(f"+ {form.late_files} late ({size_of(form.late_bytes)})")
            age = show_seconds(form.age_seconds) if form.age_seconds is not None else "?"
            own = (
                row.tag,
                *[short(row.run_id)] * has_runs,
                str(row.generation),
                str(row.branch),
                str(row.step),
            )
            size = size_of(form.bytes)
            values = (form.form, size, str(form.files), form.committed_at, age, " ".join(marks))
            table.add_row(*cells(*(own if index == 0 else ("",) * len(own)), *values))
    if not listing.checkpoints:
        table.caption = "no committed checkpoint"
    return table


def _runs(listing: RemoteListing) -> Table:
    """Return the runs whose checkpoints lie there, the newest first."""
    from rich.table import Table

    from ckptd.base.humanize import size_of
    from ckptd.cli.output import cell, cells
    from ckptd.core.model.runs import short

    table = Table(title=cell("runs"), title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("saved by", overflow="fold")
    for column in ("checkpoints", "steps", "size"):
        table.add_column(column, justify="right")
    table.add_column("since")
    table.add_column("")
    for row in listing.runs:
        place = (
            f"{row.user or '?'}@{row.host or '?'}:{row.save_dir or '?'}" if row.host else "an earlier release"
        )
        steps = "-" if row.first_step is None else f"{row.first_step}-{row.last_step}"
        values = (str(row.checkpoints), steps, size_of(row.bytes), row.since or "?")
        table.add_row(*cells(short(row.run_id), place, *values, "newest" if row.is_newest else ""))
    return table
