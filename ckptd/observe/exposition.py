"""Translate the statuses of a daemon's jobs into metrics for Prometheus, purely (docs/operations.md).

Names and units follow its conventions; ages are counted to the moment of asking. The library is imported by
the caller: a daemon without `metrics` never loads it.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, get_args

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, StateSetMetricFamily

from ckptd.observe.status import JobStateName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric

    from ckptd.observe.status import DaemonStatus, JobStatus

STATES: tuple[str, ...] = get_args(JobStateName)


def families(
    daemon: DaemonStatus, jobs: Sequence[JobStatus], turned_at: float, now: float
) -> Iterator[Metric]:
    """Yield the metric families, the most wanted first. `turned_at`: the last turn; `now`: both in Unix
    seconds.
    """
    for name, text, value in _PER_JOB:
        family = GaugeMetricFamily(f"ckptd_{name}", text, labels=["ckptd_job"])
        for job in jobs:
            number = value(job, now)
            if number is not None:
                family.add_metric([job.name], number)
        yield family
    yield from _by_more(jobs)
    yield from _of_daemon(daemon, turned_at)


def _by_more(jobs: Sequence[JobStatus]) -> Iterator[Metric]:
    states = StateSetMetricFamily("ckptd_job_state", "State of the job, as in status.", labels=["ckptd_job"])
    problems = GaugeMetricFamily(
        "ckptd_problems",
        "Open problems by code (docs/problems.md).",
        labels=["ckptd_job", "severity", "code"],
    )
    attached = GaugeMetricFamily(
        "ckptd_remote_attached", "1: the remote is there and ours.", labels=["ckptd_job", "remote"]
    )
    left = GaugeMetricFamily(
        "ckptd_upload_left_bytes", "Still to be sent of what is on its way.", labels=["ckptd_job", "remote"]
    )
    for job in jobs:
        states.add_metric([job.name], {state: state == job.state for state in STATES})
        counts: dict[tuple[str, str], int] = {}
        for problem in job.problems:
            key = (problem.severity, problem.code)
            counts[key] = counts.get(key, 0) + 1
        for (severity, code), count in counts.items():
            problems.add_metric([job.name, severity, code], count)
        for remote in job.remotes:
            attached.add_metric([job.name, remote.name], int(remote.attached))
            left.add_metric([job.name, remote.name], _left(job, remote.name))
    yield from (states, problems, attached, left)


def _of_daemon(daemon: DaemonStatus, turned_at: float) -> Iterator[Metric]:
    for name, text, value in (
        ("memory_bytes", "Of the daemon and its children.", daemon.memory_bytes),
        ("memory_budget_bytes", "What they may use.", daemon.memory_budget_bytes),
        ("start_timestamp_seconds", "When the daemon was started.", _unix(daemon.started_at)),
        ("last_turn_timestamp_seconds", "When its deciding thread last finished a turn.", turned_at),
        ("reload_failed", "1: the last reload refused something.", int(daemon.reload_error is not None)),
    ):
        yield GaugeMetricFamily(f"ckptd_{name}", text, value=value)
    yield InfoMetricFamily("ckptd_build", "Version.", value={"version": daemon.version})


def _at_risk(job: JobStatus, now: float) -> float | None:
    if job.seconds_at_risk is None or job.as_of is None:
        return job.seconds_at_risk
    return job.seconds_at_risk + max(0.0, now - _unix(job.as_of))


def _exposed(job: JobStatus, now: float) -> float | None:
    if job.exposed_seconds is None or job.as_of is None:
        return 0.0 if job.safe is not None else None
    return job.exposed_seconds + max(0.0, now - _unix(job.as_of))


def _uncommitted(job: JobStatus) -> int:
    open_states = ("complete", "uploading", "waiting", "refused")
    return sum(c.local.present and c.state in open_states for c in job.checkpoints)


def _left(job: JobStatus, remote: str) -> int:
    forms = (form for c in job.checkpoints for form in c.remotes.get(remote, {}).values())
    return sum(form.bytes_total - form.bytes_done for form in forms if form.state == "shipping")


def _unix(at: str) -> float:
    return datetime.fromisoformat(at).timestamp() if at else 0.0


_PER_JOB: tuple[tuple[str, str, Callable[[JobStatus, float], float | None]], ...] = (
    ("training_at_risk_seconds", "Training that would be lost with this node.", _at_risk),
    ("steps_at_risk", "Saved steps that are not committed.", lambda job, _: job.steps_at_risk),
    ("exposed_seconds", "Since the newest save that is not committed was written; 0: all are.", _exposed),
    (
        "disk_full_in_saves",
        "Further saves that fit on the disk of save_dir; absent while it does not fill up.",
        lambda job, _: job.disk.full_in_saves if job.disk else None,
    ),
    (
        "disk_full_in_seconds",
        "Until the disk of save_dir is full at this pace; absent while it does not fill up.",
        lambda job, _: job.disk.full_in_seconds if job.disk else None,
    ),
    (
        "disk_free_bytes",
        "Free on the disk of save_dir.",
        lambda job, _: job.disk.free_bytes if job.disk else None,
    ),
    (
        "next_save_bytes",
        "What the next save needs.",
        lambda job, _: job.disk.next_save_bytes if job.disk else None,
    ),
    (
        "committed_step",
        "Step of the newest committed checkpoint.",
        lambda job, _: job.safe.step if job.safe else None,
    ),
    (
        "committed_timestamp_seconds",
        "When the newest committed checkpoint was committed.",
        lambda job, _: _unix(job.safe.committed_at) if job.safe and job.safe.committed_at else None,
    ),
    (
        "uncommitted_checkpoints",
        "Checkpoints that are complete on this node and not committed.",
        lambda job, _: _uncommitted(job),
    ),
    (
        "production_bytes_per_second",
        "Bytes that the trainer saves.",
        lambda job, _: job.production_bytes_per_second,
    ),
    (
        "link_bytes_per_second",
        "Speed of the slowest required remote, as last measured.",
        lambda job, _: job.link_bytes_per_second,
    ),
    ("paused", "1: a person paused the job.", lambda job, _: job.paused is not None),
)
