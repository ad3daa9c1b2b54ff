"""What the kernel itself refuses to the real daemon: single calls by strace, a disk that is really full.

Beside the points of `test_killpoints`, which raise errors in Python: here SQLite, the children and the C
libraries meet them too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.killpoints import judge, trainer
from tests.killpoints.life import Place, Scenario
from tests.killpoints.record import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.root]
FULL = bool(os.environ.get("CKPTD_FULL"))
SCENARIO = Scenario("kernel", saves=2, backfill="all")
CALLS = {
    "pwrite64": ("ENOSPC", "EIO"),
    "fdatasync": ("EIO",),
    "fsync": ("EIO", "ENOSPC"),
    "renameat2": ("EACCES", "ESTALE"),
    "renameat": ("EROFS", "EIO"),
    "linkat": ("EDQUOT", "EIO"),
    "mkdirat": ("ENOSPC", "EACCES"),
    "unlinkat": ("EIO", "EACCES"),
    "ftruncate": ("EIO", "EFBIG"),
    "getdents64": ("EIO", "ESTALE"),
    "close": ("EIO",),
}
OF_PYTHON_TOO = ("getdents64", "close")
"""Python calls them while it imports; only those of the job's own files and folders fail."""
SURE = 2 / 3
"""Of the calls of the busiest thread of an undisturbed run: threads share them out differently each time."""
SAMPLE = [(call, code) for call, codes in CALLS.items() for code in codes]


def once(place: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """`ckptd run --once`."""
    command = [*before, sys.executable, "-m", "ckptd", "run", "--job", str(place / "run.toml"), "--once"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
@pytest.mark.parametrize(
    ("call", "code"),
    [pytest.param(*row, marks=() if row == ("pwrite64", "ENOSPC") else pytest.mark.full) for row in SAMPLE],
)
def test_a_call_that_the_kernel_refuses(tmp_path: Path, call: str, code: str) -> None:
    """Of the daemon and all its children; each attempt that is hit ends in words, the next is whole."""
    place, calm = Place(tmp_path / "hit", SCENARIO), Place(tmp_path / "calm", SCENARIO)
    rng = random.Random(f"{call}{code}")
    lived = calm.saves if FULL else calm.saves[:1]
    for one in (place, calm):
        one.make()
    for number, save in enumerate(lived, start=1):
        for one in (place, calm):
            trainer.write(one.save_dir, save, is_constant=False)
            one.tell(f"written {number}")
        there = _calls_of(calm, call)
        for nth in range(2 if FULL else 1):
            first, step = rng.randint(1, max(1, int(there * SURE))), rng.randint(15, 60)
            hit = _traced(place, call, f"inject={call}:error={code}:when={first}+{step}")
            if not nth:  # the second one finds less to do
                assert "INJECTED" in _trace(place), f"no {call} failed: the {first}. of {there}"
            assert "Traceback" not in hit.stderr, hit.stderr[-3000:]
            assert "defect" not in hit.stderr, hit.stderr[-3000:]
            assert judge.judge(place).wrong == []
        done = once(place.root)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "watchdog" not in done.stderr, "an ERROR of a library at every end frightens for nothing"
    verdict = judge.judge(place)
    assert verdict.wrong == []
    assert verdict.committed == {(save.step, form) for save in lived for form in ("zero", "universal")}


def _traced(place: Place, call: str, *inject: str) -> subprocess.CompletedProcess[str]:
    """`ckptd run --once`, with each such call in the trace: of everything, or of the job's own."""
    tops = [place.save_dir, place.remote] if call in OF_PYTHON_TOO else []
    only = [word for top in tops for path in (top, *top.rglob("*")) for word in ("-P", str(path))]
    chosen = [word for text in (f"trace={call}", *inject) for word in ("-e", text)]
    return once(place.root, "strace", "-f", "-qq", "-o", str(place.root / "trace"), *chosen, *only)


def _trace(place: Place) -> str:
    return (place.root / "trace").read_text(errors="replace")


def _calls_of(place: Place, call: str) -> int:
    """How many of them the busiest thread of an undisturbed run makes; strace counts for each thread."""
    done = _traced(place, call)
    assert done.returncode == 0, done.stderr[-3000:]
    threads = Counter(re.findall(rf"^(\d+) +{call}\(", _trace(place), re.MULTILINE))
    assert threads, f"no {call} is ever made"
    return max(threads.values())


@contextlib.contextmanager
def _small(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.full
@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_disk_that_is_full_of_somebody_elses_files(tmp_path: Path, what: str) -> None:
    """No byte or no inode left on the node's disk, journal included: said, nothing deleted, heals."""
    options = "size=6m" if what == "bytes" else "size=64m,nr_inodes=90"
    place = Place(tmp_path, SCENARIO)
    with _small(tmp_path / "nvme", options):
        place.make()
        trainer.write(place.save_dir, place.saves[0], is_constant=False)
        place.tell("written 1")
        assert once(tmp_path).returncode == 0
        trainer.write(place.save_dir, place.saves[1], is_constant=False)
        place.tell("written 2")
        _fill(tmp_path / "nvme" / "filler", what)
        status = place.save_dir / "_ckptd" / "state" / "status.json"
        log = (tmp_path / "log").open("w+")
        command = [sys.executable, "-m", "ckptd", "run", "--job", str(tmp_path / "run.toml")]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            time.sleep(8)
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            assert judge.judge(place).wrong == []
            shutil.rmtree(tmp_path / "nvme" / "filler")
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and (20, "universal") not in judge.judge(place).committed:
                time.sleep(0.3)
            verdict = judge.judge(place)
            assert verdict.wrong == []
            assert (20, "universal") in verdict.committed, Path(log.name).read_text()[-3000:]
            words = Path(log.name).read_text()
            assert "Traceback" not in words, words[-3000:]
            assert json.loads(status.read_text())["schema_version"] == 1
        finally:
            process.kill()
            process.wait(10)
            log.close()


def _fill(folder: Path, what: str) -> None:
    """Until nothing more goes in."""
    folder.mkdir()
    data = b"x" * 4096 if what == "bytes" else b""
    with contextlib.suppress(OSError):
        for number in range(100_000):
            fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
