"""Starts the trainer under torchrun, follows its records and ends it like a machine that dies.

torchrun puts each rank in a session of its own, so a kill goes to the whole tree, rank by rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

TRAINER = "examples.demo.train"


class TrainingFailed(CkptdError):
    """The trainer ended by itself and not well."""

    default_hint = "its output says why"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a trainer on CPU: one thread per rank, loopback only, ninja on PATH."""
    environment = dict(os.environ)
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment.get('PATH', os.defpath)}"
    environment.update(
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    environment.update(extra or {})
    return environment


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; an unfinished last line is left for later."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all below it, parents first; returns when they are gone."""
    try:
        root = psutil.Process(pid)
        everyone = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(everyone, timeout=10)


@dataclass(slots=True)
class Training:
    """One torchrun in progress: its records and its end."""

    run: str
    records: Path
    """Folder of train-<run>.jsonl."""
    log: Path
    process: subprocess.Popen[bytes]
    started_at: float = field(default_factory=time.time)

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Rank 0's records so far, of one kind or all."""
        found = read_jsonl(self.records / f"train-{self.run}.jsonl")
        return [line for line in found if kind is None or line["kind"] == kind]

    def rank_lines(self, rank: int) -> list[dict[str, Any]]:
        """Records of another rank."""
        return read_jsonl(self.records / f"rank{rank}-{self.run}.jsonl")

    def check(self) -> bool:
        """True while it runs, False once it ended well; raises TrainingFailed otherwise."""
        code = self.process.poll()
        if code is None:
            return True
        if code:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
            msg = f"training '{self.run}' ended with {code}:\n{tail}"
            raise TrainingFailed(msg, hint=f"see {self.log}")
        return False

    def wait(self, *, timeout_seconds: float, tick: Callable[[], None] | None = None) -> None:
        """Until it ended well; raises TrainingFailed when it did not or took longer."""
        deadline = time.monotonic() + timeout_seconds
        while self.check():
            if time.monotonic() > deadline:
                self.kill()
                msg = f"training '{self.run}' still runs after {timeout_seconds:.0f} s"
                raise TrainingFailed(msg, hint=f"see {self.log}")
            if tick is not None:
                tick()
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL every process of it."""
        kill_tree(self.process.pid)
        self.process.wait()


def start_training(
    run: str,
    records: Path,
    save_dir: Path,
    *,
    stage: int,
    world_size: int,
    options: Sequence[str],
    in_background: bool = False,
) -> Training:
    """Start the trainer on `world_size` ranks; its output goes to `<records>/train-<run>.log`.

    `in_background`: it takes only the processor time that others leave, once it has loaded DeepSpeed's
    compiled parts: that is done under a lock, and what others wait for must not starve.
    """
    records.mkdir(parents=True, exist_ok=True)
    save_dir.mkdir(parents=True, exist_ok=True)
    log = records / f"train-{run}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world_size)]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), "-m", TRAINER]
    command += ["--name", run, "--records", str(records), "--save-dir", str(save_dir), "--stage", str(stage)]
    command += [*options, *(["--in-background"] if in_background else [])]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=child_environment()
        )
    return Training(run=run, records=records, log=log, process=process)
