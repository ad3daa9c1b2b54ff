"""`ckptd resume JOB|SAVE_DIR [URL]`: make save_dir resumable, in place; what a launch script calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.output import ENV_JOB

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig

_HELP = (
    "Make save_dir resumable in place; print the path to load. A launch script trains on exit code 0 "
    "(resume) and 4 (start fresh), and on nothing else."
)
_EXAMPLES = """\
ckptd resume llama-7b
ckptd resume /nvme/llama-7b s3://my-bucket/llama-7b --world-size 16
ckptd resume llama-7b --dry-run"""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(help=_HELP, epilog=_EXAMPLES)
    def resume(
        job: str = typer.Argument(
            ..., metavar="JOB|SAVE_DIR", envvar=ENV_JOB, help="A job's name or file, or its save_dir."
        ),
        url: str = typer.Argument(None, metavar="URL", help="The remote, when no job file names it."),
        world_size: int = typer.Option(
            None, min=1, metavar="N", help="Ranks of the coming run; another grid: universal."
        ),
        nnodes: int = typer.Option(
            1, min=1, metavar="N", help="Nodes that resume together; only committed ones count."
        ),
        node_rank: int = typer.Option(0, min=0, metavar="N", help="Which of them this is."),
        tag: str = typer.Option(None, metavar="TAG", help="Only this checkpoint; default: the newest."),
        remote: str = typer.Option(None, metavar="NAME", help="Only this remote of the job."),
        run: str | None = typer.Option(
            None, metavar="RUN", help="Of this run (see `ckptd list`); default: the one that save_dir holds."
        ),
        dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done; change nothing."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import os
        from pathlib import Path

        from ckptd.cli.output import print_answer, print_note, progress_bar, reports_when_stopped
        from ckptd.recover.plan import RecoveryOptions
        from ckptd.recover.resume import Resume
        from ckptd.recover.select.copies import Nodes
        from ckptd.recover.select.job import state_dir_hint

        environ = dict(os.environ)
        directory = Path(config_dir) if config_dir else None
        config = _job(job, url, environ, directory)
        options = RecoveryOptions(
            world_size=world_size,
            nodes=Nodes(count=nnodes, rank=node_rank, world_size=world_size),
            dry_run=dry_run,
            remote=remote,
            tag=tag,
            run=run,
            state_dir=state_dir_hint(config, environ, directory),
        )

        with reports_when_stopped() as stopped, progress_bar() as tell:
            work = Resume(config, options, print_note, tell)
            stopped(work.when_stopped)
            done = work.run()
        for line in done.advice:
            print_note(line)
        print_answer(str(done.path))


def _job(job: str, url: str | None, environ: dict[str, str], directory: Path | None) -> JobConfig:
    from ckptd.cli.output import print_note
    from ckptd.config.loader import job_from_arguments
    from ckptd.errors import CkptdError
    from ckptd.recover.select.job import job_named

    if url is None:
        return job_named(job, environ, config_dir=directory)
    options: dict[str, str] = {}
    try:
        known = job_named(job, environ, config_dir=directory)
    except CkptdError as error:
        print_note(f"{error}; going on with {url} alone")
        known = None
    if known is not None and (known.file is not None or known.remotes):
        options = {"name": known.name}
    return job_from_arguments(job, url, options, environ)
