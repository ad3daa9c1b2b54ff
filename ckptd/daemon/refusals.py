"""What may go and was refused to go, remembered until it goes or is kept: stuck.py tells people of it."""

from __future__ import annotations

from dataclasses import dataclass


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

    remote: str
    about: str
    text: str
    hint: str
    times: int
    at_seconds: float
