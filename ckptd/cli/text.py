"""Text that came from a remote or a file, fit for a terminal: no control character passes (P15)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text


def printable(text: str) -> str:
    """Control characters, line breaks and lone surrogates become `?`."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_everywhere(value: Any) -> Any:
    """`printable` of every text in a JSON value."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_everywhere(item) for item in value]
    if isinstance(value, dict):
        return {printable_everywhere(key): printable_everywhere(item) for key, item in value.items()}
    return value


def cell(text: str) -> Text:
    """A table's cell that shows `text` as it is: brackets in a path are no markup."""
    from rich.text import Text

    return Text(printable(text))


def say(line: str) -> None:
    """One line for stderr."""
    print(f"ckptd: {printable(line)}", file=sys.stderr, flush=True)


ENV_JOB = ["CKPTD_JOB", "CKPTD_SAVE_DIR"]
"""What names the job where the command line does not (docs/contract.md)."""
ENV_JOB_OR_URL = [*ENV_JOB, "CKPTD_URL"]
"""The same where a remote alone is enough."""
