"""Tell how far a drain is: what is still to be committed, and what need not be waited for (docs/adr/0108)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptd.core.completeness.judge import State
from ckptd.core.model.records import SETTLED, ZERO, UploadState
from ckptd.core.policy.drain import open_saves
from ckptd.core.policy.safety import unsent
from ckptd.core.policy.view import Drain
from ckptd.daemon.intake.listing import unprotected_here
from ckptd.daemon.uploads.session import STILL_SECONDS
from ckptd.observe.status import DrainStatus, all_committed, rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.daemon.actions.control import Control
    from ckptd.daemon.health.watched_job import WatchedJob
    from ckptd.daemon.state.state import JobState

TOLD_SECONDS = 600.0
"""Status shows how a drain ended for so long after its deadline."""
PATIENCE_SECONDS = 10.0
"""A save in which nothing has changed for so long (at least 2 × settle), and of which no file is open, is not
waited for."""
MEASURED_SECONDS = 1.0
"""An upload that has run for so long gives a first estimate; a drain cannot wait for a better one."""


def drain_view(job: WatchedJob, state: JobState) -> Drain | None:
    """Build the planner's input for the drain under way; None: there is none."""
    drain = job.control.drain
    if drain is None or not job.control.is_draining:
        return None
    names = list(job.sessions)
    speeds = {name: speed for name in names if (speed := _speed(job, state, name))}
    left = {
        (save_id, name, ZERO): _left_bytes(state, save_id, name)
        for save_id, uploads in state.uploads.records.items()
        for name in names
        if save_id in state.saves.rows and (name, ZERO) in uploads
    }
    left |= {
        key: max(0, moving.total_bytes - moving.done_bytes) for key, moving in state.uploads.progress.items()
    }
    return Drain(seconds_left=drain.deadline_seconds - time.monotonic(), speeds=speeds, left_bytes=left)


def drain_status(job: WatchedJob, state: JobState) -> DrainStatus | None:
    """Return what status.json says of a drain, until some minutes after its deadline."""
    drain = job.control.drain
    if drain is None or time.monotonic() > drain.deadline_seconds + TOLD_SECONDS:
        return None
    if not job.control.is_draining and _newest_seen_at(state) > drain.deadline_unix:
        return None  # it is over, and what was saved since is none of its business
    drained = state.plan.drained if state.plan is not None else None
    linked, is_rest_done = unprotected_here(job.problems), is_settled(job)
    unfinished = unfinished_here(job) if is_rest_done else ()
    missing = drained.missing if drained is not None else missing_after(job)
    return DrainStatus(
        asked_at=rfc3339(drain.asked_at_unix),
        deadline_at=rfc3339(drain.deadline_unix),
        is_done=is_drained(job) and not linked,
        missing=(*missing, *linked, *unfinished),
        late=drained.late if drained is not None else (),
        refused=(*refused_here(job), *(linked if is_rest_done else ())),
        unfinished=unfinished,
        unsent=unsent_here(job),
        stalled=stalled_remotes(job.control, [job]),
    )


def stalled_remotes(control: Control, jobs: Sequence[WatchedJob]) -> tuple[str, ...]:
    """Remotes that the drain need not wait for; a remote that was cut just before gets its next try."""
    is_young = control.drain is None or time.monotonic() - control.drain.begun_seconds < STILL_SECONDS
    return stalled_drain(jobs) if control.is_draining and not is_young else ()


def _newest_seen_at(state: JobState) -> float:
    """Return when the newest save was first seen (Unix seconds), whole or not."""
    seen = [row.seen_at for row in state.saves.rows.values()]
    return max([*seen, *(quiet.first_seen_unix for quiet in state.folders.quiet.values())], default=0.0)


def missing_after(job: WatchedJob) -> tuple[str, ...]:
    """Name what is not committed yet, once the deadline has passed and the job goes on as before."""
    return tuple(save.save.tag for save in open_saves(job.view)) if job.view is not None else ()


def unsent_here(job: WatchedJob) -> tuple[str, ...]:
    """Return the tags that are complete here and not committed because `existing` excludes them."""
    return unsent(job.view) if job.view is not None else ()


def drained_words(jobs: Sequence[WatchedJob]) -> str:
    """Describe the result of a finished drain of these jobs in one line."""
    linked = [tag for job in jobs for tag in unprotected_here(job.problems)]
    but = f"; not {', '.join(linked)}: `ckptd status` says why" if linked else ""
    return all_committed(sum(len(unsent_here(job)) for job in jobs)) + but


def drain_code(jobs: Sequence[WatchedJob]) -> int:
    """Return the exit code of a finished drain.

    0: everything is committed; 1: what is left cannot be committed as it is; 3: the time ran out, a job
    cannot be looked at, or a save that was being written is not waited for.
    """
    if all(is_drained(job) for job in jobs):
        return 1 if any(unprotected_here(job.problems) for job in jobs) else 0
    is_over = all(is_settled(job) for job in jobs)
    return 1 if is_over and not any(unfinished_here(job) for job in jobs) else 3


