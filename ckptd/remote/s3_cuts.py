"""Where an upload is cut into parts: at borders that somebody chose, and evenly between them.

Without borders all parts but the last have one size. With borders each stretch between two of them is cut by
itself, so that a part never holds bytes from both sides of one (docs/adr/0111). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

LEAST_PART_BYTES = 5 << 20
"""Of every part but the last: what S3 asks for."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The parts of an upload of `size_bytes`, numbered from 1."""

    size_bytes: int
    part_bytes: int
    borders: tuple[int, ...] = ()
    """Ascending, at least `LEAST_PART_BYTES` apart."""

    @property
    def parts(self) -> int:
        """How many there are."""
        return len(_ends(self)) if self.borders else -(-self.size_bytes // self.part_bytes)

    def range_of(self, number: int) -> tuple[int, int]:
        """Offset and length of a part."""
        if self.borders:
            ends = _ends(self)
            begin = ends[number - 2] if number > 1 else 0
            return begin, ends[number - 1] - begin
        begin = (number - 1) * self.part_bytes
        return begin, min(self.part_bytes, self.size_bytes - begin)

    @property
    def text(self) -> str:
        """In a token; no colon."""
        return f"{self.part_bytes}" + (f"@{','.join(map(str, self.borders))}" if self.borders else "")


def parsed(text: str, size_bytes: int) -> Cuts | None:
    """What `Cuts.text` says; None: it is none of that size's."""
    size, _, rest = text.partition("@")
    words = rest.split(",") if rest else []
    if not size.isdecimal() or int(size) == 0 or not all(word.isdecimal() for word in words):
        return None
    borders = tuple(map(int, words))
    stretches = list(pairwise((0, *borders, size_bytes)))
    return Cuts(size_bytes, int(size), borders) if all(a < b for a, b in stretches) or not words else None


@lru_cache(maxsize=256)
def _ends(cuts: Cuts) -> tuple[int, ...]:
    found: list[int] = []
    for begin, end in pairwise((0, *cuts.borders, cuts.size_bytes)):
        length = end - begin
        count = max(1, min(-(-length // cuts.part_bytes), length // LEAST_PART_BYTES))
        found += [begin + length * n // count for n in range(1, count + 1)]
    return tuple(found)
