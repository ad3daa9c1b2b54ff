"""`ckptd check [JOB ...]`: what is proved before a job is trusted, and what is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import JOB_HERE_HELP, cell, cells, print_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ckptd.config.loader import LoadedConfig
    from ckptd.config.schema import JobConfig
    from ckptd.errors import CkptdError
    from ckptd.storage.local.probe import Finding

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "fail": ("FAIL", "red")}


_HELP = "Test permissions, disk space and remotes of jobs. What it writes for that, it deletes again."
_NO_JOB = "`ckptd check SAVE_DIR URL`; `ckptd init SAVE_DIR URL` prints one"
_EXISTING: str = typer.Option(
    None, "--existing", metavar="WHICH", help="As for run with SAVE_DIR URL: newest, all or none."
)
_EXAMPLES = "ckptd check /nvme/llama-7b s3://my-bucket/llama-7b\nckptd check llama-7b.toml"


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(help=_HELP, epilog=_EXAMPLES)
    def check(
        files: list[str] = typer.Argument(
            None,
            metavar="JOB ...",
            autocompletion=complete_job,
            help=f"{JOB_HERE_HELP} Or SAVE_DIR URL, as for run. Default: every configured job.",
        ),
        existing: str = _EXISTING,
        init_remote: bool = typer.Option(False, "--init-remote", help="Make the remotes these jobs' own."),
        same_filesystem: bool = typer.Option(
            False, "--same-filesystem", help="Allow URL on the disk of SAVE_DIR, as run does."
        ),
        no_probe: bool = typer.Option(False, "--no-probe", help="Write nothing, ask no remote."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import os

        from ckptd.cli.screen import screen
        from ckptd.maintenance.check import check_job
        from ckptd.maintenance.install.plan import service_user

        loaded, place = _load(files or [], config_dir, dict(os.environ), same_filesystem=same_filesystem)
        loaded = _with_existing(loaded, existing)
        console = screen()
        codes = [_print_problem(console, path, error) for path, error in loaded.problems]
        if not (loaded.jobs or loaded.problems or loaded.has_globs):
            print_line(f"no job file in {place}: {_NO_JOB}")
            raise typer.Exit(66)
        environ = dict(os.environ)
        if not files and (user := service_user(place.parent)):
            environ.setdefault("STATE_DIRECTORY", f"/var/lib/ckptd/{user}")
        for job in loaded.jobs:
            findings = list(
                check_job(
                    job,
                    loaded.daemon,
                    environ,
                    jobs_in_daemon=loaded.jobs_in_daemon,
                    writes=not no_probe,
                    init_remote=init_remote,
                )
            )
            console.print(_table(f"{job.name}: {job.file or job.save_dir}", findings))
            for finding in findings:
                if finding.rows:
                    console.print(_rows(finding))
            codes += [f.exit_code for f in findings if f.verdict == "fail"]
        for title, whole in _of_daemon(loaded, environ, writes=not no_probe):
            console.print(_table(title, whole))
            codes += [finding.exit_code for finding in whole]
        if any(codes):
            raise typer.Exit(max(codes))


def _of_daemon(
    loaded: LoadedConfig, environ: Mapping[str, str], *, writes: bool
) -> Iterator[tuple[str, list[Finding]]]:
    """Yield checks that belong to no single job: unmatched globs, notifications, memory."""
    from ckptd.maintenance.check import check_glob, check_memory, check_outlets

    for pattern in loaded.unmatched:
        yield pattern, [check_glob(loaded.daemon, environ)]
    if outlets := list(check_outlets(loaded.daemon, writes=writes)):
        yield "ckptd.toml", outlets
    if memory := check_memory(loaded.jobs, loaded.daemon):
        yield memory.what, [memory]


def _print_problem(console: Console, path: Path, error: CkptdError) -> int:
    """Print why a job file is not used; returns the exit code."""
    console.print(cell("").append_text(_mark("fail")).append_text(cell(f" {path}")))
    for line in f"{error.message}\n→ {error.hint}".split("\n") if error.hint else [error.message]:
        print_line(f"  {line}")
    return error.exit_code


def _mark(verdict: str) -> Text:
    return cell(*_MARKS[verdict])


def _load(
    files: list[str], config_dir: str | None, environ: Mapping[str, str], *, same_filesystem: bool = False
) -> tuple[LoadedConfig, Path]:
    from pathlib import Path

    from ckptd.cli.daemon.run import load
    from ckptd.config.commands import default_config_dir
    from ckptd.config.loader import LoadedConfig, check_job_paths, load_all, load_daemon, load_jobs

    if not files and not config_dir and (environ.get("CKPTD_SAVE_DIR") or environ.get("CKPTD_JOB")):
        return load(environ), Path()
    directory = Path(config_dir) if config_dir else default_config_dir(environ)
    if files:
        _must_be_no_remote(files[0])
        daemon = load_daemon(directory / "ckptd.toml", environ)
        named = [_named(name, directory, environ, alone=len(files) == 1) for name in files[:1]]
        first = named[0]
        if first is not None and first.file is None and len(files) == 1 and first.remotes:
            check_job_paths(first, "arguments")
            return LoadedConfig(daemon=daemon, jobs=(first,)), Path()
        if first is not None and first.file is None and len(files) <= 2:
            url = files[1] if len(files) == 2 else None
            single = load(
                environ,
                save_dir=str(first.save_dir),
                url=url,
                config_dir=directory,
                verb="check",
                same_filesystem=same_filesystem,
            )
            return single, Path()
        named += [_named(name, directory, environ) for name in files[1:]]
        paths = [one.file if one and one.file else Path(name) for one, name in zip(named, files, strict=True)]
        return load_jobs(paths, daemon, environ), directory
    return load_all(directory, environ), directory / "jobs.d"


def _with_existing(loaded: LoadedConfig, existing: str | None) -> LoadedConfig:
    """Return the jobs with another value of `existing`.

    Raises:
        UsageError: no such value, or a job file says it itself.
    """
    from dataclasses import replace

    from ckptd.cli.daemon.run import must_be_existing
    from ckptd.errors import UsageError

    if existing is None:
        return loaded
    must_be_existing(existing)
    if any(job.file is not None for job in loaded.jobs):
        msg = "--existing goes with SAVE_DIR URL alone"
        raise UsageError(msg, hint=f'write existing = "{existing}" into the job file')
    jobs = tuple(job.model_copy(update={"existing": existing}) for job in loaded.jobs)
    return replace(loaded, jobs=jobs)


def _must_be_no_remote(job: str) -> None:
    """Raises: UsageError: a remote stands where a job does; its SAVE_DIR is what is tested first."""
    from ckptd.errors import UsageError
    from ckptd.storage.local.job_names import is_remote

    if is_remote(job):
        msg = f"check tests a save_dir and where its checkpoints go; {job} is the second alone"
        raise UsageError(msg, hint=f"ckptd check SAVE_DIR {job}")


def _named(job: str, config_dir: Path, environ: Mapping[str, str], *, alone: bool = True) -> JobConfig | None:
    """Return the job that is named, where it is no file; `alone`: no URL follows, so it has to be known."""
    from pathlib import Path

    from ckptd.config.loader import resolve_job
    from ckptd.recover.select.job import job_named

    if job.endswith(".toml") or Path(job).is_file() or "://" in job:
        return None
    find = job_named if alone or "/" not in job else resolve_job
    return find(job, environ, config_dir=config_dir)


def _rows(finding: Finding) -> Table:
    """Return a table of a remote's settings and its store's abilities."""
    from rich.table import Table

    table = Table(
        title=cell("").append("\n").append_text(cell(finding.what)),
        title_justify="left",
        box=None,
        show_header=False,
    )
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in finding.rows:
        table.add_row(*cells(name, value))
    return table


def _table(title: str, findings: list[Finding]) -> Table:
    from rich.table import Table

    table = Table(title=cell(title), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        said = cell(finding.text)
        if finding.hint:
            said.append("\n").append_text(cell(f"→ {finding.hint}"))
        table.add_row(cell(finding.what), _mark(finding.verdict), said)
    return table
