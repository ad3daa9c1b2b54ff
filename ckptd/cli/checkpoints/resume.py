"""`ckptd resume JOB [URL]`: make save_dir resumable, in place; what a launch script calls."""

from __future__ import annotations

import typer

from ckptd.cli.completion import complete_job, complete_tag
from ckptd.cli.output import ENV_JOB, JOB_HELP

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
            ...,
            metavar="JOB",
            autocompletion=complete_job,
            envvar=ENV_JOB,
            help=f"{JOB_HELP} A URL goes second.",
        ),
        url: str = typer.Argument(None, metavar="URL", help="The remote, when no job file names it."),
        world_size: int = typer.Option(
            None, min=1, metavar="N", help="Ranks of the coming run; another grid: universal."
        ),
        nnodes: int = typer.Option(
            1, min=1, metavar="N", help="Nodes that resume together; only committed ones count."
        ),
        node_rank: int = typer.Option(0, min=0, metavar="N", help="Which of them this is."),
        tag: str = typer.Option(
            None,
            metavar="TAG",
            autocompletion=complete_tag,
            help="Only this checkpoint; default: the newest.",
        ),
        remote: str = typer.Option(None, metavar="NAME", help="Only this remote of the job."),
        run: str | None = typer.Option(
            None, metavar="RUN", help="Of this run (see `ckptd list`); default: the one that save_dir holds."
        ),
        dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done; change nothing."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from pathlib import Path

        from ckptd.api import resuming
        from ckptd.cli.output import print_answer, print_note, progress_bar, reports_when_stopped
        from ckptd.recover.plan import RecoveryOptions
        from ckptd.recover.select.copies import Nodes

        directory = Path(config_dir) if config_dir else None
        options = RecoveryOptions(
            world_size=world_size,
            nodes=Nodes(count=nnodes, rank=node_rank, world_size=world_size),
            dry_run=dry_run,
            remote=remote,
            tag=tag,
            run=run,
        )
        with reports_when_stopped() as stopped, progress_bar() as tell:
            work = resuming(job, url, options, config_dir=directory, say=print_note, on_progress=tell)
            stopped(work.when_stopped)
            done = work.run()
        for line in done.advice:
            print_note(line)
        print_answer(str(done.path))
