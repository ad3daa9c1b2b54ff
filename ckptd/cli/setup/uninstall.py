"""`ckptd uninstall JOB`: take back from this node what ckptd put there, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import JOB_HERE_HELP

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.maintenance.uninstall import OwnedItem

_HELP = (
    "Remove what ckptd put on this node. That is _ckptd/, latest_universal and the state directory; never a "
    "file of the trainer's, never anything in a remote. The job file stays."
)


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "uninstall", help=_HELP, epilog="ckptd uninstall llama-7b --dry-run\nckptd uninstall llama-7b"
    )
    def uninstall(
        job: str = typer.Argument(..., metavar="JOB", autocompletion=complete_job, help=JOB_HERE_HELP),
        dry_run: bool = typer.Option(False, "--dry-run", help="Only list it, with bytes."),
        uncommitted: bool = typer.Option(
            False, "--uncommitted", help="Also holds and universal forms that no remote is known to have."
        ),
        config_dir: str = typer.Option(None, "--config-dir", help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import os
        from contextlib import closing
        from pathlib import Path

        from ckptd.config.commands import default_config_dir
        from ckptd.errors import NotFoundError
        from ckptd.maintenance.uninstall import JobUninstall
        from ckptd.recover.select.job import job_named
        from ckptd.storage.local.job_names import must_be_of_this_node

        must_be_of_this_node(job, "uninstall")
        directory = Path(config_dir) if config_dir else default_config_dir(os.environ)
        config = job_named(job, os.environ, config_dir=directory)
        with closing(JobUninstall(config, _state_dir(config, directory))) as removal:
            pieces = removal.plan()
            if not pieces and config.file is None and not os.path.exists(config.save_dir):
                msg = f"{config.save_dir} is not there, and no job file names it"
                raise NotFoundError(msg, hint="is it mounted, and spelt so?")
            if not dry_run:
                removal.carry_out(pieces, with_uncommitted=uncommitted)
            _show(pieces, dry_run=dry_run, with_uncommitted=uncommitted)
            if dry_run and not uncommitted:
                removal.refuse_what_is_only_here(pieces)


def _state_dir(config: JobConfig, directory: Path) -> Path | None:
    """Return the job's state directory, as its daemon published it, else as configured."""
    from ckptd.cli.checkpoints.verify import job_state_dir
    from ckptd.errors import NotFoundError
    from ckptd.maintenance.status.published import published

    found = job_state_dir(config, directory, make=False)
    if found is not None:
        return found
    try:
        # by its save_dir: what the name alone means may be another job
        return published(str(config.save_dir), None, directory)[0][0]
    except NotFoundError:
        return None


def _show(pieces: list[OwnedItem], *, dry_run: bool, with_uncommitted: bool) -> None:
    from ckptd.base.humanize import size_of
    from ckptd.cli.output import print_line, print_note

    if not pieces:
        print_line("nothing of ckptd's is here")
    for piece in pieces:
        line = f"{piece.path} ({size_of(piece.bytes)}): {piece.why}"
        if piece.fate == "stays":
            print_note(f"stays: {line}")
        elif piece.fate == "only here" and dry_run and not with_uncommitted:
            print_line(f"refused without --uncommitted: {line}")
        else:
            print_line(f"{'would remove' if dry_run else 'removed'}: {line}")
