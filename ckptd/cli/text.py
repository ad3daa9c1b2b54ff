"""Text that came from a remote or a file, fit for a terminal: no control character passes (P15).

Whatever goes to a terminal goes through here: a cell or a line that is shown as it is, or `Screen`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckptd.words import printable

if TYPE_CHECKING:
    from rich.text import Text


def printable_everywhere(value: Any) -> Any:
    """`printable` of every text in a JSON value."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_everywhere(item) for item in value]
    if isinstance(value, dict):
        return {printable_everywhere(key): printable_everywhere(item) for key, item in value.items()}
    return value


def cell(text: str, style: str = "") -> Text:
    """A table's cell, title or line that shows `text` as it is: brackets in a path are no markup."""
    from rich.text import Text

    return Text(printable(text), style=style)


def cells(*texts: str) -> list[Text]:
    """A row of them."""
    return [cell(text) for text in texts]


def tell(line: str) -> None:
    """One line for stdout."""
    print(printable(line))


def say(line: str) -> None:
    """One line for stderr."""
    print(f"ckptd: {printable(line)}", file=sys.stderr, flush=True)


def answer(path: str) -> None:
    """What a script takes from stdout, byte for byte; on a terminal a name may not do more than be read."""
    print(printable(path) if sys.stdout.isatty() else path)


__all__ = [
    "ENV_JOB",
    "ENV_JOB_OR_URL",
    "answer",
    "cell",
    "cells",
    "printable",
    "printable_everywhere",
    "say",
    "tell",
]

ENV_JOB = ["CKPTD_JOB", "CKPTD_SAVE_DIR"]
"""What names the job where the command line does not (docs/contract.md)."""
ENV_JOB_OR_URL = [*ENV_JOB, "CKPTD_URL"]
"""The same where a remote alone is enough."""
