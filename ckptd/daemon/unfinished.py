"""Saves that will never be safe as they are: never deleted by themselves (P5), so people must see what they
cost, and the command for each (H23)."""

from __future__ import annotations

import errno
import os
import shlex
from typing import TYPE_CHECKING

from ckptd.config_places import command_for
from ckptd.core.lifecycle import State
from ckptd.core.view import ZERO, ShipState
from ckptd.local import fs
from ckptd.local.rights import user
from ckptd.place import path_of

if TYPE_CHECKING:
    from ckptd.core.rows import SaveRow
    from ckptd.core.view import ShipRecord
    from ckptd.daemon.job import Job
    from ckptd.daemon.state import JobState

REMOVES = "removes it"
_CUT_SHORT = (State.INCOMPLETE, State.TORN_RESAVE, State.SUSPECT)


def unfinished(state: JobState) -> dict[str, int]:
    """Tag → bytes in its folder, of incomplete, torn, doubtful and damaged saves, the largest first."""
    tags = {tag for tag, verdict in state.verdicts.items() if verdict.state in _CUT_SHORT}
    tags |= {row.save.tag for row in state.rows.values() if damage(state, row) is not None}
    folders = state.listing.folders if state.listing else ()
    sizes = dict.fromkeys(tags, 0) | {f.tag: f.total_bytes for f in folders if f.tag in tags}
    return dict(sorted(sizes.items(), key=lambda row: (-row[1], row[0])))


def damage(state: JobState, row: SaveRow) -> str | None:
    """What is wrong with the bytes of a save that lies here; None: nothing that is known."""
    records = state.ships.get(row.id, {}).values() if row.state == "present" else ()
    wrong = (r for r in records if r.form == ZERO and (r.is_damaged or is_proven_damaged(r)))
    return next((r.reason or "damaged" for r in wrong), None)


def is_proven_damaged(record: ShipRecord) -> bool:
    """Nothing else refuses a ZeRO form. Earlier releases wrote no more than this."""
    return record.form == ZERO and record.state is ShipState.REFUSED


def way_out(job: Job, state: JobState, tag: str) -> tuple[str, str]:
    """The command for a folder that will never be safe as it is, and what that does."""
    verdict, row = state.verdicts.get(tag), state.row_of_tag(tag)
    if verdict is not None and verdict.state is State.SUSPECT:
        return command_for(job.config, "accept", tag), "takes it as one save"
    records = state.ships.get(row.id, {}).values() if row is not None else ()
    if any(r.form == ZERO and r.state is ShipState.COMMITTED for r in records):
        return command_for(job.config, "verify", tag, "--repair"), "puts it right"
    return removal(job, tag), REMOVES


def removal(job: Job, tag: str) -> str:
    """The command for a person who has given it up."""
    return command_for(job.config, "gc", "--incomplete", tag)


def what_reads_it(reason: str) -> str:
    """For what the disk refuses to give, or what was killed gave nobody: whole, for all that is known."""
    me = user(os.geteuid())
    is_denied = any(os.strerror(code) in reason for code in (errno.EACCES, errno.EPERM))
    mend = (
        f"give {me}, as whom ckptd runs, the right to read it"
        if is_denied
        else "see to this node's disk and memory"
    )
    return f"{mend}; tried again by itself, and not shipped until it can be read"


def removal_of_hold(job: Job, name: str) -> str:
    """For a person who wants the room of a hold that is no known save's."""
    place = path_of(job.config.save_dir, f"{fs.HOLD}/{name}")
    return f"rm -r {shlex.quote(str(place))}"
