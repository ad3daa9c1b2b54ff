"""The next hours of a job, from its recent saves: feeds status and raises early alarms (docs/design.md P17).

Decides nothing: what it says is for people, who alone can save less often or buy a faster link.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, cast

from ckptd.config.quantities import show_bandwidth, show_seconds
from ckptd.core.model.records import ZERO
from ckptd.core.policy.blockers import adopting
from ckptd.core.policy.capacity import (
    DiskForecast,
    Saved,
    disk_use_of,
    forecast,
    pace_of,
    rotation_of,
)
from ckptd.daemon.state.view_builder import unsealed
from ckptd.daemon.uploads.session import STILL_SECONDS

if TYPE_CHECKING:
    from ckptd.core.model.save import SaveWindow
    from ckptd.core.policy.capacity import DiskUse, SaveRhythm
    from ckptd.core.policy.view import Disk, JobView
    from ckptd.daemon.health.watched_job import WatchedJob
    from ckptd.daemon.state.state import JobState

FULL_SOON_SAVES = 3
LEAST_SAVES = 5
"""Fewer tell no pace: the first ones of a run lie apart otherwise than the later ones."""
RUNNING_SECONDS = 10.0
"""An upload that has run for so long tells the speed of its link before it ends."""
_ROWS = 200
"""The latest ones tell how the trainer rotates."""

FREES_FILES = "remove small files on this disk (df -i): it has room, and no inodes left for a save"
_CURES = {
    "keep_bytes": "lower keep_bytes",
    "keep_every_steps": "raise keep_every_steps",
    "keep_every_seconds": "raise keep_every",
    "keep_within_seconds": "shorten keep_within",
    "keep_best": "lower keep_best",
    "keep_steps": "shorten keep_steps",
    "ephemeral": "raise every_steps or lower keep of ephemeral",
    "ladder": "let the ladder end sooner",
}
_THIN_IS_NOT_ENOUGH = (
    'unuploaded = "thin" is not enough here (none is deleted before a newer one is committed), "delete" is'
)


def link_speed(job: WatchedJob, state: JobState) -> float | None:
    """Bytes per second of the slowest required remote, as last measured; None: nothing was sent yet."""
    speeds = [
        state.uploads.speeds.get(r.name) or state.uploads.running_speed(r.name, RUNNING_SECONDS)
        for r in job.config.remotes
        if r.required
    ]
    return min((speed for speed in speeds if speed), default=None)


def outlook(job: WatchedJob, state: JobState) -> DiskForecast:
    """Return the forecast of this job, if its trainer and those beside it on its disk go on as they did."""
    now = time.time()
    others = tuple((_disk_use(other, its), pace) for other, its, pace in _beside(job, now))
    disk_use = replace(_disk_use(job, state), others=others)
    expected = forecast(past_saves(job, state), disk_use, now_seconds=now)
    if job.view is not None and job.view.disk.lacks_files:
        return replace(expected, full_in_saves=0, full_in_seconds=0.0, lacks_files=True)
    return expected


def _disk_use(job: WatchedJob, state: JobState) -> DiskUse:
    assert job.view is not None
    latest_rows = islice(reversed(state.saves.rows.values()), _ROWS)
    rests = _is_paused(job.view, state)
    return disk_use_of(
        job.view if rests == job.view.is_paused else replace(job.view, is_paused=rests),
        _link(job, state),
        _left_bytes(job.view, state),
        written_bytes=_written_bytes(state),
        unsealed=[(folder.tag, step, folder.total_bytes) for folder, _, step in unsealed(state)],
        rotation=rotation_of(latest_rows),
    )


def _is_paused(view: JobView, state: JobState) -> bool:
    """Tell whether a person paused the job; a host that stands by rests as well, while another one
    deletes."""
    return view.is_paused and not (state.other_host is not None and state.other_host.stands_by)


def _beside(job: WatchedJob, now: float) -> list[tuple[WatchedJob, JobState, SaveRhythm]]:
    """Other jobs of this daemon on the same disk, as far as they are looked at: those that go on saving."""
    others = ((other, other.state) for other in cast("list[WatchedJob]", job.disk_yield.jobs_beside(job)))
    looked_at = [(o, state) for o, state in others if state is not None and o.view is not None]
    paces = [(other, state, pace_of(past_saves(other, state), now)) for other, state in looked_at]
    return [(other, state, pace) for other, state, pace in paces if pace is not None]


def past_saves(job: WatchedJob, state: JobState) -> list[Saved]:
    """All that are known; also those that wait for a remote's first answer to be sealed."""
    settle, known = job.config.settle_seconds, state.saves.rows.values()
    saves = [
        _saved(r.save.window, r.save.total_bytes, r.save.step, r.save.tag, r.seen_at, settle) for r in known
    ]
    for folder, window, step in unsealed(state):
        quiet = state.folders.quiet.get(folder.tag)
        seen_at = quiet.first_seen_unix if quiet is not None else window.last / 1e9
        saves.append(_saved(window, folder.total_bytes, step, folder.tag, seen_at, settle))
    return saves


