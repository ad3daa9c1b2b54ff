"""P12 of a whole daemon: many jobs in a memory cgroup of the least budget; who needs more is killed."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path

import pytest

from ckptd.config.budget import MIB, child_bytes, divide
from tests.e2e.harness import RUN, children_of, made_before
from tests.faults.test_daemon_service import House
from tests.faults.test_daemon_service import house as house
from tests.support import cgroup

pytestmark = [pytest.mark.real, pytest.mark.faults]

BUDGET_BYTES = 256 * MIB
JOBS = ("one", "two", "three", "four", "five")


real_saves = made_before(RUN)


def remotes_children(pid: int) -> int:
    """How many the daemon has now, without those that it has killed and that are on their way out."""
    lines = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            if not is_dying(child):
                lines.append(Path(f"/proc/{child}/cmdline").read_bytes())
    return sum(b"ckptd.storage.child.child" in line for line in lines)


def is_dying(pid: int) -> bool:
    """SIGKILL waits for it, or it has begun to exit (proc(5): SigPnd, ShdPnd; PF_EXITING of `flags`)."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    return bool(pending & 1 << (signal.SIGKILL - 1) or flags & 0x4)


def is_converted(house: House, name: str) -> bool:
    return (house.root / "nvme" / name / "_ckptd/derived/universal/global_step1/ckptd.json").exists()


@pytest.mark.skipif(cgroup.why_not() is not None, reason=str(cgroup.why_not()))
def test_five_jobs_live_within_the_least_budget(house: House) -> None:
    """All save at once and want their universal form; a slow link makes uploads and conversions overlap."""
    toml = house.config / "ckptd.toml"
    toml.write_text(f'{toml.read_text()}memory_budget = "256MiB"\nmax_uploads = 5\nbandwidth = "1500kB/s"\n')
    for name in JOBS:
        (house.root / "nvme" / name).mkdir()
        house.job(name)
        house.save(name)
    shares = divide(BUDGET_BYTES, [[child_bytes(str(house.root))]] * len(JOBS), 5)
    most, over = 0, threading.Event()
    with cgroup.group(BUDGET_BYTES) as inside:
        daemon = house.start(inside=inside / "cgroup.procs")
        watcher = cgroup.Watcher(inside)

        def look() -> None:
            nonlocal most
            while not over.wait(0.01):
                with contextlib.suppress(OSError):
                    most = max(most, remotes_children(daemon.pid))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            house.wait("all committed", lambda: all(house.committed(name) for name in JOBS))
            house.wait("all converted", lambda: all(is_converted(house, name) for name in JOBS))
            house.wait("status", lambda: {job["state"] for job in house.jobs().values()} == {"ok"})
        finally:
            over.set()
            thread.join()
            watcher.stop()
            daemon.terminate()
            daemon.wait(30)
        killed = dict(line.split() for line in (inside / "memory.oom_control").read_text().splitlines())
    assert int(killed["oom_kill"]) == 0
    assert watcher.peak_bytes < BUDGET_BYTES
    # one that is being killed is still listed
    assert 2 <= most <= shares.children + 1 < len(JOBS)
    assert all(not job["problems"] for job in house.jobs().values())


def test_a_budget_that_is_too_small_is_told_with_what_is_needed(house: House) -> None:
    """By check and by the daemon, which does its best; a reload with enough of it ends the problem."""
    toml = house.config / "ckptd.toml"
    plain = toml.read_text()
    toml.write_text(f'{plain}memory_budget = "256MiB"\n')
    nowhere = "sftp://127.0.0.1:1/nowhere"
    for name in JOBS[:3]:
        (house.root / "nvme" / name).mkdir()
        house.job(name)
    for name in JOBS[1:3]:
        path = house.config / "jobs.d" / f"{name}.toml"
        text = path.read_text().replace(str(house.root / "nas" / name), nowhere)
        path.write_text(text.replace("same_filesystem = true\n", ""))
    house.save("one")
    shares = divide(BUDGET_BYTES, [[child_bytes(one)] for one in (str(house.root), nowhere, nowhere)], 4)
    needed = f"{-(-shares.needed_bytes // MIB)}MiB"
    check = ("check", "--no-probe", "--config-dir", str(house.config))
    checked = house.ckptd(*check)
    assert checked.returncode == 78, checked.stdout + checked.stderr
    assert f'memory_budget = "{needed}"' in " ".join(checked.stdout.split())
    house.start()
    house.wait(
        "the problem", lambda: [p["code"] for p in house.jobs()["one"]["problems"]] == ["memory-short"]
    )
    assert needed in house.jobs()["one"]["problems"][0]["text"]
    house.wait("a commit all the same", lambda: house.committed("one"))
    assert house.log.read_text().count("these jobs need") == 1
    toml.write_text(f'{plain}memory_budget = "{needed}"\n')
    checked = house.ckptd(*check)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 of 3 remotes" in " ".join(checked.stdout.split()), checked.stdout
    assert house.reload("one").returncode == 0
    house.wait("its end", lambda: not house.jobs()["one"]["problems"])
