"""A node short of memory: what moves checkpoints rests, for a while and never for ever (P11; adr/0223)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.config.loader import job_from_arguments
from ckptd.config.schema import DaemonConfig
from ckptd.core.model.records import UNIVERSAL, ZERO, UploadRecord, UploadState
from ckptd.daemon.health.status import job_status
from ckptd.daemon.job import BUSY_FRACTION, Job
from ckptd.daemon.resources.limits import HostLimits
from ckptd.daemon.resources.memory_pressure import FILE, REST_SECONDS, WORK_SECONDS, MemoryPressure
from ckptd.daemon.resources.workers import Workers
from tests.support.synthetic import write_stage12


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def stall(file: Path, percent: float) -> None:
    """Write what the kernel would."""
    rest = "avg60=0.00 avg300=0.00 total=34"
    file.write_text(f"some avg10={percent:.2f} {rest}\nfull avg10={percent / 2:.2f} {rest}\n")


def test_it_rests_while_tasks_wait_for_memory(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptd")
    pressure = MemoryPressure(file)
    found = []
    for second, percent in ((0, 1.9), (2, 12.0), (4, 12.0), (6, 6.9), (8, 6.0)):
        stall(file, percent)
        found.append((pressure.look(float(second)), pressure.is_high))
    assert found == [(False, False), (True, True), (False, True), (True, False), (False, False)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"tasks of this node waited for memory 12 % of the time ({file}): ")


def test_pressure_that_lasts_takes_two_thirds_of_the_time_at_most(file: Path) -> None:
    stall(file, 90)
    pressure = MemoryPressure(file)
    rested = 0
    for second in range(3600):
        pressure.look(float(second))
        rested += pressure.is_high
    share = REST_SECONDS / (REST_SECONDS + WORK_SECONDS)
    assert 0.9 * share < rested / 3600 < 1.05 * share


@pytest.mark.parametrize("content", [None, "", "some\n", "some avg10=much\n"])
def test_a_kernel_that_does_not_tell_has_no_pressure(file: Path, content: str | None) -> None:
    if content is not None:
        file.write_text(content)
    pressure = MemoryPressure(file)
    assert not pressure.look(0.0)
    assert not pressure.is_high


def test_this_kernels_own_file_is_understood() -> None:
    if not FILE.exists():
        pytest.skip("this kernel tells no pressure")
    percent = float(FILE.read_text().split()[1].partition("=")[2])
    assert MemoryPressure()._stalled_percent() == pytest.approx(percent, abs=5)


@pytest.fixture
def job(file: Path, tmp_path: Path) -> Iterator[Job]:
    """A job whose save is there, and a node whose pressure `file` tells."""
    limits = HostLimits(DaemonConfig(), list, lambda: 0, remotes=list)
    limits.memory_pressure = MemoryPressure(file)
    posts: list[Callable[[], None]] = []
    save_dir = tmp_path / "llama"
    write_stage12(save_dir / "global_step7", [{"w": (8, 8)}], 1)
    config = job_from_arguments(str(save_dir), str(tmp_path / "nas"), check_paths=False)
    job = Job(config, DaemonConfig(), tmp_path / "state", limits, Workers(posts.append), posts.append)
    job.open()
    try:
        job.turn(time.monotonic())
        assert job.state is not None
        job.state.folders.in_flight = frozenset()  # the save just found counts as one being written
        yield job
    finally:
        job.close()


def told_of(job: Job) -> list[float]:
    """What its only session is told of its pace from now on."""
    (session,) = job.sessions.values()
    told: list[float] = []
    session.pace = told.append  # type: ignore[method-assign,assignment]
    return told


def test_a_job_rests_and_goes_on(job: Job, file: Path) -> None:
    told = told_of(job)
    for second, percent in ((0, 50.0), (4, 0.0)):
        stall(file, percent)
        job._limits.memory_pressure.look(float(second))
        job.pace()
        told.append(job.local_actions.signals.pause.is_set())
    assert told == [BUSY_FRACTION, True, 1.0, False]


def test_status_says_that_it_waits_for_memory(job: Job, file: Path) -> None:
    """Uploads at a tenth and a conversion that stands still had no reason (P17)."""
    job.turn(time.monotonic())  # the first one only begins
    published = []
    for second, percent in ((0, 0.0), (4, 50.0)):
        stall(file, percent)
        job._limits.memory_pressure.look(float(second))
        published.append(job_status(job).waits_for_memory)
    job.control.begin_drain(60.0)
    assert [*published, job_status(job).waits_for_memory] == [False, True, False]


@pytest.mark.parametrize(
    ("form", "is_committed", "fraction"),
    [(ZERO, False, 1.0), (ZERO, True, BUSY_FRACTION), (UNIVERSAL, False, BUSY_FRACTION)],
)
def test_what_is_committed_nowhere_is_not_slowed(
    job: Job, file: Path, form: str, is_committed: bool, fraction: float
) -> None:
    stall(file, 50.0)
    job._limits.memory_pressure.look(0.0)
    assert job.state is not None
    told, uploads = told_of(job), job.state.uploads
    (name,) = job.sessions
    if is_committed:
        uploads.records[7] = {
            ("other", ZERO): UploadRecord(remote="other", form=ZERO, state=UploadState.COMMITTED)
        }
    uploads.begin((7, name, form), 100)
    job.pace()
    assert told == [fraction]
