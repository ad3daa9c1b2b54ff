"""Saves that were cut short: never deleted by themselves (P5), so people must see what they cost (H23)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.config_places import command_for
from ckptd.core.lifecycle import State

if TYPE_CHECKING:
    from ckptd.daemon.job import Job
    from ckptd.daemon.state import JobState

_CUT_SHORT = (State.INCOMPLETE, State.TORN_RESAVE)


def unfinished(state: JobState) -> tuple[str, ...]:
    """Tags of incomplete and torn saves, the largest first."""
    tags = (tag for tag, verdict in state.verdicts.items() if verdict.state in _CUT_SHORT)
    return tuple(sorted(tags, key=lambda tag: -bytes_of(state, tag)))


def bytes_of(state: JobState, tag: str) -> int:
    """What lies in its folder."""
    folders = state.listing.folders if state.listing else ()
    return next((folder.total_bytes for folder in folders if folder.tag == tag), 0)


def removal(job: Job, tag: str) -> str:
    """The command for a person who has given it up."""
    return command_for(job.config, "gc", "--incomplete", tag)
