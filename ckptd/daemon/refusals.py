"""What was refused, remembered until it is done or not wanted: stuck.py tells people of it.

What may go from here or from a remote and stays; what came late in a save and no remote's SUPPLEMENT lists.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.daemon.backoff import doubled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.errors import CkptdError

_FIRST_SECONDS, _MOST_SECONDS = 60.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """Why a checkpoint that may go from this node is still here."""

    text: str
    hint: str
    is_brief: bool
    """The trainer wrote meanwhile: it goes at the next look."""
    times: int = 1
    """In a row."""
    at_seconds: float = 0.0
    """The last time; monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a remote would not let go: how often in a row, and when last (monotonic)."""

    about: str
    text: str
    hint: str
    times: int
    at_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """Why files that came late in a save are not committed beside its COMMIT, while the remote works."""

    about: str
    text: str
    hint: str
    times: int
    """In a row."""
    at_seconds: float
    """The last time; monotonic."""


def unsent_again(before: Unsent | None, about: str, error: CkptdError) -> Unsent:
    """Once more."""
    return Unsent(
        about=about,
        text=f"{about}: files that came late are not committed: {error.message}",
        hint=error.hint or "tried again by itself, ever more seldom; the folder stays here until then",
        times=before.times + 1 if before is not None else 1,
        at_seconds=time.monotonic(),
    )


def unsent_lately(unsent: Mapping[tuple[int, str], Unsent]) -> frozenset[tuple[int, str]]:
    """(save id, remote) whose late files are tried again in a minute, two … an hour."""
    now = time.monotonic()
    return frozenset(
        at
        for at, one in unsent.items()
        if now - one.at_seconds < doubled(_FIRST_SECONDS, one.times, _MOST_SECONDS)
    )