def refused_here(job: WatchedJob) -> tuple[str, ...]:
    """Return the tags that are not committed and that no attempt will commit, since their files are
    damaged.
    """
    if job.view is None:
        return ()
    names = [remote.name for remote in job.view.remotes if ZERO in remote.forms]
    return tuple(
        save.save.tag
        for save in open_saves(job.view)
        if any(save.upload(name, ZERO).state is UploadState.REFUSED for name in names)
    )


def is_drained(job: WatchedJob) -> bool:
    """All that is complete here is committed, and nothing is about to be complete."""
    return is_settled(job) and not missing_after(job) and not unfinished_here(job)


def is_settled(job: WatchedJob) -> bool:
    """Tell whether no time commits more: nothing is about to be complete, and what is left is refused."""
    state = job.state
    if state is None:
        return job.turns > 1 and not job.unseen
    if state.is_first_scan or job.needs_turn or state.plan is None or job.view is None:
        return False
    return set(missing_after(job)) <= set(refused_here(job)) and not _about_to_be_complete(job, state)


def uncommitted_at_close(job: WatchedJob) -> str:
    """Name what is not committed as a job is closed, for the time in which it cannot be looked at."""
    state = job.state
    if state is None or state.is_first_scan or job.view is None:
        left: tuple[str, ...] = ("what lies there",)
    else:
        left = (*missing_after(job), *sorted(_unsealed(state)))
    lacks = f"{job.config.save_dir} is not as it was when it was last looked at; not committed then: "
    return f"{lacks}{', '.join(left)}" if left else ""


def _about_to_be_complete(job: WatchedJob, state: JobState) -> bool:
    """A save that its writer still writes, or that is looked at; one that has gone quiet never will be."""
    return bool(_unsealed(state) - set(unfinished_here(job)))


def _unsealed(state: JobState) -> set[str]:
    """Return the tags of saves that are being written or looked at."""
    open_states = (State.UNKNOWN, State.SAVING, State.RESAVING)
    return {
        tag
        for tag, verdict in state.folders.verdicts.items()
        if verdict.state in open_states
        or (verdict.state is State.COMPLETE and state.saves.of_tag(tag) is None)
    }


def unfinished_here(job: WatchedJob) -> tuple[str, ...]:
    """Return the tags of saves that were being written and are not waited for any more."""
    if job.state is None:
        return ()
    now, folders, found = time.monotonic(), job.state.folders, []
    for tag, verdict in folders.verdicts.items():
        quiet = folders.quiet.get(tag)
        if verdict.state not in (State.SAVING, State.RESAVING) or quiet is None:
            continue
        rested_seconds = now - quiet.since_seconds
        is_quiet = rested_seconds >= max(PATIENCE_SECONDS, 2 * job.config.settle_seconds)
        if is_quiet and not job.sealer.has_writer(tag, rested_seconds):
            found.append(tag)
    return tuple(found)


def stalled_drain(jobs: Sequence[WatchedJob]) -> tuple[str, ...]:
    """Remotes that a drain need not wait for: all that is left waits for them, and no byte moves anywhere.

    A hung mount, whose child nothing ends: the machine that is to go would wait for the whole deadline.
    """
    found: set[str] = set()
    for job in jobs:
        if any(session.is_moving for session in job.sessions.values()):
            return ()
        lacking = _lacking(job)
        if not all(job.sessions[name].is_stalled for name in lacking):
            return ()
        if not lacking and not is_settled(job):
            return ()
        found |= lacking
    return tuple(sorted(found))


def _lacking(job: WatchedJob) -> set[str]:
    """Required remotes, or all where none is, to which a checkpoint that is complete here is still to go."""
    if job.view is None:
        return set()
    counting = [r for r in job.view.remotes if r.is_required and ZERO in r.forms] or job.view.remotes
    return {
        remote.name
        for remote in counting
        for save in open_saves(job.view)
        if ZERO in remote.forms and save.upload(remote.name, ZERO).state not in SETTLED
    }


def _speed(job: WatchedJob, state: JobState, name: str) -> float | None:
    """Return the upload speed to a remote in bytes/s, at most the configured limit; None: not known.

    The upload under way is measured once it has run long enough; before that the last finished one counts.
    """
    measured = state.uploads.running_speed(name, MEASURED_SECONDS) or state.uploads.speeds.get(name)
    limit = job.sessions[name].bytes_per_second
    return min(measured, limit) if measured and limit else measured or limit


def _left_bytes(state: JobState, save_id: int, name: str) -> int:
    total = state.saves.rows[save_id].save.total_bytes
    done = sum(row.flushed_bytes for row in state.journal.objects(save_id, name, ZERO))
    return max(0, total - done)
