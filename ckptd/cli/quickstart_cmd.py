"""`ckptd quickstart`: the whole job for real on this machine, in about two minutes, judged from outside."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command()
    def quickstart(
        stage: int = typer.Option(2, min=1, max=3, help="ZeRO stage."),
        world_size: int = typer.Option(2, min=2, max=8, help="Ranks of the training (a power of two)."),
        resume_world_size: int = typer.Option(
            0,
            min=0,
            max=8,
            help="Ranks after the crash; 0: twice as many where the cores allow it, else half.",
        ),
        keep: str = typer.Option("", metavar="DIR", help="Keep everything in DIR (must be empty or new)."),
        out: str = typer.Option("quickstart-out", metavar="DIR", help="Where the drawings go."),
        remote: str = typer.Option(
            "directory", metavar="directory|s3", help="Ship to a directory, or to an S3 server of its own."
        ),
        short: bool = typer.Option(False, "--short", help="Fewer steps, smaller checkpoints."),
        convert_only: bool = typer.Option(
            False, "--convert-only", help="Only: train, convert, resume with stock DeepSpeed."
        ),
    ) -> None:
        """Train, save, upload, convert, rotate, crash, lose the node, resume: for real, judged."""
        from pathlib import Path

        from examples.demo.start import Request, start

        start(
            Request(
                stage=stage,
                world_size=world_size,
                resume_world_size=resume_world_size,
                keep=Path(keep).resolve() if keep else None,
                out=Path(out),
                convert_only=convert_only,
                remote=remote,
                short=short,
            )
        )
