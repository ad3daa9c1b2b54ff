"""Small files of one lane, several on their way at a time, their answers waited for in order (adr/0101).

A lane that waits for each answer costs a thread per file on its way, and threads of Python stand in each
other's way. What a store offers for it (`flights`, `begin`) is optional; without it lanes do the same.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.remote.messages import ShipFile
    from ckptd.remote.store import Progress, Source, Store

SMALL_BYTES = 8 << 20
"""What is sent beside others; larger files go in order, one after the other."""
_SMALL_EXTRA_BYTES = 1 << 20
"""The same for a file that is held in memory."""
FLYING_LANES = 2
TINY_BYTES = 1 << 20
"""What may fly."""
_MOST_BYTES = 4 << 20
"""Held by one lane: a file stays in memory until its answer came."""


class Started(Protocol):
    """An object on its way."""

    def end(self, on_progress: Callable[[Progress], None]) -> int:
        """As `Store.upload` ends."""
        ...

    def abandon(self) -> None:
        """Nobody waits for it any more; whether it arrived is found out by who sends it again."""
        ...


def is_small(file: ShipFile) -> bool:
    """Whether it goes beside others."""
    return file.bytes <= (_SMALL_EXTRA_BYTES if file.is_extra and file.inline is None else SMALL_BYTES)


class _Offers(Protocol):
    """A store that can do so."""

    def begin(self, key: str, source: Source) -> Started | None:
        """Read and send; None where that is not possible now."""
        ...


def flights(store: Store) -> int:
    """How many small objects one lane may have on their way; 0: the store offers no such thing now."""
    return int(getattr(store, "flights", 0))


def overlap(store: Store) -> int:
    """How many large objects may be under way at a time, the parts of the first one before the others'."""
    return int(getattr(store, "overlap", 1))


def begin(store: Store, key: str, source: Source) -> Started | None:
    """Read and send a small object where nothing lies; None: `upload` it."""
    return cast("_Offers", store).begin(key, source)


class Fleet:
    """How flying lanes work: `begin` a file (None: leave it to `otherwise`), `end` it when its turn comes."""

    def __init__(
        self,
        store: Store,
        begin: Callable[[ShipFile], Started | None],
        end: Callable[[ShipFile, Started], None],
        otherwise: Callable[[ShipFile], None],
    ) -> None:
        self._store = store
        self._begin = begin
        self._end = end
        self._otherwise = otherwise

    def ship(self, files: deque[ShipFile]) -> None:
        """One lane: takes from `files`, which it shares with others, until there is none."""
        under_way: deque[tuple[ShipFile, Started]] = deque()
        held_bytes, most = 0, flights(self._store)
        try:
            while (file := next_of(files)) is not None:
                started = self._begin(file)
                if started is None:
                    self._otherwise(file)
                    continue
                under_way.append((file, started))
                held_bytes += file.bytes
                while len(under_way) > most or held_bytes > _MOST_BYTES:
                    oldest = under_way.popleft()
                    held_bytes -= oldest[0].bytes
                    self._end(*oldest)
            while under_way:
                self._end(*under_way.popleft())
        finally:
            for _file, started in under_way:
                started.abandon()


def next_of(files: deque[ShipFile]) -> ShipFile | None:
    """The next of what several threads share; None: there is none."""
    try:
        return files.popleft()
    except IndexError:
        return None
