"""Run `ckptd`: load only the module of the verb that was asked for, and turn errors into exit codes.

Loading one verb keeps `ckptd status` fast: nothing it does not need is imported (docs/design.md §7).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from ckptd import __version__
from ckptd.base.humanize import printable
from ckptd.cli.completion import VARIABLE, verb_asked
from ckptd.cli.verbs import OLD_NAMES, OTHER_NAMES, VERBS
from ckptd.errors import CkptdError, UsageError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import typer


def build_app(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """Build the Typer application with the modules of `verbs` registered."""
    from ckptd.cli.app import new_app

    app = new_app()
    for module in dict.fromkeys(VERBS[verb].module for verb in verbs):
        importlib.import_module(f"ckptd.cli.{module}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run `ckptd`; never shows a traceback for an error of the tree (CKPTD_DEBUG=1 does)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _refuse_empty(arguments)
        is_completion = VARIABLE in os.environ
        if not is_completion:
            _answer(arguments)
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        arguments = _with_todays_name(arguments)
        if arguments[:1] == ["status"]:
            _show_status(arguments[1:])
        named = (a for a in arguments if not a.startswith("-"))
        wanted = verb_asked(os.environ) if is_completion else next(named, None)
        verbs = (wanted,) if wanted in VERBS else VERBS
        build_app(verbs)(arguments, prog_name="ckptd")
    except CkptdError as error:
        _fail(error)
    except BrokenPipeError:  # `ckptd status | head`: what Typer does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(from_os_error(error, str(error.filename or "I/O")))
    except KeyboardInterrupt:
        sys.exit(130)


def _answer(arguments: Sequence[str]) -> None:
    """Print help or the version where nothing else is asked for, and exit: nothing has to be loaded."""
    if list(arguments) in (["version"], ["-V"], ["--version"]):
        print(f"ckptd {__version__}")
    elif list(arguments) in ([], ["help"], ["-h"], ["--help"]):
        from ckptd.cli.help import overview
        from ckptd.cli.output import print_line

        for line in overview().splitlines():
            print_line(line)
    else:
        return
    sys.stdout.flush()
    sys.exit(0 if arguments else UsageError.exit_code)


def _with_todays_name(arguments: list[str]) -> list[str]:
    """Return the arguments with a verb's other name replaced; of an old one that is said."""
    if arguments and arguments[0] in OTHER_NAMES:
        return [*OTHER_NAMES[arguments[0]], *arguments[1:]]
    if not arguments or arguments[0] not in OLD_NAMES:
        return arguments
    from ckptd.cli.output import print_note

    now = OLD_NAMES[arguments[0]]
    print_note(f"`ckptd {arguments[0]}` is `ckptd {' '.join(now)}` now; the next release takes that alone")
    return [*now, *arguments[1:]]


def _show_status(arguments: Sequence[str]) -> None:
    """Run `ckptd status` and exit, or return where Typer has to print help or a usage error.

    Typer loads pydantic to turn a text into a text, which is half of what `status` takes (docs/adr/0197).
    """
    command = importlib.import_module(f"ckptd.cli.{VERBS['status'].module}")
    options = command.parse(arguments)
    if options is None:
        return
    code = command.show(**vars(options))
    sys.stdout.flush()
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
