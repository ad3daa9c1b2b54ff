"""The next hours of a job, from its recent saves: feeds status and raises early alarms (docs/design.md P17).

Decides nothing: what it says is for people, who alone can save less often or buy a faster link.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptd.config_quantities import show_bandwidth, show_seconds
from ckptd.core.forecast import Forecast, Room, Saved, forecast

if TYPE_CHECKING:
    from ckptd.daemon.job import Job
    from ckptd.daemon.problems import Problems
    from ckptd.daemon.state import JobState

FULL_SOON_SAVES = 3


def link_speed(job: Job, state: JobState) -> float | None:
    """Bytes per second of the slowest required remote, as last measured; None: nothing was sent yet."""
    known = [
        state.link_speeds[r.name] for r in job.config.remotes if r.required and r.name in state.link_speeds
    ]
    return min(known, default=None)


def outlook(job: Job, state: JobState) -> Forecast:
    """What to expect of this job if the trainer goes on as it did."""
    assert job.view is not None
    required = [remote.name for remote in job.view.remotes if remote.is_required]
    is_there = all(job.links[name].attached is not None for name in required)
    saves = [
        Saved(at_seconds=row.save.window.last / 1e9, bytes=row.save.total_bytes, step=row.save.step)
        for row in state.rows.values()
    ]
    room = Room(
        free_bytes=job.view.disk.free_bytes,
        link_bytes_per_second=link_speed(job, state) if is_there else None,
        is_rotated=bool(required) and job.config.local.policy.deletes,
    )
    return forecast(saves, room, now_seconds=time.time())


def see_outlook(job: Job, state: JobState) -> None:
    """Alarms before something is lost: the disk will be full, the link is too slow, a save is overdue."""
    if job.view is None:
        return
    told, speed = outlook(job, state), link_speed(job, state)
    # only from a link that was measured: the first upload of a job is no reason for an alarm
    if speed is not None:
        _see_full(job.problems, told)
    if told.save_steps_for_link is not None and speed is not None:
        text = (
            f"production {show_bandwidth(round(told.production_bytes_per_second or 0))}, "
            f"link {show_bandwidth(round(speed))}: uploads fall behind"
        )
        cure = f"save every {told.save_steps_for_link:,} steps, or make the link faster"
        job.problems.see("link-slow", "link", text, cure)
    if told.overdue_seconds is not None and told.save_every_seconds is not None and not state.in_flight:
        usual = show_seconds(told.save_every_seconds)
        late = show_seconds(told.overdue_seconds)
        quiet = show_seconds(told.save_every_seconds + told.overdue_seconds)
        text = f"no save for {quiet}, usually every {usual}"
        job.problems.see(
            "save-overdue", "saves", f"{text} ({late} late)", "has the run ended, or does it hang?"
        )


def _see_full(problems: Problems, told: Forecast) -> None:
    saves, seconds = told.full_in_saves, told.full_in_seconds
    if saves is None or seconds is None or saves > FULL_SOON_SAVES:
        return
    text = f"disk full in {saves} saves / {show_seconds(seconds)} at this pace"
    problems.see("disk-full-soon", "disk", text, "free space, save less often, or make the link faster")
