"""Hand a person's `ckptd rm` to the planner, and publish what became of it (docs/adr/0199)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.config.commands import with_typed_commands
from ckptd.core.policy.view import RemovalRequest
from ckptd.observe import status as st

if TYPE_CHECKING:
    from ckptd.daemon.health.watched_job import WatchedJob


def removal_view(job: WatchedJob) -> RemovalRequest | None:
    """Build the planner's input for the removal that was asked for; None: there is none."""
    asked = job.control.removal
    if asked is None:
        return None
    return RemovalRequest(
        tags=asked.tags,
        is_here=asked.is_here,
        remotes=frozenset(asked.remotes),
        is_remote_named=asked.is_remote_named,
        agreed=frozenset(asked.agreed) if asked.agreed is not None else None,
        by=asked.by,
        is_alone=job.control.only_removes,
    )


def removal_status(job: WatchedJob) -> st.RemovalStatus | None:
    """Return what status.json says of it: what is left in each place, by the last plan."""
    asked = job.control.removal
    if asked is None or job.state is None or job.state.plan is None:
        return None
    if job.view is None or job.view.removal != removal_view(job):
        return None
    rows = tuple(
        st.RemovalRowStatus(
            tag=row.tag,
            remote=row.remote,
            verdict=row.verdict,
            forms=row.forms,
            bytes=row.bytes,
            why=row.why,
            next_step=with_typed_commands(job.config, row.next_step),
            commits=row.commits,
        )
        for row in job.state.plan.removal
    )
    return st.RemovalStatus(
        asked_at=st.rfc3339(asked.asked_at_unix_seconds), is_agreed=asked.agreed is not None, rows=rows
    )
