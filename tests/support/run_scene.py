"""Two trainings of one job name and one URL: a save_dir each, one NAS, and what daemons write there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.config.commands import user_name
from ckptd.core.model.heartbeat import Heartbeat, heartbeat_key
from ckptd.core.model.manifest import to_bytes
from ckptd.core.model.runs import RUNS, Claim, Row, RunFile
from ckptd.core.policy.leases import numbered
from ckptd.storage.local.run_file import host_name, read_run, run_file, write_run
from ckptd.storage.remote.documents import read_identity
from ckptd.storage.remote.runs import latest_row, row_of
from ckptd.storage.stores.base import Store
from tests.support.recover_scene import Scene
from tests.support.synthetic import write_stage12

from tests.support.recover_scene import EXTRA, SHAPES  # isort: skip


def append_run(store: Store, claim: Claim) -> Row:
    """Let a run go on in a place because a person says so, whoever else writes there."""
    identity = read_identity(store)
    assert identity is not None
    number, _row = latest_row(store, RUNS, Row)
    made = row_of(claim, identity.job_id, claim.run_id, number + 1)
    assert store.put_if_absent(numbered(RUNS, number + 1), to_bytes(made))
    return made


@dataclass
class Run(Scene):
    """One training: its own bytes in `root/<name>/run`; `id_`: its run id once it was claimed."""

    name: str = "x"

    @property
    def save_dir(self) -> Path:
        """Of this training."""
        return self.root / self.name / "run"

    @property
    def place(self) -> dict[str, str]:
        """As rows and heartbeats have it."""
        who = {"node": self.node, "node_id": f"id-{self.name}", "host": host_name(), "user": user_name()}
        return {**who, "save_dir": str(self.save_dir)}

    def save(self, step: int, tag: str = "", *, salt: str = "") -> str:
        """Shards that no other training has."""

        def change(_: int, inner: dict[str, Any]) -> None:
            inner["clip_grad"] = float(sum(map(ord, f"{self.name}{salt}")))

        tag = tag or f"global_step{step}"
        write_stage12(self.save_dir / tag, SHAPES, self.dp, step=step, change=change)
        (self.save_dir / "latest").write_text(tag)
        (self.save_dir / EXTRA).write_text("{}")
        return tag

    def claim(self, run_id: str, **more: object) -> Row:
        """The run goes on here."""
        self.run_id = run_id
        store = self.ground().store
        return append_run(store, Claim.model_validate({**self.place, "run_id": run_id, **more}))

    def hold(self, run_id: str) -> None:
        """What a daemon writes in save_dir once it knows its run."""
        fd = os.open(self.save_dir, os.O_RDONLY)
        write_run(fd, run_file(fd, str(self.save_dir), run_id, "begun"))
        os.close(fd)

    def held(self) -> RunFile | None:
        """That word, as it stands."""
        fd = os.open(self.save_dir, os.O_RDONLY)
        try:
            return read_run(fd, str(self.save_dir))
        finally:
            os.close(fd)

    def beat(self, seconds_ago: float = 0.0, **more: object) -> None:
        """The daemon was heard of, by the store's time."""
        said = {"job_id": "j", "job": "run", "config_digest": "c", "ckptd_version": "1", "state": "ok"}
        at = {"as_of": f"{time.time()}", "run_id": self.run_id}
        key = heartbeat_key(self.node, f"id-{self.name}")
        found = Heartbeat.model_validate({**self.place, **said, **at, **more})
        self.ground().store.put(key, to_bytes(found))
        then = time.time() - seconds_ago
        os.utime(self.nas / key, (then, then))


@dataclass
class Pair:
    """X committed steps 10 and 20, then Y, in another save_dir, steps 4 and 6; Y's row is the newest."""

    x: Run
    y: Run


X, Y = "aaaa1111" * 4, "bbbb2222" * 4


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """The scene of a sweep that gave both trainings one name and one URL."""
    x, y = Run(tmp_path, name="x"), Run(tmp_path, name="y")
    for run, run_id, steps in ((x, X, (10, 20)), (y, Y, (4, 6))):
        run.claim(run_id)
        for step in steps:
            run.commit(run.save(step), step)
        run.hold(run_id)
    return Pair(x, y)
