"""Build and send this node's heartbeat: its status, with durations measured by its own clock."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING

from ckptd import __version__
from ckptd.config.schema import config_digest
from ckptd.core.model.heartbeat import Heartbeat, NewestSave, SafeSave
from ckptd.core.model.manifest import cells_of
from ckptd.core.policy.local import newest as newest_save
from ckptd.daemon.health.status import job_status
from ckptd.observe.status import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.core.model.save import SealedSave
    from ckptd.daemon.health.watched_job import WatchedJob

LAST_WORD_SECONDS = 10.0
"""A stop waits so long for remotes to take the last heartbeat: one of them may hang."""


def heartbeat_of(job: WatchedJob, node_id: str) -> Heartbeat:
    """Build the heartbeat of this moment; the sender fills in the remote's own `job_id`."""
    status = job_status(job)
    newest = newest_save(job.view) if job.view is not None else None
    cells = sorted(cells_of(newest.save.files)) if newest is not None else []
    safe = status.safe
    return Heartbeat(
        job_id=job.job_id or "",
        job=job.config.name,
        node=job.node,
        node_id=node_id,
        config_digest=config_digest(job.config),
        ckptd_version=__version__,
        as_of=rfc3339(time.time()),
        state=status.state,
        ranks=tuple(sorted({cell.d for cell in cells})),
        shards=tuple(cells),
        newest=_newest(newest.save) if newest is not None else None,
        run_id=state.run_id if (state := job.state) is not None else None,
        host=job.runs.place.host,
        user=job.runs.place.user,
        save_dir=job.runs.place.save_dir,
        safe=None
        if safe is None
        else SafeSave(
            tag=safe.tag,
            branch=safe.branch,
            step=safe.step,
            seconds_at_risk=status.seconds_at_risk or 0.0,
        ),
    )


def send_final(
    jobs: Sequence[WatchedJob],
    results: queue.SimpleQueue[Callable[[], None]],
    call: Callable[[Callable[[], None]], None],
    settle: Callable[[], None],
    not_now: Callable[[], None],
) -> None:
    """Tell the remotes of jobs that end in order so: they learn it by a heartbeat, not by silence.

    `settle` lets remotes begin that wait for a place. `not_now`: a result that waits until this is over, for
    it changes which jobs there are (a reload).
    """
    active = [job for job in jobs if job.state is not None]
    for job in active:
        call(job.peers.send_last_heartbeats)
    sessions = [session for job in active for session in job.sessions.values()]
    until = time.monotonic() + LAST_WORD_SECONDS
    later = []
    while any(session.heartbeat is not None for session in sessions):
        call(settle)
        try:
            result = results.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        if result == not_now:
            later.append(result)
        else:
            call(result)
    for result in later:
        results.put(result)


def _newest(save: SealedSave) -> NewestSave:
    return NewestSave(
        tag=save.tag,
        branch=save.branch,
        step=save.step,
        written_seconds_ago=round(max(0.0, time.time() - save.window.last / 1e9), 1),
        last_seconds=save.window.last // 10**9,
    )
