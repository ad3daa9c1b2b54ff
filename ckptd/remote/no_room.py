"""Objects that found no room in a remote: when they are begun again (docs/adr/0161).

Whoever begins one in vain sends its bytes for nothing. Blocks are counted by the file system; a quota
(Lustre, GPFS, NFS) often shows in no count, so after one was met only time or a removal is reason to try.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_QUOTA_SECONDS, _QUOTA_MOST_SECONDS = 60.0, 900.0
"""After a quota an object is begun again after so long, twice as long each further time."""
_MOST_DOUBLINGS = 6


class NoRoom:
    """Of one store in one process, which its lanes share."""

    def __init__(self) -> None:
        self._lacked: dict[str, tuple[int, float]] = {}
        """Key → how often in a row, until when (monotonic) a count of free blocks is not believed."""

    def is_in_vain(self, key: str, size_bytes: int, free_bytes: Callable[[], int | None]) -> bool:
        """Whether to begin it would send its bytes for nothing, as far as anybody can tell."""
        tries, until_seconds = self._lacked.get(key, (0, 0.0))
        return tries > 0 and (time.monotonic() < until_seconds or (free_bytes() or 0) < size_bytes)

    def missed(self, key: str, size_bytes: int, free_bytes: int | None) -> None:
        """It found none; `free_bytes`: as counted then, None: not known."""
        tries = self._lacked.get(key, (0, 0.0))[0]
        has_quota = free_bytes is not None and free_bytes >= size_bytes
        wait_seconds = min(_QUOTA_SECONDS * 2 ** min(tries, _MOST_DOUBLINGS), _QUOTA_MOST_SECONDS)
        self._lacked[key] = (tries + 1, time.monotonic() + wait_seconds if has_quota else 0.0)

    def found(self, key: str) -> None:
        """It is there."""
        self._lacked.pop(key, None)

    def freed(self) -> None:
        """Something was removed there: a quota may have room again."""
        self._lacked = {key: (tries, 0.0) for key, (tries, _) in list(self._lacked.items())}
