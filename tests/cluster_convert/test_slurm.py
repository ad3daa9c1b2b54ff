"""`--cluster slurm`, and a SRC in a directory remote; sbatch and scancel are stand-ins of a few lines.

The example in config/ is what is submitted, and the worker reads its own disk: SRC is a path in a remote.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.conversion.cluster.conversion import Clustered
from ckptd.conversion.cluster.pool import Address
from ckptd.conversion.engine.supervisor import convert
from ckptd.errors import RefusedError
from ckptd.storage.stores.directory import DirectoryStore
from tests.cluster_convert import scene
from tests.cluster_convert.scene import OPTIONS, cli, content, until
from tests.stores.scene import Node
from tests.support.processes import is_running
from tests.support.real import REPOSITORY

pytestmark = [pytest.mark.faults]
TAG = "global_step7"
SBATCH = """#!/bin/sh
cp "$1" "$0.$$"
setsid bash "$0.$$" >"$0.$$.log" 2>&1 </dev/null &
echo $! >>"$0.jobs"
echo "Submitted batch job $!"
"""
SCANCEL = """#!/bin/sh
kill -- "-$1"
"""
HERE_ALONE = """
jobqueue:
  slurm:
    interface: lo
    local-directory: {folder}
    scheduler-options:
      dashboard_address: "127.0.0.1:0"
"""


@dataclass(frozen=True)
class Slurm:
    """A queue of this machine."""

    jobs_file: Path

    @property
    def jobs(self) -> list[int]:
        """Process groups of all jobs that were ever submitted."""
        return [int(line) for line in self.jobs_file.read_text().split()] if self.jobs_file.exists() else []

    def running(self) -> list[int]:
        """Those whose script is not over."""
        return [job for job in self.jobs if is_running(job)]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The settings of config/jobqueue.yaml, but on 127.0.0.1."""
    commands, settings = tmp_path / "bin", tmp_path / "dask"
    commands.mkdir()
    settings.mkdir()
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    shutil.copy(REPOSITORY / "config" / "jobqueue.yaml", settings)
    (settings / "later.yaml").write_text(HERE_ALONE.format(folder=tmp_path / "scratch"))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("DASK_CONFIG", str(settings))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    found = Slurm(commands / "sbatch.jobs")
    yield found
    for job in found.jobs:
        with suppress(ProcessLookupError):
            os.killpg(job, signal.SIGKILL)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node with a save that is committed in a directory, and another one that is not."""
    made = Node(tmp_path / "save", tag=TAG)
    scene.checkpoint(made.save_dir / TAG, stage=2, hidden=64)
    (tmp_path / "nas").mkdir()
    store = DirectoryStore(str(tmp_path / "nas"), owner="t")
    result = made.upload(made.attached(store), made.order(made.sealed(step=7)))
    assert result.outcome == "committed"
    shutil.copytree(made.save_dir / TAG, tmp_path / "nas" / "global_step8")
    return made


def test_a_job_of_slurm_reads_its_own_disk(
    slurm: Slurm, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SAVE_DIR", str(node.save_dir))
    remote, whole = tmp_path / "nas", tmp_path / "local"
    convert(node.save_dir / TAG, whole, OPTIONS)
    done = cli(f"file://{remote}/{TAG}", tmp_path / "made", "--cluster", "slurm:1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert content(tmp_path / "made") == content(whole)
    seen = json.loads(done.stdout)["cluster"]
    assert seen["workers"] == 1
    assert seen["bytes_read"] > seen["bytes_local"] > 0.9 * seen["bytes_needed"]
    assert len(slurm.jobs) == 1
    until(lambda: not slurm.running(), "the job was cancelled")


def test_a_path_in_a_directory_remote_is_of_that_remote(node: Node, tmp_path: Path) -> None:
    """As a URL below it: what has no COMMIT does not count there (P3), and nothing is made in it."""
    remote = tmp_path / "nas"
    for source, target, words in (
        (remote / "global_step8", tmp_path / "made", "holds no committed checkpoint in global_step8"),
        (remote / TAG, remote / "made", "lies in the remote of ckptd"),
        (node.save_dir / TAG, remote / "made", "lies in the remote of ckptd"),
    ):
        with pytest.raises(RefusedError, match=words):
            Clustered(source, target, OPTIONS, os.environ, address=Address(kind="local")).run()
        assert not target.exists()
