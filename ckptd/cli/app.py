"""Make the Typer application of `ckptd`: its verbs show our help (`ckptd.cli.help`), and take `-h`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckptd import __version__
from ckptd.cli.help import help_of, overview, usage_pieces

if TYPE_CHECKING:
    from collections.abc import Callable


class _Verb(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return usage_pieces(self.get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])
        formatter.write(help_of(self, usage, self.get_params(ctx)))


class _Root(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  Typer's own signature
        formatter.write(overview())


class App(typer.Typer):
    """Application whose verbs are `_Verb`s."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Add a verb: `help` begins with its line of `ckptd --help`, `epilog` is its examples, one a line."""
        return super().command(name, cls=_Verb, **settings)


def new_app() -> App:
    """Return the application without a verb."""
    app = App(
        name="ckptd",
        cls=_Root,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        subcommand_metavar="COMMAND",
        options_metavar="",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "-V", "--version", callback=_version, is_eager=True),
    ) -> None:
        """Keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated."""

    return app


def _version(value: bool) -> None:
    if value:
        print(f"ckptd {__version__}")
        raise typer.Exit
