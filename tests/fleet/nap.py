"""Turns that nothing can come of are not lived: what they ask is drawn and counted, and that is all.

A daemon at rest looks again and again at a remote that nobody changed, and decides each time what it decided
before. Until somebody changes what it looks at, or something becomes due, only the clock matters: when which
request is under way, and whether one is refused. Whoever is woken goes on in the very middle of it, so that a
history is the same with naps and without (`test_naps_change_nothing`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from ckptd.storage.stores.base import ObjectInfo
    from tests.fleet.remote import FleetStore

OBSERVE_SECONDS = 10.0
PAUSE_SECONDS = 5.0
MOST_MORE_SECONDS = 10.0
"""After a request without answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a look, and its answer."""

    verb: str
    key: str
    requests: int
    found: bytes | None = None
    listed: Sequence[ObjectInfo] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """A whole look at the remote that nobody changed meanwhile: what it asks as long as nobody does."""

    version: int
    """`Remote.version` all the while."""
    asked: tuple[Asked, ...]


class Phase(enum.Enum):
    """What a daemon that decides nothing is in the middle of."""

    REST = "rest"
    ASK = "ask"
    PAUSE = "pause"


class Nap:
    """Where in its turns a daemon would be."""

    def __init__(
        self,
        look: Look,
        store: FleetStore,
        chance: Random,
        late_looks: float,
        *,
        now: float,
        observed_at: float,
        rest_seconds: float,
    ) -> None:
        self.look = look
        self.phase = Phase.REST
        self.ends = now + rest_seconds
        """When the phase is over."""
        self.step = 0
        """Of a look: which request is under way."""
        self.began = observed_at
        """Of a look: when."""
        self.observed_at = observed_at
        self.has_failed = False
        """The last look got no answer."""
        self._store = store
        self._chance = chance
        self._late_looks = late_looks
        self._rest_seconds = rest_seconds

    def advance(self, now: float) -> None:
        """Go on up to that time."""
        while self.ends <= now:
            if self.phase is Phase.REST:
                self._turn()
            elif self.phase is Phase.PAUSE:
                self._ask_first()
            else:
                self._answered()

    def _turn(self) -> None:
        is_due = self.ends - self.observed_at >= OBSERVE_SECONDS
        is_late = self._chance.random() < self._late_looks
        if is_due and not is_late:
            self._ask_first()
        else:
            self.ends += self._rest_seconds

    def _ask_first(self) -> None:
        self.phase, self.step, self.began = Phase.ASK, 0, self.ends
        self._ask()

    def _ask(self) -> None:
        asked = self.look.asked[self.step]
        self.ends += self._store.delay_seconds(asked.verb, asked.requests)

    def _answered(self) -> None:
        if self._store.is_refused():
            self.phase, self.has_failed = Phase.PAUSE, True
            self.ends += PAUSE_SECONDS + MOST_MORE_SECONDS * self._chance.random()
            return
        self.step += 1
        if self.step < len(self.look.asked):
            self._ask()
        else:
            self.phase, self.has_failed, self.observed_at = Phase.REST, False, self.began
            self.ends += self._rest_seconds
