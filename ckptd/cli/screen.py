"""Provide the console of every verb: texts are shown as they are, whatever a name contains (P15).

Rich takes brackets for markup and `:name:` for emoji, and passes escape sequences on; names of checkpoints,
files and nodes come from outside. Cells are made by `cell`; this console covers whatever is forgotten there.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment

from ckptd.base.humanize import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO

    from rich.console import ConsoleOptions, RenderableType

ELSEWHERE = 200
"""Columns where stdout is no terminal and COLUMNS says nothing."""
_ASCII = str.maketrans("●✓✗○█▉▊▋▌▍▎▏→·–…", "*+xo####====>--.")
"""Characters for the signs of ckptd where they cannot be shown: one character each, so that lines keep
their width."""


class Screen(Console):
    """No markup, no emoji, no highlighting; only rich's own controls reach the terminal."""

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, file: IO[str] | None = None
    ) -> None:
        """`width`: columns; None: as wide as the terminal."""
        super().__init__(markup=False, emoji=False, highlight=False, stderr=stderr, width=width, file=file)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like rich, but escape characters that a terminal would obey, and those it cannot show."""
        shown = self._shown(super().render(renderable, options))
        return shown if self.is_terminal else _without_padding(shown)

    def _shown(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        is_plain = self.is_dumb_terminal or not self.encoding.startswith("utf")
        for segment in segments:
            text, style, control = segment
            if control or text == "\n" or (text.isprintable() and not is_plain):
                yield segment
                continue
            shown = "\n".join(map(printable, text.split("\n")))
            if is_plain:
                shown = shown.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)
            yield Segment(shown, style)


def _without_padding(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Leave out the blanks with which a table fills its lines: a file has no right edge."""
    blanks: list[Segment] = []
    for text, style, control in segments:
        if control:
            yield Segment(text, style, control)
            continue
        for line in text.splitlines(keepends=True):
            words = line.rstrip(" \n")
            if words:
                yield from blanks
                yield Segment(words, style)
            if line.endswith("\n"):
                blanks = []
                yield Segment("\n")
            else:
                blanks = [*(() if words else blanks), Segment(line[len(words) :], style)]
    yield from blanks


def screen(elsewhere: int = ELSEWHERE) -> Screen:
    """Return the console of stdout; `elsewhere`: its columns where that is no terminal."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else elsewhere
    return Screen(width=None if sys.stdout.isatty() else width)
