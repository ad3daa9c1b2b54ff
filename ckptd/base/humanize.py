"""Say spans of time and runs of ranks as people read them; make any text fit for their terminal."""

from __future__ import annotations

import pwd
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """Replace control characters, line breaks, marks that turn the direction and lone surrogates by `?`.

    >>> printable("step5\\x1b[2J\\n\\u202e")
    'step5?[2J??'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def printable_everywhere(value: Any) -> Any:
    """Apply `printable` to every text in a JSON value, or in a record of such values."""
    if isinstance(value, str):
        return printable(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, list):
        return [printable_everywhere(item) for item in value]
    if isinstance(value, dict):
        named = {printable_everywhere(key): printable_everywhere(item) for key, item in value.items()}
        return value if named == value else named
    if isinstance(value, tuple):
        listed = tuple([printable_everywhere(item) for item in value])
        return value if listed == value else listed
    if is_dataclass(value) and not isinstance(value, type):
        told = [(field.name, getattr(value, field.name)) for field in fields(value)]
        shown = {name: other for name, one in told if (other := printable_everywhere(one)) is not one}
        return replace(value, **shown) if shown else value
    return value


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows of texts as lines, indented, without columns that are empty below their title.

    >>> in_columns([("tag", "step", ""), ("global_step5", "5", "")])
    ['  tag           step', '  global_step5  5']
    """
    shown = [n for n in range(len(rows[0])) if any(row[n] for row in rows[1:])]
    widths = [max(len(row[n]) for row in rows) for n in shown]
    cells = ([printable(row[n]).ljust(width) for n, width in zip(shown, widths, strict=True)] for row in rows)
    return [f"  {'  '.join(row)}".rstrip() for row in cells]


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Say runs of ranks in words.

    >>> ranks_in_words([8, 9, 10, 3])
    '3, 8-10'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def user_in_words(uid: int) -> str:
    """`alice (1001)`, or the number alone."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def ago(seconds: float | None) -> str:
    """Say a span in one unit; one that is not positive is no time, and None is not known.

    >>> ago(840), ago(2), ago(7300), ago(None)
    ('14 min', '2 s', '2 h', '?')
    """
    if seconds is None:
        return "?"
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{max(0.0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def size_of(count: float) -> str:
    """Return bytes in words, with three digits.

    >>> size_of(12_000_000_000), size_of(800e9), size_of(999)
    ('12.0 GB', '800 GB', '999 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._=+-")
"""Characters that the name of a job, a remote or a node may have."""
