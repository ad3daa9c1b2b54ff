"""`ckptd ui`: the status as a page in a browser, live and read-only, on this machine alone."""

from __future__ import annotations

from pathlib import Path

import typer

from ckptd.cli.completion import complete_job
from ckptd.cli.output import JOB_HELP, print_answer, print_note


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "ui",
        help="Show the status as a page in a browser, read-only. It answers on 127.0.0.1, to whoever has the "
        "address with its token; it is no part of the daemon, and ends with Ctrl-C. From another machine: "
        "ssh -L 8765:127.0.0.1:8765 NODE, then the same address there.",
        epilog="ckptd ui\nckptd ui llama-7b --port 9000\nckptd ui s3://my-bucket/llama-7b s3://my-bucket/qwen",
    )
    def ui(
        names: list[str] | None = typer.Argument(
            None,
            metavar="JOB ...",
            autocompletion=complete_job,
            help=f"{JOB_HELP} URL: all its nodes. Default: every job of this node.",
        ),
        port: int | None = typer.Option(
            None,
            "--port",
            min=0,
            max=65535,
            metavar="N",
            help="Default: 8765, or a free one where that is taken.",
        ),
        state_dir: str | None = typer.Option(None, "--state-dir", help="Where status.json lies."),
        config_dir: str | None = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        from ckptd.page.server import listening, new_token, serve
        from ckptd.page.sources import LivePage, read_local, wanted

        places = [Path(place) if place else None for place in (state_dir, config_dir)]
        asked = wanted(names or (), *places)
        # a name that is wrong is said here, not in the browser
        read_local(asked, 0.0)
        page, token = LivePage(asked), new_token()
        listener = listening(port)

        def say(address: str) -> None:
            print_answer(address)
            print_note("read-only; open this address in a browser of this machine; Ctrl-C ends it")

        try:
            serve(page, token, listener, say)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
