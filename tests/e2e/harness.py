"""A node for end-to-end tests: a real daemon, a save_dir that a replayed trainer writes, a NAS folder.

The bytes are real DeepSpeed saves (tests/support/real.py), written again in DeepSpeed's order: model
states, rank 0's optimizer shard, `latest`, and only then the other ranks' shards (docs/formats.md §1.1).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptd.storage.local.state_dir import drop_status, private_place
from tests.support.real import Recipe, expect, prepare, save_dir_of
from tests.support.status_schema import checked

RUN = Recipe(stage=2, world_size=2, save_at=(1, 2, 3, 4, 5, 6, 7, 8))
OTHER_RUN = Recipe(stage=2, world_size=2, vocab=139, save_at=(1, 2, 3, 4, 5, 6, 7, 8))
"""The same grid trained on something else: the run after a rewind, or the second save of a tag."""
expect(RUN, OTHER_RUN)


def made_before(*runs: Recipe) -> Any:
    """A fixture that a module keeps as `real_saves`: these trainings come before its first test."""
    expect(*runs)

    @pytest.fixture(scope="module", autouse=True)
    def real_saves() -> None:
        prepare(runs)

    return real_saves


def shards_in_order(folder: Path) -> list[Path]:
    """Files of a save as DeepSpeed writes them: model states, then optimizer shards by rank."""
    return sorted(folder.iterdir(), key=lambda p: ("optim" in p.name, p.name))


PATIENCE_SECONDS = 200.0
PACE = {"link-slow", "disk-full-soon", "trainer-may-outrun"}
"""What a busy machine may have said meanwhile."""


@dataclass
class Node:
    """One node. `job` is TOML put before, `local` and `remote` into their sections."""

    root: Path
    job: str = ""
    local: str = "save_total_limit = 2"
    remote: str = ""
    url: str = ""
    """Of the remote; default a directory of the node."""
    environment: dict[str, str] = field(default_factory=dict)
    under: tuple[str, ...] = ()
    """What the daemon is started by: a command that goes before its own."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.save_dir = self.root / "nvme" / "run"
        self.nas = self.root / "nas" / "run"
        self.state = self.save_dir / "_ckptd" / "state"
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self.nas.mkdir(parents=True, exist_ok=True)
        self.job_file = self.root / "run.toml"
        self.log = self.root / "ckptd.log"
        self.write_job()

    def write_job(self, **changes: str) -> None:
        """(Re)write the job file."""
        for key, value in changes.items():
            setattr(self, key, value)
        place = f'url = "{self.url}"' if self.url else f'url = "{self.nas}"\nsame_filesystem = true'
        self.job_file.write_text(
            f'save_dir = "{self.save_dir}"\nsettle = "0.5s"\n{self.job}\n[local]\n{self.local}\n'
            f'[[remote]]\nname = "nas"\n{place}\n{self.remote}\n'
        )

    # --- the daemon ------------------------------------------------------------------------------------

    def start(self, *options: str, seconds: float = PATIENCE_SECONDS) -> subprocess.Popen[bytes]:
        """Start a daemon and wait until it watches, or says that save_dir is not there yet."""
        with self.log.open("ab") as log:
            mark = log.tell()
            process = subprocess.Popen(
                [*self.under, sys.executable, "-m", "ckptd", "run", "--job", str(self.job_file), *options],
                stdout=log,
                stderr=log,
                env=os.environ | {"COLUMNS": "200"} | self.environment,
            )
        self.processes.append(process)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None:
            if b"watching" in self.log.read_bytes()[mark:]:
                break
            if not self.save_dir.is_dir() and (private_place(self.save_dir) / "status.json").exists():
                break
            time.sleep(0.05)
        return process

    def comes_to_rest(self) -> bool:
        """`ckptd run --once` ends well; on a busy machine it may find that the link was slow."""
        return self.once() == 0 or (bool(self.problems()) and not self.problems() - PACE)

    def once(self, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        """`ckptd run --once`; its exit code."""
        with self.log.open("ab") as log:
            return subprocess.run(
                [sys.executable, "-m", "ckptd", "run", "--job", str(self.job_file), "--once"],
                stdout=log,
                stderr=log,
                timeout=timeout_seconds,
                check=False,
                env=os.environ | {"COLUMNS": "200"} | self.environment,
            ).returncode

    def kill(self) -> None:
        """SIGKILL to the newest daemon."""
        self.processes[-1].kill()
        self.processes[-1].wait(PATIENCE_SECONDS)

    def stop(self, seconds: float = PATIENCE_SECONDS) -> int:
        """SIGTERM; the exit code."""
        self.processes[-1].send_signal(signal.SIGTERM)
        return self.processes[-1].wait(seconds)

    def end(self) -> None:
        """Nothing of ours outlives a test."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
                process.wait(PATIENCE_SECONDS)
        # of a daemon that was killed while it waited for its first checkpoint
        drop_status(private_place(self.save_dir), "status.json")

    def ckptd(
        self, *arguments: object, timeout_seconds: float = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Another command."""
        return subprocess.run(
            [sys.executable, "-m", "ckptd", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env=os.environ | {"COLUMNS": "200"} | self.environment,
        )

    # --- the trainer -----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        run: Recipe = RUN,
        *,
        tag: str = "",
        shards: int | None = None,
        pause_seconds: float = 0.0,
        latest: bool = True,
    ) -> str:
        """Write a save in DeepSpeed's order; with `shards` only the first so many files (a crash)."""
        prepare([run])
        source = save_dir_of(run) / f"global_step{step}"
        tag = tag or source.name
        folder = self.save_dir / tag
        folder.mkdir(exist_ok=True)
        for number, path in enumerate(shards_in_order(source)):
            if shards is not None and number >= shards:
                break
            if number == 2:
                if latest:
                    (self.save_dir / "latest").write_text(tag)
                time.sleep(pause_seconds)
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                error.add_note(self._now())
                raise
        return tag

    # --- looking ---------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The job in status.json; empty before there is one."""
        try:
            document: dict[str, Any] = checked((self.state / "status.json").read_bytes())["jobs"][0]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return document

    def checkpoint(self, tag: str) -> dict[str, Any]:
        """One checkpoint in status.json, the newest save of its tag."""
        found = [c for c in self.status().get("checkpoints", ()) if c["tag"] == tag]
        return found[0] if found else {}

    def problems(self) -> set[str]:
        """Open problem codes."""
        return {p["code"] for p in self.status().get("problems", ())}

    def commits(self, form: str = "zero") -> dict[str, dict[str, Any]]:
        """`<tag>~g<n>` → COMMIT, straight from the remote."""
        folder = self.nas / "_ckptd" / "commits"
        found = {}
        for path in sorted(folder.glob(f"*~{form}.json")) if folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):
                found[path.name.removesuffix(f"~{form}.json")] = json.loads(path.read_bytes())
        return found

    def audit(self, action: str = "prune") -> list[dict[str, Any]]:
        """Lines of audit.jsonl."""
        path = self.state / "audit.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["action"] == action]

    def local_tags(self) -> set[str]:
        """Checkpoint folders in save_dir."""
        return {p.name for p in self.save_dir.iterdir() if p.is_dir() and p.name != "_ckptd"}

    def wait(
        self,
        what: str,
        done: Callable[[], object],
        seconds: float = PATIENCE_SECONDS,
        pause_seconds: float = 0.05,
    ) -> None:
        """Until `done`, with more patience than a busy machine needs; the log's end is in the failure."""
        seconds = max(seconds, PATIENCE_SECONDS)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(KeyError, IndexError, json.JSONDecodeError):
                if done():
                    return
            time.sleep(pause_seconds)
        raise AssertionError(f"waited {seconds} s for {what}\n{self._now()}")

    def _now(self) -> str:
        """For a failure: the job's status and the log's end."""
        tail = self.log.read_text()[-3000:] if self.log.exists() else ""
        return f"{json.dumps(self.status())[:1500]}\n{tail}"

    def wait_committed(self, key: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until `<tag>~g<n>` is committed."""
        self.wait(f"the COMMIT {key}", lambda: key in self.commits(), seconds)


@contextlib.contextmanager
def node(root: Path, job: str = "", local: str = "save_total_limit = 2", remote: str = "") -> Iterator[Node]:
    """A node whose processes end with the test."""
    here = Node(root, job=job, local=local, remote=remote)
    try:
        yield here
    finally:
        here.end()


def children_of(pid: int) -> list[int]:
    """Child processes, by /proc."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def same_bytes(node_: Node, folder: str, run: Recipe, step: int) -> bool:
    """True when a folder in the NAS holds exactly the shards of that save."""
    source = save_dir_of(run) / f"global_step{step}"
    return all((node_.nas / folder / p.name).read_bytes() == p.read_bytes() for p in source.iterdir())
