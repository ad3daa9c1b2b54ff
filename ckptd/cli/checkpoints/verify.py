"""`ckptd verify JOB [TAG]`: prove again, from the remote alone, what it claims to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job, complete_tag
from ckptd.cli.output import ENV_JOB_OR_URL, JOB_HELP

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from ckptd.config.schema import JobConfig
    from ckptd.errors import CkptdError
    from ckptd.maintenance.repair import RepairResult
    from ckptd.maintenance.verify import Slice, VerifiedRemote
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.sources import Where

_HELP = (
    "Prove committed checkpoints again from the remote alone. Documents, presence and size of every object; "
    "with --read-data every byte. Exit code 0: all is as committed; 65: something differs. --repair puts it "
    "right from intact bytes on the node or in another remote. --load has DeepSpeed load one (JOB may be its "
    "folder), and compares what it holds then."
)
_EXAMPLES = """\
ckptd verify llama-7b
ckptd verify s3://my-bucket/llama-7b global_step4000 --read-data
ckptd verify llama-7b global_step4000 --load"""
_SHOWN_UNLISTED = 5
_FORM: str | None = typer.Option(
    None, metavar="FORM", help="With --load: zero or universal; default: universal where it is committed."
)


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(help=_HELP, epilog=_EXAMPLES)
    def verify(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB_OR_URL, help=JOB_HELP
        ),
        tag: str = typer.Argument(
            None, metavar="TAG", autocompletion=complete_tag, help="Only this one; default: every COMMIT."
        ),
        read_data: bool = typer.Option(False, "--read-data", help="Read every byte and compare CRC64."),
        part: str | None = typer.Option(
            None, "--slice", metavar="N/T", help="Read the N-th of T slices: 1/7 on Mondays, 2/7 …"
        ),
        remote: str = typer.Option(None, metavar="NAME", help="Only this remote of the job."),
        run: str | None = typer.Option(None, metavar="RUN", help="Only this run (see `ckptd list`)."),
        repair: bool = typer.Option(False, "--repair", help="Put right what differs, from intact bytes."),
        dry_run: bool = typer.Option(False, "--dry-run", help="With --repair: only say what it would do."),
        load: bool = typer.Option(False, "--load", help="Load it by DeepSpeed on CPU; default: the newest."),
        form: str | None = _FORM,
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from pathlib import Path

        from ckptd.api import verify as verify_remotes
        from ckptd.base.process import stopped_by_sigterm
        from ckptd.cli.output import print_note, progress_bar
        from ckptd.maintenance.verify import Slice, exit_code, slice_of

        read = slice_of(part) if part is not None else Slice() if read_data else None
        directory = Path(config_dir) if config_dir else None
        _refuse_together(dry_run=dry_run, repair=repair, run=run, form=form, load=load, read=read)
        if load:
            with stopped_by_sigterm():
                run_load(job, tag, form, run, remote, directory, as_json=as_json)
            return
        if repair:
            with stopped_by_sigterm():
                run_repair(job, tag, read, remote, directory, dry_run=dry_run, as_json=as_json)
            return
        failures: dict[str, CkptdError] = {}
        with stopped_by_sigterm(), progress_bar() as on_progress:
            found = verify_remotes(
                job,
                tag,
                read=read,
                run=run,
                remote=remote,
                config_dir=directory,
                on_progress=on_progress,
                say=print_note,
                failures=failures,
            )
        print_report(found, as_json=as_json)
        code = exit_code(found) or next((error.exit_code for error in failures.values()), 0)
        if code:
            raise typer.Exit(code)


def _refuse_together(
    *, dry_run: bool, repair: bool, run: str | None, form: str | None, load: bool, read: Slice | None
) -> None:
    """Refuse options that mean nothing together.

    Raises:
        UsageError: names them.
    """
    from ckptd.errors import UsageError

    if dry_run and not repair:
        raise UsageError("--dry-run belongs to --repair", hint="verify alone changes nothing anyway")
    if repair and run is not None:
        raise UsageError("--repair takes no --run", hint="name TAG: every generation of it is looked at")
    if form is not None and not load:
        raise UsageError("--form belongs to --load", hint="verify alone looks at every form")
    if load and (read is not None or repair):
        raise UsageError("--load stands alone", hint="restoring compares every byte that is loaded")


def print_report(
    found: list[VerifiedRemote], *, as_json: bool, repairs: list[RepairResult] | None = None
) -> None:
    """Print tables or JSON on stdout, what is wrong on stderr; with `repairs` those too."""
    import json
    from dataclasses import asdict

    from ckptd.cli.output import print_note
    from ckptd.cli.screen import screen
    from ckptd.config.remote_names import said_of

    if as_json:
        shown = {"schema_version": 1, "remotes": [asdict(one) for one in found]}
        if repairs is not None:
            shown["repairs"] = [asdict(row) for row in repairs]
        print(json.dumps(shown, indent=1))
    else:
        console = screen()
        for verified in found:
            console.print(_table(verified))
    for verified in found:
        for line in _lines(verified):
            print_note(said_of(verified.name, verified.url, line))


def _lines(verified: VerifiedRemote) -> list[str]:
    """Return one line for each difference found, then notes that are no errors."""
    lines = list(verified.problems)
    for row in verified.commits:
        name = f"{row.tag} g{row.generation} {row.form}"
        if row.verdict in ("disputed", "retired"):
            lines.append(f"{name} is {row.verdict}: it does not count")
        lines += [f"{name}: {difference}" for difference in row.differences]
    if verified.unlisted:
        some = ", ".join(repr(key) for key in verified.unlisted[:_SHOWN_UNLISTED])
        more = ", …" if len(verified.unlisted) > _SHOWN_UNLISTED else ""
        count = len(verified.unlisted)
        lines.append(f"note: {count} unlisted objects ({verified.unlisted_bytes} bytes): {some}{more}")
    return lines


def _table(verified: VerifiedRemote) -> Table:
    from rich.table import Table

    from ckptd.base.humanize import size_of
    from ckptd.cli.output import cell, cells

    title = f"{verified.name}: {verified.url} (job {verified.job})"
    table = Table(title=cell(title), title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("tag", no_wrap=True, overflow="fold")
    for column in ("gen", "form", "files", "size", "read", "verdict"):
        table.add_column(column, justify="right" if column in ("gen", "files", "size", "read") else "left")
    for row in verified.commits:
        read = size_of(row.read_bytes) if row.read_bytes else ""
        values = (row.tag, str(row.generation), row.form, str(row.files), size_of(row.bytes), read)
        table.add_row(*cells(*values, row.verdict))
    return table


def run_load(
    job: str,
    tag: str | None,
    form: str | None,
    run: str | None,
    only: str | None,
    directory: Path | None,
    *,
    as_json: bool,
) -> None:
    """Have DeepSpeed load one checkpoint, and print what it held.

    Raises:
        UsageError: no form that DeepSpeed loads.
    """
    import json
    from dataclasses import asdict

    from ckptd.api import verify_by_loading
    from ckptd.cli.output import print_line, print_note, progress_bar
    from ckptd.errors import UsageError

    if form not in (None, "zero", "universal"):
        raise UsageError(f"DeepSpeed loads no form {form!r}", hint="--form zero or --form universal")
    with progress_bar() as on_progress:
        loaded = verify_by_loading(
            job,
            tag,
            form=form,
            run=run,
            remote=only,
            config_dir=directory,
            say=print_note,
            on_progress=on_progress,
        )
    if as_json:
        print(json.dumps({"schema_version": 1, "loaded": asdict(loaded)}, indent=1))
    else:
        for line in str(loaded).splitlines():
            print_line(line)


# ---------------------------------------------------------------------------------------------------------
# `ckptd verify JOB --repair`: the remotes that are asked, the audit, what was put right and what was not.


def run_repair(
    job: str,
    tag: str | None,
    read: Slice | None,
    only: str | None,
    directory: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the repair, print its result, and exit with its code."""
    import os
    from dataclasses import replace

    import typer

    from ckptd.cli.output import print_line, print_note, progress_bar
    from ckptd.maintenance.repair import Repair, RepairRequest, Unfinished
    from ckptd.observe.audit import Audit
    from ckptd.recover.select.sources import named, where_of
    from ckptd.storage.local.state_dir import own_node_id, own_state

    where = where_of(job, dict(os.environ), config_dir=directory)
    config = job_of(where, "--repair")
    targets = frozenset(one.name for one in named(where.remotes, only))
    state_dir = job_state_dir(config, directory, make=not dry_run)
    node_id = own_node_id(state_dir, config.save_dir)
    inventories, failures = open_remotes(replace(where, node_id=node_id or ""))
    unfinished = Unfinished(own_state(state_dir, config.save_dir))
    with unfinished.alone(), progress_bar() as on_progress:
        repair = Repair(
            config,
            inventories,
            RepairRequest(targets=targets, tag=tag, read=read, dry_run=dry_run),
            node_id=node_id,
            audit=Audit(state_dir / "audit.jsonl") if state_dir is not None and not dry_run else None,
            unfinished=unfinished,
            say=print_note,
            on_progress=on_progress,
        )
        for inventory in [] if dry_run else inventories:
            unfinished.give_up(inventory.name, inventory.store)
        repair.run()
    print_report(repair.verified, as_json=as_json, repairs=repair.rows)
    for row in repair.rows:
        (print_note if as_json else print_line)(_line(row))
    code = repair.exit_code()
    for name, error in failures.items():
        code = code or (error.exit_code if name in targets else 0)
    if code:
        raise typer.Exit(code)


