"""`ckptd init SAVE_DIR URL`: prints a commented job file with every key, or a shipped example."""

from __future__ import annotations

import sys

import typer

from ckptd.cli.output import print_line

_EXAMPLES = """\
ckptd init /nvme/llama-7b s3://my-bucket/llama-7b > llama-7b.toml
ckptd init --list
ckptd init --example two-remotes > llama-7b.toml"""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        help="Print a commented job file with every key and its default. Or an example: job files, alert "
        "rules, a dashboard, units of systemd.",
        epilog=_EXAMPLES,
    )
    def init(
        save_dir: str = typer.Argument("", metavar="SAVE_DIR", help="Where the trainer saves."),
        url: str = typer.Argument(
            "", metavar="URL", help="Where checkpoints go: a directory, s3://bucket/prefix, sftp://…"
        ),
        name: str = typer.Option("", help="Name of the job; default the last component of SAVE_DIR."),
        lists: bool = typer.Option(False, "--list", help="List the examples that come with ckptd."),
        example: str = typer.Option("", metavar="NAME", help="Print one of them."),
    ) -> None:
        from ckptd.errors import UsageError

        if lists or example:
            if save_dir or name or (lists and example):
                raise UsageError("--list and --example NAME stand alone")
            _print_examples(example)
            return
        if not url:
            msg = "init needs SAVE_DIR and URL" if not save_dir else f"init {save_dir} needs a URL"
            raise UsageError(
                msg, hint="ckptd init /nvme/llama-7b s3://my-bucket/llama-7b; or ckptd init --list"
            )
        _print_job_file(save_dir, url, name)


def _print_job_file(save_dir: str, url: str, name: str) -> None:
    from ckptd.config.loader import job_from_arguments
    from ckptd.config.templates import job_template

    options = {"name": name} if name else {}
    job = job_from_arguments(save_dir, url, options, check_paths=False)
    url = job.remotes[0].url
    scheme, separator, _ = url.partition("://")
    called = scheme if separator and scheme != "file" else "nas"
    print(job_template(str(job.save_dir), url, job.name, remote_name=called), end="")


def _print_examples(name: str) -> None:
    """Print the example, or without a name the list of all."""
    from ckptd.config.templates import EXAMPLES, example_text

    if name:
        sys.stdout.write(example_text(name))  # a file of the wheel, byte for byte
        return
    width = max(map(len, EXAMPLES))
    for one, example in EXAMPLES.items():
        print_line(f"{one.ljust(width)}  {example.what}")
