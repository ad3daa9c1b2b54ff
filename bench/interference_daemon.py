"""The ckptd that bench.interference measures training beside: real, confined, and never without work.

It takes care of the training's saves, of which large earlier ones wait to be sent, or of other runs of the
node whose large checkpoints wait to be sent and converted: so it works as fast as it may from before a
segment's first step to after its last one, and the account says how fast. It is started for each segment and
ended after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench import native
from bench.interference_report import Memory, Work
from bench.measure import make_warm
from bench.saves import TAG, Save
from bench.transfer_runs import BUCKET, ENVIRONMENT
from ckptd.storage.local import fs
from tests.support import cgroup

BUDGET_BYTES = 512 << 20
WAITING = 4
"""Checkpoints: more than is sent and converted during a segment."""
UNDER_WAY_BYTES = 32 << 20
START_SECONDS = 120.0


def pinned(command: list[str], cores: list[int]) -> list[str]:
    """The command on these cores alone."""
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


@dataclass
class Beside:
    """A daemon for one segment after another, in a cgroup of its budget where the machine has them."""

    root: Path
    server: native.NullServer
    cores: list[int]
    waiting: Save
    """What every checkpoint that waits is a copy of."""
    is_of_others: bool
    """They wait in runs of their own, one in each; else all in the training's."""
    memory: Memory = field(default_factory=Memory)
    work: list[Work] = field(default_factory=list)
    """Of each segment."""
    start_seconds: float = 4.0
    """What the last start took, until it was sending."""

    @property
    def _places(self) -> list[Path]:
        return [self.root / f"waiting-{number}" for number in range(WAITING if self.is_of_others else 0)]

    @property
    def waiting_bytes(self) -> int:
        """In all of them, before anything is converted."""
        return WAITING * self.waiting.bytes

    def cleared(self) -> None:
        """What it left is gone, what waits is there, and read as by its trainer just now."""
        for path in (self.root / "state", self.root / "etc", self.root / "save", *self._places):
            shutil.rmtree(path, ignore_errors=True)
        (self.root / "save").mkdir()
        earlier = [self.root / "save" / f"earlier-{number}" for number in range(WAITING)]
        for folder in [place / TAG for place in self._places] or earlier:
            shutil.copytree(self.waiting.folder, folder, copy_function=os.link)
        make_warm(self.waiting.files)

    @contextlib.contextmanager
    def absent(self) -> Iterator[None]:
        """Wait as long as a daemon takes to start, without one."""
        time.sleep(self.start_seconds)
        yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The daemon at full speed."""
        begun = time.monotonic()
        self.server.reset()
        config = self._configured()
        with contextlib.ExitStack() as stack:
            inside = pinned([sys.executable, "-m", "ckptd", "run", "--config-dir", str(config)], self.cores)
            group = None if cgroup.why_not() else stack.enter_context(cgroup.group(BUDGET_BYTES))
            watcher = None
            if group:
                inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *inside]
                watcher = cgroup.Watcher(group)
                stack.callback(watcher.stop)
            with (self.root / "daemon.log").open("ab") as log:
                daemon = subprocess.Popen(inside, stdout=log, stderr=log, env=ENVIRONMENT)
            stack.callback(_end, daemon)
            self._until(daemon, lambda: self.server.counted().data_bytes > UNDER_WAY_BYTES)
            self.start_seconds = time.monotonic() - begun
            before = self._account(daemon)
            yield
            self.work.append(self._account(daemon).since(before))
            if group and watcher:
                self.memory = self.memory.joined(watcher.peak_bytes, watcher.peak_dirty_bytes, _killed(group))

    def _configured(self) -> Path:
        config = self.root / "etc"
        (config / "jobs.d").mkdir(parents=True)
        (config / "ckptd.toml").write_text(
            f'state_dir = "{self.root}/state"\nmemory_budget = "{BUDGET_BYTES >> 20}MiB"\n'
        )
        for place in (self.root / "save", *self._places):
            (config / "jobs.d" / f"{place.name}.toml").write_text(
                f'save_dir = "{place}"\nsettle = "1s"\nexisting = "all"\n[local]\nforms = ["universal"]\n'
                f'[[remote]]\nname = "remote"\nurl = "s3://{BUCKET}/{place.name}"\n'
                f'endpoint_url = "{self.server.endpoint}"\nforms = ["zero", "universal"]\n'
            )
        return config

    def _until(self, daemon: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not is_so():
            if daemon.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"the daemon does not work: {(self.root / 'daemon.log').read_text()[-3000:]}"
                )
            time.sleep(0.05)

    def _account(self, daemon: subprocess.Popen[bytes]) -> Work:
        family = psutil.Process(daemon.pid)
        times = [process.cpu_times() for process in (family, *family.children(recursive=True))]
        return Work(
            seconds=time.monotonic(),
            cpu_seconds=sum(t.user + t.system + t.children_user + t.children_system for t in times),
            sent_bytes=self.server.counted().data_bytes,
            converted_bytes=self._converted_bytes(),
        )

    def _converted_bytes(self) -> int:
        """Of universal forms: finished ones as the log has them (an older one goes), and those under way."""
        finished = re.findall(
            r"its universal form here: ([\d.]+) ([kMGT])B", (self.root / "daemon.log").read_text()
        )
        begun = sum(_bytes_below(place / fs.STAGING) for place in (self.root / "save", *self._places))
        return begun + sum(int(float(number) * 1000 ** (1 + "kMGT".index(unit))) for number, unit in finished)


def _bytes_below(place: Path) -> int:
    """Blocks on the disk."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(folder, name))
                total += found.st_blocks * 512 if found.st_nlink == 1 else 0  # holds are links
    return total


def _end(daemon: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(daemon.pid).children(recursive=True) if daemon.poll() is None else []
    daemon.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(20)
    daemon.kill()
    daemon.wait()
    psutil.wait_procs(below, timeout=20)


def _killed(group: Path) -> int:
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(dict(line.split() for line in lines).get("oom_kill", 0))
