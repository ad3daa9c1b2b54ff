"""Saves that were cut short: never deleted by themselves (P5), so people must see what they cost (H23)."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ckptd.config_places import command_for
from ckptd.core.lifecycle import State
from ckptd.local import fs
from ckptd.place import path_of

if TYPE_CHECKING:
    from ckptd.daemon.job import Job
    from ckptd.daemon.state import JobState

_CUT_SHORT = (State.INCOMPLETE, State.TORN_RESAVE)


def unfinished(state: JobState) -> dict[str, int]:
    """Tag → bytes in its folder, of incomplete and torn saves, the largest first."""
    tags = {tag for tag, verdict in state.verdicts.items() if verdict.state in _CUT_SHORT}
    folders = state.listing.folders if state.listing else ()
    sizes = dict.fromkeys(tags, 0) | {f.tag: f.total_bytes for f in folders if f.tag in tags}
    return dict(sorted(sizes.items(), key=lambda row: (-row[1], row[0])))


def removal(job: Job, tag: str) -> str:
    """The command for a person who has given it up."""
    return command_for(job.config, "gc", "--incomplete", tag)


def removal_of_hold(job: Job, name: str) -> str:
    """For a person who wants the room of a hold that is no known save's."""
    place = path_of(job.config.save_dir, f"{fs.HOLD}/{name}")
    return f"rm -r {shlex.quote(str(place))}"
