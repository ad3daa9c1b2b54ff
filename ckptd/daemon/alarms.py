"""Early alarms of a turn: a shard that does not come, retention that is held up (P17).

Reads the job's memory only; raises problems, decides nothing. What needs patience is timed by our own
monotonic clock.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from ckptd.core.blocking import blocked, blocked_there
from ckptd.core.keeping_remote import is_configured_otherwise
from ckptd.core.lifecycle import State
from ckptd.daemon.sharing import see_sharer

if TYPE_CHECKING:
    from ckptd.core.actions import Plan
    from ckptd.core.lifecycle import Verdict
    from ckptd.core.view import JobView
    from ckptd.daemon.job import Job
    from ckptd.daemon.state import JobState

LEAST_QUIET_SECONDS = 10.0
_NOT_LATE = (State.LEFTOVER, State.COMPLETE)
_NAME = re.compile(r"\((\S+\.pt)\)")


def see_alarms(job: Job, state: JobState) -> None:
    """For as long as each turn sees them."""
    for tag, verdict in state.verdicts.items():
        left = _patience_left_seconds(job, state, tag, verdict)
        if left is not None and left <= 0:
            _see_missing(job, state, tag, verdict)
    _see_blocked(job, state)
    see_sharer(job, state)
    if job.view is not None:
        _see_other_configurations(job, job.view)
        _see_belts(job, job.view, state.plan)


def _see_other_configurations(job: Job, view: JobView) -> None:
    for remote in view.remotes:
        if is_configured_otherwise(view, remote):
            text = f"{remote.name}: nodes of this job are configured differently; this one deletes nothing"
            cure = "give all nodes one job file; it ends with the next COMMIT of nodes that agree"
            job.problems.see("config-differs", remote.name, text, cure)


def _see_belts(job: Job, view: JobView, plan: Plan | None) -> None:
    """A note: it goes on by itself."""
    if plan is None:
        return
    for remote in view.remotes:
        if (found := blocked_there(view, remote, plan.remote_fates)) is not None:
            job.problems.see("retention-blocked", remote.name, found.text, found.next_step, severity="note")


def waits_for_alarm(job: Job, state: JobState) -> bool:
    """Time alone will raise one: such a job is not at rest."""
    lefts = (_patience_left_seconds(job, state, tag, v) for tag, v in state.verdicts.items())
    return state.blocked_since is not None or any(left is not None and left > 0 for left in lefts)


def _patience_left_seconds(job: Job, state: JobState, tag: str, verdict: Verdict) -> float | None:
    """Until a shard is late: nothing moved for longer than ranks ever lay apart.

    None: none is missing, or a later save is whole.
    """
    if not verdict.missing or verdict.state in _NOT_LATE or state.listing is None:
        return None
    folder, quiet = next((f for f in state.listing.folders if f.tag == tag), None), state.quiet.get(tag)
    if folder is None or quiet is None:
        return None
    written_ns = max((f.identity.mtime_ns for f in folder.shards), default=0)
    if any(row.save.window.last > written_ns for row in state.rows.values()):
        return None
    patience = max(LEAST_QUIET_SECONDS, 3 * job.config.settle_seconds, 2 * state.widest_save_seconds)
    return patience - (time.monotonic() - quiet.since_seconds)


def _see_missing(job: Job, state: JobState, tag: str, verdict: Verdict) -> None:
    first, more = verdict.missing[0], len(verdict.missing) - 1
    text = f"{tag}: {first} is missing" + (f", and {more} more" if more else "")
    where = _last_place(job, state, first)
    same = [t for t, v in state.verdicts.items() if t != tag and v.missing == verdict.missing]
    if same:
        text += f", as in {same[-1]}: it is never written"
        cure = "with node-local storage and tensor parallelism DeepSpeed leaves shards out: check its config"
    else:
        cure = "does that rank hang, or is its disk full? it is not committed before it is whole"
    job.problems.see("shard-missing", tag, f"{text}; {where}" if where else text, cure)


def _last_place(job: Job, state: JobState, missing: str) -> str:
    """Which node wrote that shard in the newest save that is whole here."""
    name = _NAME.search(missing)
    rows = [row for row in state.rows.values() if row.state == "present"]
    newest = max(rows, key=lambda row: row.save.order, default=None)
    if name is None or newest is None:
        return ""
    is_ours = any(file.path.rpartition("/")[2].endswith(name[1]) for file in newest.save.files)
    return (
        f"in {newest.save.tag} node {job.node} wrote it" if is_ours else "no node is known to have written it"
    )


def _see_blocked(job: Job, state: JobState) -> None:
    """Once the same thing has been in the way for its patience."""
    found = blocked(job.view, state.plan.local_fates) if job.view is not None and state.plan else None
    if found is None or state.is_first_scan:
        state.blocked_since = None
        return
    now = time.monotonic()
    if state.blocked_since is None or state.blocked_since[0] != found.what:
        state.blocked_since = (found.what, now)
    if now - state.blocked_since[1] >= found.patience_seconds:
        job.problems.see("retention-blocked", "retention", found.text, found.next_step)
    elif found.is_told_at_once:
        job.problems.see("retention-blocked", "retention", found.text, found.next_step, severity="note")
