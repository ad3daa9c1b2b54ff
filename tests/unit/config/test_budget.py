"""How `memory_budget` is divided: a table, and what holds for every budget and any jobs (P12)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.config import budget
from ckptd.config.budget import MIB, SMALLEST_CONVERSION_BYTES, UPLOAD_BYTES, child_bytes, divide, shortage

NAS, BUCKET, SFTP = map(child_bytes, ("/nas/j", "s3://b/j", "sftp://h/j"))
ALWAYS = budget.DAEMON_BYTES + budget.READING_BYTES + SMALLEST_CONVERSION_BYTES
DIRECTORY, S3 = budget.DIRECTORY_BYTES, budget.S3_BYTES


def of(jobs: int, *remotes: int) -> list[list[int]]:
    """So many jobs with these remotes each."""
    return [list(remotes) for _ in range(jobs)]


@pytest.mark.parametrize(
    ("budget_bytes", "jobs", "max_uploads", "children", "uploads"),
    [
        (1024 * MIB, of(1, NAS), 4, 1, 1),
        (1024 * MIB, of(5, NAS), 4, 5, 4),
        (1024 * MIB, of(4, NAS, BUCKET), 16, 8, 8),
        (1024 * MIB, of(5, NAS), 1, 5, 1),
        (256 * MIB, of(1, NAS), 4, 1, 1),
        (256 * MIB, of(1, BUCKET), 4, 1, 1),
        (256 * MIB, of(1), 4, 0, 1),
        (1024 * MIB, [], 4, 0, 1),
        # exactly what two need, then room for a second upload, then for a third child
        (ALWAYS + 3 * budget.JOB_BYTES + 2 * DIRECTORY + UPLOAD_BYTES, of(3, NAS), 4, 2, 1),
        (ALWAYS + 3 * budget.JOB_BYTES + 3 * DIRECTORY + UPLOAD_BYTES, of(3, NAS), 4, 3, 1),
        (ALWAYS + 3 * budget.JOB_BYTES + 3 * DIRECTORY + 2 * UPLOAD_BYTES, of(3, NAS), 4, 3, 2),
        (ALWAYS + 3 * budget.JOB_BYTES + 3 * DIRECTORY + 9 * UPLOAD_BYTES, of(3, NAS), 4, 3, 3),
        # where not all children last, one is left for looking
        (ALWAYS + 3 * budget.JOB_BYTES + 3 * S3 + 15 * MIB, of(3, BUCKET), 4, 2, 1),
        (256 * MIB, of(40, NAS, SFTP), 4, 2, 1),
    ],
)
def test_a_budget_divided(
    budget_bytes: int, jobs: list[list[int]], max_uploads: int, children: int, uploads: int
) -> None:
    found = divide(budget_bytes, jobs, max_uploads)
    assert (found.children, found.uploads) == (children, uploads)


def test_a_child_that_speaks_by_s3fs_takes_more() -> None:
    """54 MiB at rest against 39 (docs/adr/0200)."""
    assert child_bytes("s3://b/j", "s3fs") >= 54 * MIB > child_bytes("s3://b/j") >= 39 * MIB
    assert child_bytes("/nas/j", "s3fs") == NAS


def test_what_is_too_small_says_what_is_needed() -> None:
    """The least budget is enough and a byte less is not; more than roomy goes to conversions alone."""
    jobs = of(30, BUCKET)
    short = divide(256 * MIB, jobs, 4)
    found = shortage(short, 256 * MIB)
    needed = f"{-(-short.needed_bytes // MIB)}MiB"
    assert found is not None
    assert "memory_budget is 256MiB" in found[0]
    assert needed in found[0]
    assert f'"{needed}"' in found[1]
    assert shortage(divide(short.needed_bytes, jobs, 4), short.needed_bytes) is None
    assert shortage(divide(short.needed_bytes - 1, jobs, 4), short.needed_bytes - 1) is not None
    roomy = divide(short.roomy_bytes, jobs, 4)
    assert (roomy.children, roomy.uploads, roomy.conversion_bytes) == (30, 4, SMALLEST_CONVERSION_BYTES)
    more = divide(short.roomy_bytes + 100 * MIB, jobs, 4)
    assert (more.children, more.uploads) == (30, 4)
    assert more.conversion_bytes == SMALLEST_CONVERSION_BYTES + 100 * MIB


@given(
    st.integers(256, 4096),
    st.lists(st.lists(st.sampled_from([NAS, BUCKET, SFTP]), max_size=3), max_size=20),
    st.integers(1, 64),
)
def test_shares_are_never_more_than_the_whole(mib: int, jobs: list[list[int]], max_uploads: int) -> None:
    found = divide(mib * MIB, jobs, max_uploads)
    costs = sorted((cost for remotes in jobs for cost in remotes), reverse=True)
    taken = budget.DAEMON_BYTES + budget.JOB_BYTES * len(jobs) + budget.READING_BYTES
    taken += sum(costs[: found.children]) + found.uploads * UPLOAD_BYTES + found.conversion_bytes
    assert taken <= max(mib * MIB, found.needed_bytes)
    assert 1 <= found.uploads <= max_uploads
    assert found.conversion_bytes >= SMALLEST_CONVERSION_BYTES
    assert min(2, len(costs)) <= found.children <= len(costs)
    assert found.uploads < found.children or found.children == len(costs)
    assert found.needed_bytes <= found.roomy_bytes
