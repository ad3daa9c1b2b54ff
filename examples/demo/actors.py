"""The processes of a quickstart beside the trainer: `ckptd run` and the eyewitness, each started as such.

The daemon is watched from outside: its status.json as anybody may read it, its memory as the kernel tells.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil

from ckptd.errors import CkptdError
from examples.demo.launch import child_environment, kill_tree
from examples.demo.scene import MEMORY_BUDGET_MIB

if TYPE_CHECKING:
    from examples.demo.scene import Scene

MEMORY_EVERY_SECONDS = 0.5
STOP_SECONDS = 20.0


class DaemonEnded(CkptdError):
    """`ckptd run` ended by itself."""

    default_hint = "its log says why"


class Watcher:
    """The eyewitness process (examples.demo.observer)."""

    def __init__(self, scene: Scene) -> None:
        command = [sys.executable, "-m", "examples.demo.observer", "--remote", scene.remote.address]
        command += ["--save-dir", str(scene.save_dir), "--out", str(scene.observed)]
        with (scene.records / "observer.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=child_environment())

    def stop(self) -> None:
        """Ask it to finish its notes, and wait."""
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Daemon:
    """`ckptd run --job job.toml`, restarted as often as the play demands."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._process: subprocess.Popen[bytes] | None = None
        self._next_sample = 0.0
        self._shown: dict[str, str] = {}

    @property
    def log_path(self) -> str:
        """Where its standard error goes."""
        return str(self._scene.records / "ckptd.log")

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, "-m", "ckptd", "run", "--job", str(self._scene.job_file)]
        environment = child_environment(
            {"CKPTD_MEMORY_BUDGET": f"{MEMORY_BUDGET_MIB}MiB", **self._scene.remote.environment}
        )
        with (self._scene.records / "ckptd.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self._scene.note("daemon-start", pid=self._process.pid)

    def kill(self) -> None:
        """SIGKILL to the daemon alone: its children must notice by themselves. Then make sure of them."""
        if self._process is None:
            return
        children = _children(self._process.pid)
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(children, timeout=60)
        left = [child for child in children if child.is_running() and child.status() != "zombie"]
        if left:
            self._scene.note("children-outlived", names=[" ".join(_command(child)) for child in left])
        for child in left:
            kill_tree(child.pid)
        self._process = None

    def stop(self) -> None:
        """SIGTERM, wait, then SIGKILL."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._scene.note("daemon-did-not-stop")
        self.kill()

    def check(self) -> None:
        """Sample memory and states; raises DaemonEnded when it is gone without our doing."""
        if self._process is None:
            return
        code = self._process.poll()
        if code is not None:
            with open(self.log_path, errors="replace") as log:
                tail = "".join(log.readlines()[-8:])
            self._process = None
            msg = f"ckptd run ended with {code}:\n{tail}"
            raise DaemonEnded(msg, hint=f"see {self.log_path}")
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + MEMORY_EVERY_SECONDS
            self._scene.note("memory", bytes=_tree_bytes(self._process.pid))
            self._note_states()

    def _note_states(self) -> None:
        for checkpoint in self._scene.status().get("checkpoints", []):
            line = _state_line(checkpoint)
            text = json.dumps(line)
            if self._shown.get(checkpoint["tag"]) != text:
                self._shown[checkpoint["tag"]] = text
                with (self._scene.records / "status.jsonl").open("a") as sink:
                    sink.write(json.dumps({"at": time.time(), **line}) + "\n")


def _state_line(checkpoint: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = next((r.get("zero", {}) for r in checkpoint.get("remotes", {}).values()), {})
    return {
        "tag": checkpoint["tag"],
        "generation": checkpoint.get("generation"),
        "state": checkpoint.get("state"),
        "upload_started_at": zero.get("started_at"),
        "keep": checkpoint.get("keep", []),
    }


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _tree_bytes(pid: int) -> int:
    """Resident bytes of the daemon and all its children."""
    total = 0
    try:
        everyone = [psutil.Process(pid), *_children(pid)]
    except psutil.NoSuchProcess:
        return 0
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
