"""Judge a published status: does the daemon live, is the job safe, and the exit code that says so.

They follow from the published document and the time alone, so that every answer can be tested word by word
(P17).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from ckptd.base.humanize import ago
from ckptd.observe.status import pid_space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.observe.status import DiskStatus, JobStatus, Status

Verdict = Literal["SAFE", "BEHIND", "PAUSED", "WAITING", "NOT SAFE", "NOT WATCHED"]
STALE_SECONDS = 60.0
"""The daemon publishes at least every 20 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Record whether the daemon's turns go on; `reason`: why not, in words."""

    reason: str = ""
    age_seconds: float = 0.0
    """Age of the document."""
    hanging: int | None = None
    """The process that is there and decides nothing."""
    short: str = ""
    """The save_dir whose disk was short of room: perhaps the daemon lives and cannot publish."""
    start_command: str = ""
    """Command that the daemon told; empty: it told none."""

    @property
    def is_well(self) -> bool:
        """Tell whether the document describes the present."""
        return not self.reason


def seconds_since(at: str, now: float) -> float:
    """Return the seconds since an RFC 3339 time, never negative; 0: it is none."""
    return max(0.0, now - unix_of(at, now))


def unix_of(at: str, otherwise: float) -> float:
    """Return an RFC 3339 time in Unix seconds; `otherwise` where it is none."""
    try:
        return datetime.fromisoformat(at).timestamp()
    except (ValueError, OverflowError):
        return otherwise


def life_of(document: Status, now: float) -> Life:
    """Judge whether the daemon lives: by its process where it is visible from here, and by the age of its
    document.
    """
    daemon = document.daemon
    age = seconds_since(document.generated_at, now)
    start = daemon.start_command
    if not daemon.alive:
        return Life(reason=f"the daemon was stopped {ago(age)} ago", age_seconds=age, start_command=start)
    if daemon.pid_space in ("", pid_space()) and not is_there(daemon.pid):
        reason = f"the daemon (process {daemon.pid}) is gone; it last published {ago(age)} ago"
        return Life(reason=reason, age_seconds=age, start_command=start)
    if age > STALE_SECONDS:
        reason = f"the daemon (process {daemon.pid}) has not published for {ago(age)}"
        # asking the disk itself might hang as the daemon does
        short = next((job.save_dir for job in document.jobs if _is_short(job.disk)), "")
        return Life(reason=reason, age_seconds=age, hanging=daemon.pid, short=short, start_command=start)
    return Life(age_seconds=age)


def _is_short(disk: DiskStatus | None) -> bool:
    return disk is not None and disk.free_bytes < disk.next_save_bytes


def is_there(pid: int) -> bool:
    """Tell whether a process goes on; one that has ended and that nobody asked about yet (a zombie) does
    not.
    """
    if pid <= 0:  # a group of processes, this one's own too
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def verdict(job: JobStatus, life: Life) -> Verdict:
    """Return the word that answers: is my run safe?"""
    if job.state == "invalid":
        return "NOT SAFE"
    if not life.is_well:
        return "NOT WATCHED"
    if job.paused:
        return "PAUSED"
    if is_unprotected(job) or unread(job):
        return "NOT SAFE"
    if job.state == "waiting":
        return "WAITING"
    if job.safe is None:
        return "NOT SAFE"
    return "BEHIND" if job.steps_at_risk or newest_in_doubt(job) else "SAFE"


def newest_in_doubt(job: JobStatus) -> str:
    """Return the newest checkpoint that looks like two saves and lies above what is safe; empty: none does.

    It is not uploaded until a person accepts it.
    """
    safe_step = job.safe.step if job.safe else 0
    doubtful = (row for row in job.checkpoints if row.state == "suspect")
    above = [(row.step, row.tag) for row in doubtful if row.step is not None and row.step > safe_step]
    return max(above, key=lambda one: one[0])[1] if above else ""


def is_unprotected(job: JobStatus) -> bool:
    """The newest checkpoint is a link, which is not followed (P15), or none that ckptd knows: what is
    committed, if anything is, is older."""
    codes = ("linked-save", "unprotected-save")
    return any(p.code in codes and p.severity == "attention" for p in job.problems)


def unread(job: JobStatus) -> str:
    """Say which part of what is published of the job could not be read (`observe.status_reader`); empty:
    none.
    """
    return next((p.text for p in job.problems if not p.code), "")


def exit_code(jobs: Sequence[JobStatus], *, is_alive: bool) -> int:
    """Return 0 safe · 1 a person is needed · 3 behind, not safe yet, or paused (docs/contract.md)."""
    states = {job.state for job in jobs}
    if not jobs or not is_alive or states & {"attention", "invalid"}:
        return 1
    is_behind = any(job.steps_at_risk or job.paused or newest_in_doubt(job) for job in jobs)
    # a job that waits for its first checkpoint is not behind: still nothing of it is safe
    is_unsafe = any(job.safe is None for job in jobs)
    return 3 if "behind" in states or is_behind or is_unsafe else 0
