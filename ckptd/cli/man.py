"""Write the manual page `ckptd(1)` from the commands themselves: `make man`, and what a wheel carries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd import __version__
from ckptd.cli.help import first_sentence, named_parameters, usage_pieces
from ckptd.cli.verbs import EXIT_CODES, GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABOUT = "Keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated."


def page() -> str:
    """Return the page as roff with the macros of man(7)."""
    from typer.main import get_group

    from ckptd.cli.main import build_app

    commands = get_group(build_app()).commands
    lines = [
        f'.TH CKPTD 1 "" "ckptd {__version__}" "User Commands"',
        ".SH NAME",
        f"ckptd \\- {_plain(_ABOUT[0].lower() + _ABOUT[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B ckptd",
        "COMMAND [OPTIONS]",
        ".SH COMMANDS",
    ]
    for title, verbs in GROUPS.items():
        lines.append(f".SS {_plain(title)}")
        for name in verbs:
            lines += _verb(name, commands[name])
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", f".B {code}", _plain(meaning)]
    return "\n".join(lines) + "\n"


def _verb(name: str, command: Any) -> Iterator[str]:
    parameters = [one for one in command.params if one.name != "help"]
    yield ".TP"
    yield f".B ckptd {name} {_plain(' '.join(usage_pieces(parameters)))}"
    sentence, details = first_sentence(command.help)
    yield _plain(sentence)
    for block in details.split("\n\n") if details else ():
        # a block of lines of its own is a table or a legend
        is_table = "\n" in block
        yield from (".RS", ".nf") if is_table else (".RS",)
        yield _plain(block)
        yield from (".fi", ".RE") if is_table else (".RE",)
    yield ".RS"
    for spelt, text in named_parameters(parameters):
        yield from (".TP", f".I {_plain(spelt)}", _plain(text))
    yield ".RE"
    if command.epilog:
        yield from (".RS", "For example:", ".nf", _plain(command.epilog), ".fi", ".RE")


def _plain(text: str) -> str:
    """Escape a text for roff: ASCII alone, no line of it is a request, and hyphens can be copied."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    escaped = "".join(one if one.isascii() else f"\\[u{ord(one):04X}]" for one in escaped)
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in escaped.split("\n"))


def main(arguments: list[str]) -> None:
    """Write the page to the file that is named, with its folder."""
    (name,) = arguments
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
