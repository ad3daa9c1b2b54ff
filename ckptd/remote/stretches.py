"""The CRC of a range whose bytes pass in any order, in several threads: CRCs of adjoining stretches combine.

What passes again counts once: the parts of an upload are hashed, sent, and sent again.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

_Stretch = tuple[int, int, int]
"""Begin, end, CRC."""


class Stretches:
    """What has passed of one range. `lock` may be shared by many of them: nothing is hashed under it."""

    __slots__ = ("_combined", "_crc", "_held", "_lock")

    def __init__(
        self,
        crc: Callable[[memoryview], int],
        combined: Callable[[int, int, int], int],
        lock: threading.Lock,
    ) -> None:
        self._crc = crc
        self._combined = combined
        self._lock = lock
        self._held: list[_Stretch] = []

    def feed(self, offset: int, data: memoryview) -> int:
        """Take `data`, which lies at `offset`; how much of it was new, in bytes."""
        count = 0
        for begin, end in self.gaps(offset, offset + len(data)):
            count += self._add((begin, end, self._crc(data[begin - offset : end - offset])))
        return count

    def take(self, offset: int, length: int, crc: int) -> None:
        """What passed elsewhere, with its CRC; left where some of it passed here."""
        if length and self.gaps(offset, offset + length) == [(offset, offset + length)]:
            self._add((offset, offset + length, crc))

    @property
    def passed(self) -> int:
        """How many bytes have."""
        with self._lock:
            return sum(end - begin for begin, end, _ in self._held)

    def crc_of(self, begin: int, end: int) -> int | None:
        """CRC of exactly this range; None while some of it has not passed."""
        with self._lock:
            held = self._held[0] if self._held else None
        return held[2] if held is not None and held[:2] == (begin, end) else None

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """What of that range has not passed."""
        gaps = []
        with self._lock:
            for begin, end, _ in self._held:
                if first < begin and first < last:
                    gaps.append((first, min(begin, last)))
                first = max(first, end)
        return [*gaps, (first, last)] if first < last else gaps

    def _add(self, stretch: _Stretch) -> int:
        """Join a stretch to its neighbours; 0 when another thread brought the same meanwhile."""
        with self._lock:
            held = self._held
            at = bisect.bisect_left(held, stretch)
            before = held[at - 1][1] if at else stretch[0]
            after = held[at][0] if at < len(held) else stretch[1]
            if before > stretch[0] or after < stretch[1]:
                return 0
            held.insert(at, stretch)
            for left in (at, at - 1):
                if 0 <= left < len(held) - 1 and held[left][1] == held[left + 1][0]:
                    (begin, _, crc), (second, end, more) = held[left : left + 2]
                    held[left : left + 2] = [(begin, end, self._combined(crc, more, end - second))]
        return stretch[1] - stretch[0]
