"""Run `ckptd`: load only the module of the verb that was asked for, and turn errors into exit codes.

Loading one verb keeps `ckptd status` fast: nothing it does not need is imported (docs/design.md §7).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import typer

from ckptd import __version__
from ckptd.base.humanize import printable
from ckptd.errors import CkptdError, UsageError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Sequence


VERBS: tuple[str, ...] = (
    "run",
    "status",
    "reload",
    "drain",
    "wait",
    "pause",
    "unpause",
    "check",
    "init",
    "inspect",
    "convert",
    "resume",
    "restore",
    "list",
    "verify",
    "pin",
    "unpin",
    "accept",
    "adopt",
    "gc",
    "takeover",
    "remove",
    "install-service",
    "uninstall-service",
)
"""In the order of `ckptd --help`."""

_MODULES = {
    "run": "daemon.run",
    "status": "status.command",
    "reload": "daemon.reload",
    "drain": "daemon.drain",
    "wait": "daemon.wait",
    "pause": "daemon.pause",
    "unpause": "daemon.pause",
    "check": "setup.check",
    "init": "setup.init",
    "inspect": "checkpoints.inspect",
    "convert": "checkpoints.convert",
    "resume": "checkpoints.resume",
    "restore": "checkpoints.restore",
    "list": "checkpoints.listing",
    "verify": "checkpoints.verify",
    "pin": "checkpoints.pin",
    "unpin": "checkpoints.pin",
    "accept": "checkpoints.pin",
    "adopt": "checkpoints.pin",
    "gc": "checkpoints.gc",
    "takeover": "setup.takeover",
    "remove": "setup.remove",
    "install-service": "setup.service",
    "uninstall-service": "setup.service",
}
"""The module of `ckptd.cli` whose function `register(app)` adds the verb."""

EPILOG = (
    "Exit codes: 0 done, safe · 1 a person is needed · 2 usage · 3 behind · 4 nothing committed: start fresh "
    "· 65 damaged or refused · 66 not found · 69 remote unreachable or not ours · 73 target exists · 74 I/O "
    "or no space · 75 another daemon owns it · 77 permission · 78 configuration"
)


def _version(value: bool) -> None:
    if value:
        print(f"ckptd {__version__}")
        raise typer.Exit


def build_app(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """Build the Typer application with the modules of `verbs` registered."""
    app = typer.Typer(
        name="ckptd",
        help="Keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        epilog=EPILOG,
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it."),
    ) -> None:
        """Keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated."""

    for module in dict.fromkeys(_MODULES[verb] for verb in verbs):
        importlib.import_module(f"ckptd.cli.{module}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run `ckptd`; never shows a traceback for an error of the tree (CKPTD_DEBUG=1 does)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    verbs = (wanted,) if wanted in VERBS else VERBS
    try:
        _refuse_empty(arguments)
        if arguments[:1] == ["status"]:
            _show_status(arguments[1:])
        build_app(verbs)(arguments, prog_name="ckptd")
    except CkptdError as error:
        _fail(error)
    except OSError as error:
        _fail(from_os_error(error, str(error.filename or "I/O")))
    except KeyboardInterrupt:
        sys.exit(130)


def _show_status(arguments: Sequence[str]) -> None:
    """Run `ckptd status` and exit, or return where Typer has to print help or a usage error.

    Typer loads pydantic to turn a text into a text, which is half of what `status` takes (docs/adr/0197).
    """
    command = importlib.import_module(f"ckptd.cli.{_MODULES['status']}")
    options = command.parse(arguments)
    if options is None:
        return
    try:
        code = command.show(**vars(options))
        sys.stdout.flush()
    except BrokenPipeError:  # `ckptd status | head`: what Typer does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty argument: it would mean the working directory, or a tag without a name."""
    before = ""
    for argument in arguments:
        if not argument and not before.startswith("--"):
            msg = "an argument is empty"
            raise UsageError(msg, hint="an unset variable? write the directory, `.` for this one")
        before = argument


def _fail(error: CkptdError) -> None:
    if os.environ.get("CKPTD_DEBUG") == "1":
        raise error
    # anything that a terminal would obey came from a file or a remote; so may a line break, which shows
    for text in (f"ckptd: {error.message}", f"  → {error.hint}" if error.hint else ""):
        if text:
            print("\n  | ".join(map(printable, text.split("\n"))), file=sys.stderr)
    sys.exit(error.exit_code)
