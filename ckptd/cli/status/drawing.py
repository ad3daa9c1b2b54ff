"""Draw `ckptd status` for a terminal of any width: clauses, prose, and tables of one line a row.

What is drawn is made for the width at the moment it is printed, so that a screen that is redrawn follows its
terminal. No line ends with blanks. Without UTF-8 `Screen` replaces each sign by one ASCII character.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from ckptd.cli.output import cell

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from rich.console import Console, ConsoleOptions

ELSEWHERE = 80
"""Columns where stdout is no terminal and COLUMNS says nothing."""
VERDICT_STYLES = {"SAFE": "green", "BEHIND": "yellow", "PAUSED": "yellow", "WAITING": ""}
"""Every other verdict is red."""
INDENT = "  "
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


@dataclass(frozen=True, slots=True)
class Drawing:
    """Make lines for a console and its width when they are printed."""

    lines: Callable[[Console, int], Iterable[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        """Yield the lines, which nobody breaks once more."""
        for line in self.lines(console, options.max_width):
            line.rstrip()
            line.no_wrap, line.overflow = True, "ignore"
            yield line


def headline(name: str, verdict: str, clauses: Sequence[str]) -> Drawing:
    """Draw the first line: the name, a dot and a word in the colour of the verdict, and clauses."""
    style = VERDICT_STYLES.get(verdict, "red")
    start = Text().append_text(cell(f"{name}  ", "bold")).append_text(cell(f"● {verdict}  ", f"bold {style}"))
    return _joined(start, [cell(clause) for clause in clauses])


def clauses_line(clauses: Sequence[str], style: str = "") -> Drawing:
    """Draw clauses, indented."""
    return _joined(cell(INDENT), [cell(clause, style) for clause in clauses])


def _joined(start: Text, clauses: Sequence[Text]) -> Drawing:
    """Join clauses by dots; a line is broken between two of them, and within one that is too long alone."""

    def lines(console: Console, width: int) -> Iterable[Text]:
        line = start.copy()
        for place, clause in enumerate(clauses):
            is_over = line.cell_len + 3 * bool(place) + clause.cell_len > width
            if is_over and (place or line.cell_len > width // 2):
                yield from _broken(console, line, width)
                line = Text(INDENT)
            elif place:
                line.append(" · ", "dim")
            line.append_text(clause)
        yield from _broken(console, line, width)

    return Drawing(lines)


def prose(text: str, style: str = "") -> Drawing:
    """Draw a sentence, indented, the lines after its first a little more."""
    return Drawing(lambda console, width: _broken(console, cell(f"{INDENT}{text}", style), width))


def _broken(console: Console, line: Text, width: int) -> Iterable[Text]:
    """Break a line between words."""
    if line.cell_len <= width or width <= 2 * len(INDENT):
        return [line]
    first, *others = line.wrap(console, width)
    rest = Text(" ").join(others)
    return [
        first,
        *(Text(2 * INDENT).append_text(one) for one in rest.wrap(console, width - 2 * len(INDENT))),
    ]


def table(titles: Sequence[str], rows: Sequence[Sequence[Text]], right: Collection[str] = ()) -> list[Text]:
    """Lay out a line of titles and one line a row; a column without content is left out."""
    shown = [n for n in range(len(titles)) if any(row[n] for row in rows)]
    every = [[cell(title, "dim") for title in titles], *rows]
    widths = {n: max(row[n].cell_len for row in every) for n in shown}
    lines = []
    for row in every:
        line = Text(INDENT)
        for place, n in enumerate(shown):
            blanks = " " * (widths[n] - row[n].cell_len)
            line.append(INDENT if place else "").append(blanks if titles[n] in right else "")
            line.append_text(row[n]).append("" if titles[n] in right else blanks)
        line.rstrip()
        lines.append(line)
    return lines


def explained(console: Console, width: int, lines: Sequence[Text], notes: Sequence[str]) -> Iterable[Text]:
    """Yield a table with a note to each row, the first to its titles: beside it, else below it."""
    beside = beside_rows(width, lines, notes)
    if beside is not None:
        yield from beside
        return
    yield lines[0]
    for row, note in zip(lines[1:], notes[1:], strict=True):
        yield row
        if note:
            yield from prose(f"{INDENT}{note}", "dim").lines(console, width)


def beside_rows(width: int, lines: Sequence[Text], notes: Sequence[str]) -> list[Text] | None:
    """Return a table with a note at the end of each row; None: there is no room for one of them."""
    noted = max(line.cell_len for line in lines) + len(INDENT)
    if noted + max(cell(note).cell_len for note in notes) > width:
        return None
    made = []
    for line, note in zip(lines, notes, strict=True):
        whole = line.copy()
        whole.pad_right(noted - line.cell_len)
        made.append(whole.append_text(cell(note, "dim")))
    return made


def bar(part: float, width: int) -> str:
    """Return a bar of eighth blocks.

    >>> bar(0.3, 5)
    '█▌   '
    """
    whole, rest = divmod(round(8 * width * min(1.0, max(0.0, part))), 8)
    return ("█" * whole + _EIGHTHS[rest]).ljust(width)