def job_of(where: Where, what: str) -> JobConfig:
    """Return the job; a remote alone is not enough.

    Raises:
        UsageError: there is none.
    """
    from ckptd.errors import UsageError

    if where.job is None:
        msg = f"{what} needs a job: a remote alone does not tell where its node keeps what"
        raise UsageError(msg, hint="name the job, its file or its save_dir")
    return where.job


def open_remotes(where: Where) -> tuple[list[RemoteInventory], dict[str, CkptdError]]:
    """Open every remote that answers, and say why others do not.

    Raises:
        CkptdError: none answers.
    """
    from ckptd.cli.output import print_note

    failures: dict[str, CkptdError] = {}
    inventories = list(where.read(print_note, failures, is_tolerant=True))
    if failures and not inventories:
        raise next(iter(failures.values()))
    return inventories, failures


def job_state_dir(config: JobConfig, directory: Path | None, *, make: bool) -> Path | None:
    """Return the job's state directory; make it if that is wanted and save_dir exists."""
    import os

    from ckptd.recover.select.job import state_dir_for
    from ckptd.storage.local.state_dir import prepare_state_dir

    path = state_dir_for(config, os.environ, directory)
    if path.is_dir():
        return path
    if not make or not config.save_dir.is_dir():
        return None
    prepare_state_dir(path)
    return path


def _line(row: RepairResult) -> str:
    from ckptd.base.humanize import size_of

    what = f"{row.where}: {row.key} ({size_of(row.bytes)}; {row.damage})"
    if row.outcome == "left":
        return f"left      {what}: {row.reason or 'its bytes lie intact nowhere that is known'}"
    return f"{row.outcome:9} {what}{f' from {row.source}' if row.source else f': {row.reason}'}"
