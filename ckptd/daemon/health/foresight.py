"""Answer `ckptd plan`: what other retention keys would delete and keep, by the last view of the job.

Planning a thousand checkpoints a hundred saves ahead takes many seconds: a worker does it on a frozen view.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.core.policy.capacity import pace_of
from ckptd.core.policy.foresight import foresee
from ckptd.daemon.health.capacity import past_saves
from ckptd.observe import status as st

if TYPE_CHECKING:
    from ckptd.core.policy.foresight import ForeseenPlace
    from ckptd.core.policy.view import JobView
    from ckptd.daemon.health.watched_job import WatchedJob
    from ckptd.errors import CkptdError

PATIENCE_SECONDS = 25.0
"""Time to wait for the first answers of remotes."""
PLANNING_SECONDS = 20.0
"""Time limit of a what-if; the answer leaves out what was not planned by then."""


def begin_answer(job: WatchedJob) -> None:
    """Have the what-if that was asked for answered by a worker, once and when the remotes have answered."""
    control, view, state = job.control, job.view, job.state
    asked = control.plan
    if asked is None or asked is control.plan_begun or view is None or state is None:
        return
    is_late = time.time() - asked.asked_at_unix_seconds > PATIENCE_SECONDS
    if not is_late and not all(r.was_heard for r in view.remotes if r.name in asked.keys.remotes):
        return
    control.plan_begun = asked
    asked_at, frozen = st.rfc3339(asked.asked_at_unix_seconds), _frozen(view)
    pace = pace_of(past_saves(job, state), now_seconds=0.0)  # also of a run that rests or has ended
    ends = time.monotonic() + PLANNING_SECONDS

    def may_go_on() -> bool:
        return time.monotonic() < ends and control.plan is asked and job.state is state

    def planned() -> st.PlanStatus:
        places = foresee(frozen, asked.keys, asked.saves, pace, may_go_on)
        return st.PlanStatus(asked_at=asked_at, places=tuple(_place(one) for one in places))

    def answer(status: st.PlanStatus) -> None:
        if control.plan is asked:
            control.plan_answer = status
            job.wake()

    def failed(error: CkptdError) -> None:
        answer(st.PlanStatus(asked_at=asked_at, places=(), error=str(error)))

    job.workers.submit("planning with other retention keys", planned, answer, failed)


def _frozen(view: JobView) -> JobView:
    """Return the view with copies of what the deciding thread goes on changing."""
    return replace(
        view,
        saves=tuple(replace(save, uploads=dict(save.uploads)) for save in view.saves),
        generations=dict(view.generations),
        confirmations=dict(view.confirmations),
        due_since_seconds=dict(view.due_since_seconds),
    )


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
