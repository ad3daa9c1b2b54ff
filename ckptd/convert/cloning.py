"""Which part of a range can share extents with its source: one rule for executor, planner and forecast.

Extents are shared in whole blocks, so the range must lie at the same offset modulo the block in both files;
below 16 KiB a clone costs more than a copy (docs/design.md §4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.convert.parts import Range
from ckptd.torchfile.skeleton import BLOCK_BYTES

if TYPE_CHECKING:
    from ckptd.convert.plan import OutputFile

MIN_CLONE_BYTES = 16 << 10


def interior(offset: int, nbytes: int, at: int) -> tuple[int, int] | None:
    """Begin and end in the source of what can be cloned to `at` in the output; None where nothing can."""
    begin = offset + (-offset) % BLOCK_BYTES
    end = (offset + nbytes) // BLOCK_BYTES * BLOCK_BYTES
    if (offset - at) % BLOCK_BYTES or end - begin < MIN_CLONE_BYTES:
        return None
    return begin, end


@dataclass(slots=True)
class Tally:
    """Bytes of a plan by how they get into the outputs."""

    clonable: int = 0
    misplaced: int = 0
    """In ranges large enough for a clone whose offsets do not agree: copied even where extents clone."""

    def add(self, output: OutputFile) -> None:
        """Count one output."""
        at = 0
        for part in output.parts:
            if isinstance(part, Range):
                inside = interior(part.offset, part.nbytes, at)
                if inside is not None:
                    self.clonable += inside[1] - inside[0]
                elif part.nbytes >= MIN_CLONE_BYTES + BLOCK_BYTES:
                    self.misplaced += part.nbytes
            at += part.nbytes
