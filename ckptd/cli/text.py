"""Text that came from a remote or a file, fit for a terminal: no control character passes (P15)."""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    """Control characters, line breaks and lone surrogates become `?`."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def say(line: str) -> None:
    """One line for stderr."""
    print(f"ckptd: {printable(line)}", file=sys.stderr, flush=True)
