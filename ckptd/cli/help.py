"""Write the help of `ckptd` and of each verb: plain text that fits a terminal of 80 columns.

Typer's own help prints Python types (`<list[str]>`) and loads rich, which takes longer than all the rest.
"""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from ckptd.cli.verbs import EXIT_CODES, GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_WIDEST, _NARROWEST = 100, 60
_WIDEST_NAME = 26
"""Columns of a name beside its text; a longer one has a line of its own."""

_OPTIONS = (
    ("-h, --help", "Show this help; ckptd help COMMAND that of a command."),
    ("-V, --version", "Show the version; also ckptd version."),
    ("--install-completion", "Let the shell complete commands, jobs, tags and forms."),
    ("--show-completion", "Print that completion, to copy it."),
)


def overview() -> str:
    """Return `ckptd --help`."""
    width = max(len(name) for verbs in GROUPS.values() for name in verbs)
    blocks = [
        "Usage: ckptd COMMAND [OPTIONS]",
        "Keeps DeepSpeed checkpoints safe: complete, universal, uploaded, verified, rotated.",
    ]
    for title, verbs in GROUPS.items():
        rows = [f"  {name.ljust(width)}  {verb.summary}" for name, verb in verbs.items()]
        blocks.append("\n".join([f"{title}:", *rows]))
    blocks.append("\n".join(["Options:", *_table(_OPTIONS)]))
    blocks.append("\n".join(["Exit codes:", *_in_two_columns(EXIT_CODES)]))
    return "\n\n".join("\n".join(_wrapped(block)) if "\n" not in block else block for block in blocks)


def help_of(command: Any, usage: str, parameters: Sequence[Any]) -> str:
    """Return the help of one verb: usage, one sentence, details, arguments, options, examples.

    `command` and `parameters` are Typer's, which keeps the names of their classes to itself.
    """
    sentence, details = first_sentence(command.help)
    arguments = [(_name(one), _text(one)) for one in parameters if one.param_type_name == "argument"]
    options = [(_name(one), _text(one)) for one in parameters if one.param_type_name == "option"]
    blocks = [[f"Usage: {usage}"], _wrapped(sentence)]
    # a paragraph of several lines is a list, and stays as it is
    paragraphs = details.split("\n\n") if details else []
    blocks += [part.split("\n") if "\n" in part else _wrapped(part) for part in paragraphs]
    blocks += [["Arguments:", *_table(arguments)]] if arguments else []
    blocks += [["Options:", *_table(options)]]
    examples = (command.epilog or "").split("\n")
    blocks += [["Examples:" if len(examples) > 1 else "Example:", *(f"  {line}" for line in examples)]]
    return "\n\n".join("\n".join(block) for block in blocks)


def named_parameters(parameters: Iterable[Any]) -> list[tuple[str, str]]:
    """Return (as it is spelt, what it does) of each parameter that is shown."""
    return [(_name(one), _text(one)) for one in parameters if not getattr(one, "hidden", False)]


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text after its first sentence."""
    ends = [at + 1 for mark in ".?" if (at := text.find(f"{mark} ")) >= 0]
    end = min(ends, default=len(text))
    return text[:end], text[end:].strip()


def usage_pieces(parameters: Iterable[Any]) -> list[str]:
    """Return what follows the verb in its usage line: what has to be named, then `[OPTIONS]`."""
    pieces = []
    for one in parameters:
        if one.param_type_name == "argument":
            pieces.append(_value(one) if one.required else f"[{_value(one)}]")
        elif one.required:
            pieces.append(_name(one))
    return [*pieces, "[OPTIONS]"]


def _value(parameter: Any) -> str:
    """Return the word that stands for the value: N, DURATION, FILE."""
    if parameter.metavar:
        return str(parameter.metavar)
    name = str(parameter.name).upper()
    return name if parameter.param_type_name == "argument" else name.rpartition("_")[2]


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _value(parameter)
    # the stock converter's underscore spellings are taken, and shown nowhere
    spelt = ", ".join(sorted((one for one in parameter.opts if "_" not in one), key=len))
    return spelt if parameter.is_flag else f"{spelt} {_value(parameter)}"


def _text(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    if parameter.show_default and type(default) in (int, float, str) and default != "":
        text += f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."
    if parameter.envvar:
        names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar
        text += f" [env: {', '.join(names)}]"
    return text


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, _width() - indent, break_on_hyphens=False, break_long_words=False)


def _table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield lines of names, each beside its text."""
    width = max((len(name) for name, _ in rows if len(name) <= _WIDEST_NAME), default=_WIDEST_NAME)
    for name, text in rows:
        lines = _wrapped(text, width + 4) or [""]
        if len(name) > width:
            yield f"  {name}"
        beside = ["" if len(name) > width else name, *[""] * len(lines)]
        for left, line in zip(beside, lines, strict=False):
            yield f"  {left.ljust(width)}  {line}".rstrip()


def _in_two_columns(codes: dict[int, str]) -> Iterator[str]:
    cells = [f"{code:>4}  {meaning}" for code, meaning in codes.items()]
    half = -(-len(cells) // 2)
    for left, right in zip(cells[:half], [*cells[half:], ""], strict=False):
        yield f"{left:<40}{right}".rstrip()
