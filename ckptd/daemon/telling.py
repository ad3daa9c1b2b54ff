"""Decisions that a remote lacks are published there again (P8, adr/0165).

`ckptd pin` puts its word into the remotes of that moment. One that is added later, or that was put back from
a snapshot, has it only from here: nodes that know nothing but that remote would let the checkpoint go (P5).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.decision import lacking
from ckptd.daemon.processes import error_of
from ckptd.errors import DamagedError, RefusedError, RemoteNotOurs, RemoteUnreachable
from ckptd.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.core.decision import Decision
    from ckptd.daemon.links import RemoteLink
    from ckptd.daemon.state import JobState
    from ckptd.errors import CkptdError

log = logging.getLogger("ckptd.decisions")

_AGAIN_SECONDS = 60.0
"""A store that lists late does not show at once what was put there."""
_GONE = (RemoteUnreachable, RemoteNotOurs)
_OF_ONE = (DamagedError, RefusedError)
"""What the remote holds on one subject cannot be read: the others are published all the same."""


@dataclass
class _Told:
    """What was done about one remote."""

    basis: tuple[tuple[Decision, ...], tuple[Decision, ...]] = ((), ())
    """What was compared: words that are known here, decisions that it showed."""
    lacks: tuple[Decision, ...] = ()
    left: list[Decision] = field(default_factory=list)
    """To be ordered, the first is under way."""
    asked: tuple[Decision, ...] = ()
    """All that was ordered then."""
    looked_at_seconds: float | None = None
    """The look after which it was last asked: once for each."""
    done: tuple[Decision, ...] = ()
    """Durable there, as it said `done_at_seconds`."""
    done_at_seconds: float = 0.0


class Telling:
    """Of one job; every method is called in the deciding thread."""

    def __init__(self, state: JobState, links: Mapping[str, RemoteLink], wake: Callable[[], None]) -> None:
        self._state = state
        self._links = links
        self._wake = wake
        self._told = {name: _Told() for name in links}

    def turn(self, words: tuple[Decision, ...]) -> None:
        """Compare with what each remote showed last, and order what it lacks: one at a time, once a look."""
        for name, link in self._links.items():
            told, seen = self._told.setdefault(name, _Told()), link.observation
            if seen is None:
                continue  # nothing is retired from it either
            if (basis := (words, seen.decisions)) != told.basis:
                told.basis, told.lacks = basis, lacking(*basis)
            if not told.lacks:
                self._state.untold.discard(name)
                self._state.problems.clear("decision-unpublished", name)
                continue
            self._state.untold.add(name)
            if self._is_due(link, told):
                told.asked, told.left = told.lacks, list(told.lacks)
                told.looked_at_seconds = link.observed_at_seconds
                self._order(link, told)

    def _is_due(self, link: RemoteLink, told: _Told) -> bool:
        if told.left or not link.is_ready or told.looked_at_seconds == link.observed_at_seconds:
            return False
        return told.lacks != told.done or time.monotonic() - told.done_at_seconds >= _AGAIN_SECONDS

    def _order(self, link: RemoteLink, told: _Told) -> None:
        link.order(m.Record(decision=told.left[0]), partial(self._recorded, link, told))

    def _recorded(self, link: RemoteLink, told: _Told, answer: m.Answer) -> None:
        word = told.left.pop(0)
        if isinstance(answer, m.Failed):
            error = error_of(answer)
            self._not_recorded(link, word, error)
            if not isinstance(error, _OF_ONE):
                told.left.clear()
                return
        else:
            log.info("%s %s is known to %s too", word.kind, word.tag, link.name)
        if told.left:
            self._order(link, told)
            return
        # what could not be read there is asked again after `_AGAIN_SECONDS`: each look would be too often
        told.done, told.done_at_seconds = told.asked, time.monotonic()
        link.changed()
        link.observe()
        self._wake()

    def _not_recorded(self, link: RemoteLink, word: Decision, error: CkptdError) -> None:
        log.warning("%s %s is not published to %s: %s", word.kind, word.tag, link.name, error)
        if isinstance(error, _GONE):
            link.trouble(error)
            return
        text = f"{link.name} lacks what was decided ({word.kind} {word.tag}): {error.message}"
        next_step = error.hint or "it is tried again at the next look"
        self._state.problems.put("decision-unpublished", link.name, text, next_step)
        self._wake()
