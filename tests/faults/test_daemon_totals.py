"""What all jobs share, with real daemons: bandwidth, uploads at once, one conversion at a time."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import PATIENCE_SECONDS, RUN, children_of, made_before
from tests.faults.test_daemon_service import House
from tests.faults.test_daemon_service import house as house

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.real, pytest.mark.faults]

TOTAL_BYTES = 800_000
"""Per second, over all jobs; a save has 1.7 MB."""


real_saves = made_before(RUN)


def two_jobs(house: House, totals: str, more: str = "") -> None:
    """Jobs one and two with a whole save each, and the limits of ckptd.toml."""
    toml = house.config / "ckptd.toml"
    toml.write_text(f"{toml.read_text()}{totals}\n")
    for name in ("one", "two"):
        (house.root / "nvme" / name).mkdir()
        house.job(name, more)
        house.save(name)


def arrived_bytes(house: House, name: str) -> int:
    """Of the checkpoint's own files, finished or not."""
    files = (house.root / "nas" / name / "global_step1").rglob("*")
    return sum(path.stat().st_size for path in files)


def sampled(house: House, look: Callable[[], None], done: Callable[[], object]) -> None:
    """Look again and again until it is done."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < end, house.log.read_text()[-2000:]
        try:
            look()
        except (OSError, ValueError):  # a file that was renamed while we looked
            continue
        time.sleep(0.01)


def both_committed(house: House) -> bool:
    return house.committed("one") and house.committed("two")


def is_uploading(house: House) -> bool:
    """Whether status shows an upload under way."""
    return any(
        forms["zero"]["state"] == "shipping"
        for job in house.jobs().values()
        for checkpoint in job["checkpoints"]
        for forms in checkpoint["remotes"].values()  # none before it is sealed
    )


def test_two_jobs_together_stay_under_the_total_bandwidth(house: House) -> None:
    """Each gets a part, nothing is wasted, and the sum is kept over every two seconds."""
    two_jobs(house, f'bandwidth = "{TOTAL_BYTES // 1000}kB/s"')
    seen: list[tuple[float, int, int]] = []

    def look() -> None:
        seen.append((time.monotonic(), arrived_bytes(house, "one"), arrived_bytes(house, "two")))

    house.start()
    sampled(house, look, lambda: both_committed(house))
    moving = [row for row in seen if row[1] and row[2]]
    whole = max(row[1] + row[2] for row in moving)
    moving = [row for row in moving if row[1] + row[2] < whole]
    took = moving[-1][0] - moving[0][0]
    assert took > 2, "long enough to be measured"
    moved = sum(moving[-1][1:]) - sum(moving[0][1:])
    assert 0.7 * TOTAL_BYTES < moved / took < 1.3 * TOTAL_BYTES
    for at, *sizes in seen:
        later = [row for row in seen if 1.9 <= row[0] - at <= 2.1]
        # a pacer that was idle lets a quarter of a second's worth pass at once
        most = 1.3 * TOTAL_BYTES * (later[0][0] - at) + 0.25 * TOTAL_BYTES if later else 0
        assert not later or sum(later[0][1:]) - sum(sizes) < most


def test_one_upload_at_a_time(house: House) -> None:
    """The second waits in line, and is not forgotten in it."""
    two_jobs(house, "max_uploads = 1", 'bandwidth = "1MB/s"')
    shown: set[bool] = set()

    def look() -> None:
        # parts of status are made at different times: what begins and ends when, the log below says
        shown.add(is_uploading(house))

    house.start()
    sampled(house, look, lambda: house.log.read_text().count("committed on nas") == 2)
    assert both_committed(house)
    assert True in shown
    house.wait("at rest", lambda: not is_uploading(house))
    said = re.findall(r"uploading|committed on nas", house.log.read_text())
    assert said == ["uploading", "committed on nas"] * 2


def test_a_job_that_ends_while_it_waits_in_line_lets_the_others_pass(house: House) -> None:
    """Two starts anew by a reload while one ships: nobody stands behind what two was before."""
    two_jobs(house, "max_uploads = 1", 'bandwidth = "200kB/s"')
    daemon = house.start()
    house.wait("an upload", lambda: "uploading" in house.log.read_text())
    house.wait("both sealed", lambda: house.log.read_text().count(" complete: ") == 2)
    first = "one" if arrived_bytes(house, "one") else "two"
    other = {"one": "two", "two": "one"}[first]
    time.sleep(0.5)
    assert not house.committed(first)
    house.job(other, 'bandwidth = "800kB/s"')
    daemon.send_signal(signal.SIGHUP)
    house.wait("both", lambda: both_committed(house))


def test_conversions_keep_to_their_limit(house: House) -> None:
    """They copy and compare no faster; without a limit both took half a second."""
    rate = 400_000
    two_jobs(house, f'convert_bandwidth = "{rate // 1000}kB/s"')
    daemon = house.start()
    seen: list[float] = []

    def made() -> list[Path]:
        return list((house.root / "nvme").glob("*/_ckptd/derived/universal/global_step1/ckptd.json"))

    def look() -> None:
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(daemon.pid)]
        if any(b"executor_child" in line for line in lines):
            seen.append(time.monotonic())

    sampled(house, look, lambda: len(made()) == 2)
    tensors = sum(path.stat().st_size for one in made() for path in one.parent.rglob("*.pt"))
    assert seen[-1] - seen[0] > 0.7 * tensors / rate > 2, "long enough to be measured"


def test_one_conversion_at_a_time(house: House) -> None:
    """Over both jobs at most one planning child or executor runs; both get their universal form."""
    two_jobs(house, "")
    daemon = house.start()
    most = 0

    def look() -> None:
        nonlocal most
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(daemon.pid)]
        most = max(most, sum(b"planner_child" in line or b"executor_child" in line for line in lines))

    def is_done() -> bool:
        made = (house.root / "nvme").glob("*/_ckptd/derived/universal/global_step1/ckptd.json")
        return len(list(made)) == 2

    sampled(house, look, is_done)
    assert most == 1
