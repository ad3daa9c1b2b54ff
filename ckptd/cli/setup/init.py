"""`ckptd init SAVE_DIR URL`: prints a commented job file with every key."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        help="Print a commented job file with every key and its default.",
        epilog="ckptd init /nvme/llama-7b s3://my-bucket/llama-7b > llama-7b.toml",
    )
    def init(
        save_dir: str = typer.Argument(..., metavar="SAVE_DIR", help="Where the trainer saves."),
        url: str = typer.Argument(
            ..., metavar="URL", help="Where checkpoints go: a directory, s3://bucket/prefix, sftp://…"
        ),
        name: str = typer.Option("", help="Name of the job; default the last component of SAVE_DIR."),
    ) -> None:
        from ckptd.config.loader import job_from_arguments
        from ckptd.config.template import job_template

        options = {"name": name} if name else {}
        job = job_from_arguments(save_dir, url, options, check_paths=False)
        url = job.remotes[0].url
        scheme, separator, _ = url.partition("://")
        called = scheme if separator and scheme != "file" else "nas"
        print(job_template(str(job.save_dir), url, job.name, remote_name=called), end="")
