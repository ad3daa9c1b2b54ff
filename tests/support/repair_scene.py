"""A node with two remotes, "nas" and "nas2", and `verify --repair` on it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.main import main
from ckptd.config.schema import JobConfig, RemoteConfig
from ckptd.maintenance.repair import Repair, RepairRequest, RepairResult, Unfinished
from ckptd.maintenance.verify import Slice
from ckptd.observe.audit import Audit
from ckptd.recover.select.inventory import read_remote_inventory
from tests.support.restore_scene import TAG, RestoreScene

LONG_AGO_NS = 10**18


@dataclass
class RepairScene(RestoreScene):
    """The second remote is a copy of the first: the same identity serves as another one's."""

    bandwidth = "none"
    """Of every remote."""

    @property
    def nas2(self) -> Path:
        """The second remote's root."""
        return self.root / "nas2" / "run"

    @property
    def state(self) -> Path:
        """The job's state directory."""
        return self.root / "state"

    def mirror(self) -> None:
        """What lies on nas lies on nas2 too."""
        self.nas2.parent.mkdir(exist_ok=True)
        shutil.copytree(self.nas, self.nas2)

    def two_and_quiet(self) -> None:
        """Two committed checkpoints on both remotes; the node was quiet for long."""
        self.two()
        self.mirror()
        self.quiet()

    def quiet(self) -> None:
        """Nothing here changed lately; times of files stay as they were committed."""
        for folder in self.save_dir.iterdir():
            if folder.is_dir() and not folder.name.startswith("_"):
                os.utime(folder, ns=(LONG_AGO_NS, LONG_AGO_NS))

    def save(self, step: int, tag: str = "", *, salt: str = "") -> str:
        """As a trainer, long ago."""
        tag = RestoreScene.save(self, step, tag, salt=salt)
        for path in [*(self.save_dir / tag).iterdir(), self.save_dir / tag]:
            os.utime(path, ns=(LONG_AGO_NS + step, LONG_AGO_NS + step))
        return tag

    def job_with(self, *roots: Path) -> JobConfig:
        """The job with these directories as its remotes, named by their parents."""
        remotes = tuple(
            RemoteConfig.model_validate(
                {"name": root.parent.name, "url": str(root), "bandwidth": self.bandwidth}
            )
            for root in roots
        )
        return self.job(remote=False).model_copy(update={"remotes": remotes})

    def repair(
        self, tag: str | None = None, *, read: bool = True, dry_run: bool = False, **more: Any
    ) -> Repair:
        """`ckptd verify --repair --read-data` over every remote that is there."""
        self.state.mkdir(exist_ok=True)
        roots = [root for root in (self.nas, self.nas2) if root.exists()]
        job = self.job_with(*roots)
        inventories = [read_remote_inventory(r.name, r.url, None) for r in job.remotes]
        targets = more.pop("targets", [r.name for r in job.remotes])
        repair = Repair(
            job,
            inventories,
            RepairRequest(
                targets=frozenset(targets), tag=tag, read=Slice() if read else None, dry_run=dry_run, **more
            ),
            node_id=None,
            audit=None if dry_run else Audit(self.state / "audit.jsonl"),
            unfinished=Unfinished(self.state),
            say=self.said.append,
        )
        repair.run()
        return repair

    def audit(self) -> list[dict[str, Any]]:
        """Lines of audit.jsonl."""
        path = self.state / "audit.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def shard(self, number: int, tag: str = TAG, root: Path | None = None) -> Path:
        """An optimizer shard here, or in a remote."""
        name = f"bf16_zero_pp_rank_{number}_mp_rank_00_optim_states.pt"
        return (root or self.save_dir) / tag / name


def outcomes(repair: Repair) -> list[tuple[str, str, str | None]]:
    """(where, outcome, source without its path)."""
    return [(row.where, row.outcome, _word(row)) for row in repair.rows]


def _word(row: RepairResult) -> str | None:
    return None if row.source is None else row.source.split(" ")[0]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """A command of ckptd in this process: a start of Python is most of what it would cost."""
    capsys.readouterr()
    code: object = 0
    try:
        main([str(word) for word in arguments])
    except SystemExit as ended:
        code = ended.code or 0
    said = capsys.readouterr()
    assert isinstance(code, int)
    return Done(code, said.out, said.err)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed checkpoints and their mirror, made once."""
    root = tmp_path_factory.mktemp("built")
    RepairScene(root).two_and_quiet()
    return root


@pytest.fixture
def scene(tmp_path: Path, built: Path) -> RepairScene:
    """A copy of `built`."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return RepairScene(tmp_path)


@pytest.fixture
def bare(tmp_path: Path) -> RepairScene:
    """An empty node."""
    return RepairScene(tmp_path)