def _saved(window: SaveWindow, size: int, step: int, tag: str, seen_at: float, settle: float) -> Saved:
    """Written from its first sign to its last shard; what was found here later had been written before."""
    last = window.last / 1e9
    written = max(last - min(window.first / 1e9, seen_at), 0.0) + settle
    return Saved(at_seconds=last, bytes=size, step=step, tag=tag, written_seconds=written)


def _link(job: WatchedJob, state: JobState) -> float | None:
    """Return the upload speed that the forecast may count on; None: a required remote is away or takes no
    upload.

    One that was not measured since the start counts as fast enough: what is said then fills the disk in any
    case, and the slowness of a link that nobody knows frightens nobody after each restart.
    """
    required = [job.sessions[remote.name] for remote in job.config.remotes if remote.required]
    if not required or any(session.is_away or session.backed_off for session in required):
        return None
    return link_speed(job, state) or math.inf


def _written_bytes(state: JobState) -> int:
    """Count the bytes of saves that are written just now: that room is no longer free, and not yet a
    checkpoint's."""
    folders = state.folders.listing.folders if state.folders.listing is not None else ()
    whole = {folder.tag for folder, _, _ in unsealed(state)}
    return sum(folder.total_bytes for folder in folders if folder.tag in state.folders.in_flight - whole)


def _left_bytes(view: JobView, state: JobState) -> int | None:
    """Count the bytes of the ZeRO form under way that the slowest required remote still lacks; None: there
    is none."""
    keys = [
        (r.uploading_save_id, r.name, ZERO)
        for r in view.remotes
        if r.is_required and r.uploading == ZERO and r.uploading_save_id is not None
    ]
    moving = [state.uploads.progress[key] for key in keys if key in state.uploads.progress]
    return max((one.total_bytes - one.done_bytes for one in moving), default=None)


def see_outlook(job: WatchedJob, state: JobState) -> None:
    """Alarms before something is lost: the disk will be full, the link is too slow, a save is overdue."""
    if job.view is None:
        return
    expected, speed = outlook(job, state), link_speed(job, state)
    _see_full(job, state, expected)
    is_still = any(
        job.sessions[r.name].idle_seconds >= STILL_SECONDS for r in job.config.remotes if r.required
    )
    is_known = len(past_saves(job, state)) >= LEAST_SAVES and not is_still
    if expected.save_steps_for_link is not None and speed is not None and is_known:
        _see_slow(job, expected, speed, expected.save_steps_for_link)
    if (
        expected.overdue_seconds is not None
        and expected.save_every_seconds is not None
        and not state.folders.in_flight
    ):
        usual = show_seconds(expected.save_every_seconds)
        late = show_seconds(expected.overdue_seconds)
        quiet = show_seconds(expected.save_every_seconds + expected.overdue_seconds)
        text = f"no save for {quiet}, usually every {usual}"
        job.problems.see(
            "save-overdue", "saves", f"{text} ({late} late)", "has the run ended, or does it hang?"
        )


