"""`ckptd restore JOB [TAG] [--to DIR]`: a committed checkpoint into another directory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_form, complete_job, complete_tag
from ckptd.cli.output import ENV_JOB_OR_URL, JOB_HELP

if TYPE_CHECKING:
    from collections.abc import Sequence

_HELP = (
    "Put a committed checkpoint into another directory. Prints the path that DeepSpeed loads. Without TAG "
    "the newest; a damaged one is named, and the one before it is taken. Calling it again checks what is "
    "there and fetches only what is missing or bad."
)
_EXAMPLES = """\
ckptd restore s3://my-bucket/llama-7b
ckptd restore llama-7b global_step4000 --to /scratch/eval --world-size 8"""
_HELP_RUN = "Of this run (see `ckptd list`); default: the job's own, else the newest."
_FORM: str = typer.Option(
    None,
    "--form",
    autocompletion=complete_form,
    help="zero, universal or weights-bf16 …; default: zero, for another grid universal.",
)
_RANKS = re.compile(r"^\d{1,7}(-\d{1,7})?$")
_MOST_RANKS = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(help=_HELP, epilog=_EXAMPLES)
    def restore(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB_OR_URL, help=JOB_HELP
        ),
        tag: str = typer.Argument(
            None, metavar="TAG", autocompletion=complete_tag, help="Which one; default: the newest committed."
        ),
        to: str | None = typer.Option(
            None, metavar="DIR", help="Where to; made where absent. Default: here, as ./TAG."
        ),
        form: str = _FORM,
        world_size: int = typer.Option(
            None, min=1, metavar="N", help="Ranks that will load it; another grid: universal."
        ),
        ranks: str | None = typer.Option(None, help="Only the ZeRO shards of these data ranks: 0,2-3."),
        nnodes: int = typer.Option(1, min=1, metavar="N", help="Nodes that restore together, each its part."),
        node_rank: int = typer.Option(0, min=0, metavar="N", help="Which of them this is."),
        remote: str = typer.Option(None, metavar="NAME", help="Only this remote of the job."),
        run: str | None = typer.Option(None, metavar="RUN", help=_HELP_RUN),
        dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done; change nothing."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from pathlib import Path

        from ckptd.api import restoring
        from ckptd.cli.output import print_answer, print_note, progress_bar, reports_when_stopped
        from ckptd.recover.advice import load_line
        from ckptd.recover.plan import RecoveryOptions
        from ckptd.recover.select.copies import Nodes

        options = RecoveryOptions(
            tag=tag,
            run=run,
            form=form,
            world_size=world_size,
            ranks=ranks_of(ranks) if ranks is not None else None,
            nodes=Nodes(count=nnodes, rank=node_rank),
            dry_run=dry_run,
        )
        directory = Path(config_dir) if config_dir else None
        with reports_when_stopped() as stopped, progress_bar() as tell:
            work = restoring(
                job,
                to or _here(tag, to),
                options,
                remote=remote,
                config_dir=directory,
                say=print_note,
                on_progress=tell,
            )
            stopped(work.when_stopped)
            done = work.run()
        last = "nothing was changed" if dry_run else load_line(done.plan, done.path)
        for line in (*done.advice, last):
            print_note(line)
        print_answer(str(done.path))


def _here(tag: str | None, to: str | None) -> str:
    """Return the working directory where `--to` was left out, unless `latest` in it names another checkpoint.

    Raises:
        TargetExists: a training may go on from there (73).
    """
    from pathlib import Path

    from ckptd.errors import TargetExists

    if to is not None:
        return to
    here = Path.cwd()
    try:
        named = (here / "latest").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return "."
    if named == tag:
        return "."
    msg = f"{here} is a directory of checkpoints: its latest names {named}"
    raise TargetExists(msg, hint="--to DIR restores elsewhere, --to . here all the same")


def ranks_of(text: str) -> frozenset[int]:
    """Parse `0,2-3` to {0, 2, 3}.

    Raises:
        UsageError: it is no such list.
    """
    from ckptd.errors import UsageError

    found: set[int] = set()
    for part in text.split(","):
        if not _RANKS.match(part.strip()):
            msg = f"--ranks {text!r}: {part!r} is no rank and no range of ranks"
            raise UsageError(msg, hint="write numbers and ranges, e.g. --ranks 0,2-3")
        first, last = _ends(part.strip().split("-"))
        if last < first or last - first > _MOST_RANKS:
            msg = f"--ranks {text!r}: {part!r} runs backwards or too far"
            raise UsageError(msg, hint="write the lower rank first, e.g. --ranks 8-15")
        found.update(range(first, last + 1))
    return frozenset(found)


def _ends(numbers: Sequence[str]) -> tuple[int, int]:
    return int(numbers[0]), int(numbers[-1])
