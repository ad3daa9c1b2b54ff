"""How many remotes' children live at once: as many as `memory_budget` has room for (docs/adr/0135, P12).

Where there is room for all, each lasts. Where there is not, one that has nothing to do makes room for the
next in line, whose orders wait until then. Everything here is called in the deciding thread.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Guest(Protocol):
    """Whoever has a child."""

    def make_room(self) -> bool:
        """End the child if it has nothing to do; whether it is gone."""

    def begin(self) -> None:
        """Its turn has come: it has a place."""


class Places:
    """First come, first served; `count` may change at any time, and nobody is sent away from an order."""

    def __init__(self, count: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._count = count
        self._here: list[Guest] = []
        self._waiting: list[Guest] = []

    @property
    def is_crowded(self) -> bool:
        """Somebody waits."""
        return bool(self._waiting)

    def take(self, who: Guest) -> bool:
        """Whether `who` has a place; else it waits in line, and `begin` is called when it has."""
        if who not in self._here and who not in self._waiting:
            self._waiting.append(who)
            self._admit(but=who)
        return who in self._here

    def leave(self, who: Guest) -> None:
        """It neither has a place nor waits for one any more."""
        self._here = [one for one in self._here if one is not who]
        self._waiting = [one for one in self._waiting if one is not who]

    def settle(self) -> None:
        """After all turns: whose turn is over makes room, and those who wait begin."""
        self._admit()

    def _admit(self, but: Guest | None = None) -> None:
        count = self._count()
        self._make_room(count)
        while self._waiting:
            self._make_room(count - 1)
            if len(self._here) >= count:
                return
            who = self._waiting.pop(0)
            self._here.append(who)
            if who is not but:
                who.begin()

    def _make_room(self, most: int) -> None:
        """The last that came goes first: those before it last, instead of all being started again in turn."""
        for one in reversed(self._here.copy()):
            if len(self._here) <= most:
                return
            if one.make_room():
                self._here.remove(one)
