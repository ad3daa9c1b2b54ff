"""Answer `ckptd plan`: what other retention keys would delete and keep, by the last view of the job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptd.core.policy.capacity import pace_of
from ckptd.core.policy.foresight import foresee
from ckptd.daemon.health.capacity import past_saves
from ckptd.observe import status as st

if TYPE_CHECKING:
    from ckptd.core.policy.foresight import ForeseenPlace
    from ckptd.daemon.health.watched_job import WatchedJob

PATIENCE_SECONDS = 25.0
"""So long it is waited for the first answers of remotes."""


def plan_status(job: WatchedJob) -> st.PlanStatus | None:
    """Return the answer, computed once; None: nothing is asked, or remotes have not answered yet."""
    asked, view, state = job.control.plan, job.view, job.state
    if asked is None or view is None or state is None:
        return None
    if job.control.plan_answer is None:
        is_late = time.time() - asked.asked_at_unix_seconds > PATIENCE_SECONDS
        if not is_late and not all(remote.was_heard for remote in view.remotes):
            return None
        pace = pace_of(past_saves(job, state), now_seconds=0.0)  # also of a run that rests or has ended
        job.control.plan_answer = st.PlanStatus(
            asked_at=st.rfc3339(asked.asked_at_unix_seconds),
            places=tuple(_place(one) for one in foresee(view, asked.keys, asked.saves, pace)),
        )
    return job.control.plan_answer


def _place(place: ForeseenPlace) -> st.ForeseenPlaceStatus:
    held = (st.HoldingStatus(saves=n, checkpoints=c, bytes=b) for n, (c, b) in enumerate(place.held))
    deletions = (
        st.ForeseenDeletionStatus(
            tag=one.tag,
            generation=one.generation,
            forms=one.forms,
            bytes=one.bytes,
            why=one.why,
            after_saves=one.after_saves,
        )
        for one in place.deletions
    )
    return st.ForeseenPlaceStatus(
        remote=place.remote,
        is_known=place.is_known,
        checkpoints=place.before[0],
        bytes=place.before[1],
        held=tuple(held),
        deletions=tuple(deletions),
    )