def shortage(disk: Disk) -> str:
    """Say what the next save lacks on this disk; empty: nothing."""
    if disk.is_short:
        free, need = disk.free_bytes / 1e9, disk.reserve_bytes / 1e9
        return f"{free:.1f} GB free, the next save and min_free need {need:.1f} GB"
    if disk.lacks_files:
        return disk_files(disk)
    return ""


def disk_files(disk: Disk) -> str:
    """Say how many inodes are free, and how many the next save needs."""
    return f"{disk.free_files} inodes free, the next save needs {disk.reserve_files}"


def to_adopt(job: WatchedJob) -> str:
    """The first step on a disk that what was found at the first start holds; else nothing."""
    return adopting(job.view) if job.view is not None else ""


def _see_slow(job: WatchedJob, expected: DiskForecast, speed: float, steps: int) -> None:
    production, link = _measured(expected.production_bytes_per_second or 0), _measured(speed)
    text, how = f"production {production}, link {link}: ", job.config.unuploaded
    full = (
        "" if expected.full_in_seconds is None else f", disk full in {show_seconds(expected.full_in_seconds)}"
    )
    cure = f"save every {steps:,} steps, or make the link faster"
    adopt = to_adopt(job)
    if not job.config.local.policy.deletes:
        text += f"uploads fall behind{full}"
    elif how == "keep":
        text += f"uploads fall behind{full}"
        if adopt:
            cure = adopt + cure
        elif expected.is_spared_by_thin:
            cure += '; or set unuploaded = "thin": then not every save is uploaded'
        else:
            cure += f"; {_THIN_IS_NOT_ENOUGH}"
    else:
        text += f'not every save is uploaded (unuploaded = "{how}"){full}'
        if full and adopt:
            cure = adopt + cure
        elif full and how == "thin":
            cure += f"; {_THIN_IS_NOT_ENOUGH}"
    job.problems.see("link-slow", "link", text, cure)


def _measured(bytes_per_second: float) -> str:
    """Two digits: what was measured wanders, and an alarm whose words change each turn is noise."""
    return show_bandwidth(round(float(f"{bytes_per_second:.2g}"))).partition(" = ")[0]


def _see_full(job: WatchedJob, state: JobState, expected: DiskForecast) -> None:
    saves, seconds = expected.full_in_saves, expected.full_in_seconds
    if saves is None or seconds is None or saves > FULL_SOON_SAVES:
        return
    text = f"disk full in {saves} saves / {show_seconds(seconds)} at this pace"
    if (beside := len(_beside(job, time.time()))) > 0:
        text += f" and that of {beside} other job{'s' * (beside > 1)} on this disk"
    cure, how = "free space, save less often, or make the link faster", job.config.unuploaded
    adopt = to_adopt(job)
    if expected.lacks_files and job.view is not None:
        text, cure = f"disk full: {disk_files(job.view.disk)}", FREES_FILES
    elif not job.config.local.policy.deletes:
        cure = "set save_total_limit in [local], free space, or save less often"
    elif job.view is not None and _is_paused(job.view, state):
        cure = "nothing is sent or removed while the job is paused: `ckptd pause --off`, or free space"
    elif adopt:  # no limit and no opt-out frees what was found here; adopted, it may be enough
        cure = adopt + "free space, or save less often"
    elif expected.is_limit_too_high:
        cure = "lower save_total_limit in [local], free space, or save less often"
    elif expected.kept_by:
        cure = f"{_less(job, expected.kept_by)} in [local], or free space"
    elif how == "keep" and expected.is_spared_by_thin:
        cure += '; unuploaded = "thin" deletes what is older than a committed one'
    elif how != "delete":
        cure += f"; {_THIN_IS_NOT_ENOUGH}"
    job.problems.see("disk-full-soon", "disk", text, cure)


def _less(job: WatchedJob, keys: tuple[str, ...]) -> str:
    """Say how to make these keys of the policy keep less; with ephemeral alone the others have no limit."""
    if keys == ("ephemeral",) and not job.config.local.policy.limits:
        return "set save_total_limit"
    return ", ".join(_CURES[key] for key in keys)
