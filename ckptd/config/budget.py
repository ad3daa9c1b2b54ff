"""Divide `memory_budget`: the daemon, a child for each remote, uploads, one conversion (P12); pure.

The shares are sums of what was measured, not of what happens to be held now: what may begin is known before
it begins, and `ckptd check` says the same as the daemon. Nothing waits for another's share, so nobody
starves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.config.remote_names import url_path

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
DAEMON_BYTES = 32 * MIB
JOB_BYTES = 4 * MIB
"""The daemon without a job, and what a job of a hundred checkpoints adds."""
READING_BYTES = 36 * MIB
"""The restricted children that read saves before they are sealed: four at once."""
DIRECTORY_BYTES, S3_BYTES, SERVICE_BYTES = 24 * MIB, 40 * MIB, 64 * MIB
"""A remote's child that has nothing to do, by its kind; S3 by s3fs takes 54 MiB, as services do."""
UPLOAD_BYTES = 16 * MIB
"""Memory that a child takes besides while it uploads."""
SMALLEST_CONVERSION_BYTES = 64 * MIB
"""Includes the pages that it dirties; more than making a form during its upload adds."""


@dataclass(frozen=True, slots=True)
class Division:
    """Hold the shares of a budget; with less than `needed_bytes` it is kept by chance alone."""

    children: int
    """Remotes' children that live at once; the others' orders wait in line."""
    uploads: int
    """Number of uploads at a time."""
    conversion_bytes: int
    """Share of the one conversion, whatever else runs."""
    needed_bytes: int
    """The least budget for these jobs."""
    roomy_bytes: int
    """Budget with which each remote keeps its child, and all allowed uploads run at a time."""


def divide(budget_bytes: int, jobs: Sequence[Sequence[int]], max_uploads: int) -> Division:
    """Divide `budget_bytes` where each of `jobs` has remotes whose children take so much (`child_bytes`).

    Children come first, each lasts where there is room; then uploads; a conversion gets the rest. Of several
    children at least two live: while one uploads, another may look.
    """
    costs = sorted((cost for costs in jobs for cost in costs), reverse=True)
    always = DAEMON_BYTES + JOB_BYTES * len(jobs) + READING_BYTES + SMALLEST_CONVERSION_BYTES
    left_bytes = budget_bytes - always
    least = min(2, len(costs))
    children = len(costs)
    while children > least and sum(costs[:children]) + UPLOAD_BYTES > left_bytes:
        children -= 1
    most_uploads = max(1, min(max_uploads, children if children == len(costs) else children - 1))
    left_bytes -= sum(costs[:children])
    uploads = max(1, min(most_uploads, left_bytes // UPLOAD_BYTES))
    return Division(
        children=children,
        uploads=uploads,
        conversion_bytes=SMALLEST_CONVERSION_BYTES + max(0, left_bytes - uploads * UPLOAD_BYTES),
        needed_bytes=always + sum(costs[:least]) + UPLOAD_BYTES,
        roomy_bytes=always + sum(costs) + max(1, min(max_uploads, len(costs))) * UPLOAD_BYTES,
    )


def child_bytes(url: str, client: str = "botocore") -> int:
    """Return what the child of a remote takes that has nothing to do; `client` matters on S3 alone."""
    if url_path(url) is not None:
        return DIRECTORY_BYTES
    return S3_BYTES if url.startswith("s3://") and client == "botocore" else SERVICE_BYTES


def shortage(division: Division, budget_bytes: int) -> tuple[str, str] | None:
    """Return what is wrong with a budget that is too small, and what to do; None when it suffices."""
    if budget_bytes >= division.needed_bytes:
        return None
    needed = f"{-(-division.needed_bytes // MIB)}MiB"
    text = f"memory_budget is {budget_bytes // MIB}MiB, these jobs need {needed}: more may be used"
    return text, f'memory_budget = "{needed}" in ckptd.toml, or fewer jobs in one daemon'
