"""examples/slurm as they are, on a real Slurm with real training (`make slurm`)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import PATIENCE_SECONDS
from tests.slurm.cluster import Slurm, missing, slurm
from tests.stores.servers import free_port
from tests.support.ranks import ENVIRONMENT
from tests.support.real import REPOSITORY

pytestmark = [pytest.mark.full, pytest.mark.root, pytest.mark.real]

NODES = ("node1", "node2", "node3", "node4", "spare")
EXAMPLES = REPOSITORY / "examples" / "slurm"
JOB = """save_dir = "{place}/{{node_name}}/nvme/run"
name = "run"
settle = "0.5s"
[local]
forms = []
[[remote]]
name = "nas"
url = "{place}/nas"
same_filesystem = true
forms = ["zero"]
{more}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Four nodes and a spare one."""
    reason = missing()
    if reason is not None:
        pytest.fail(reason)
    root = tmp_path_factory.mktemp("slurm")
    (root / "notes").mkdir()
    program(root / "epilog", f"CKPTD_EPILOG={root}/notes exec {EXAMPLES}/epilog.sh")
    with slurm(root, NODES, f"Epilog={root}/epilog") as here:
        yield here


def program(path: Path, line: str) -> None:
    """A shell script of one line."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@dataclass
class Place:
    """Where a run lives: its nodes' disks, its remote, and what the trainer wrote for the judge."""

    cluster: Slurm
    root: Path
    ranks: int = 4

    @property
    def environment(self) -> dict[str, str]:
        """Of a submitted job."""
        path = f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        ours = {"PATH": path, "CKPTD_JOB": str(self.root / "run.toml"), "RANKS_PER_NODE": "1"}
        ours |= {"CKPTD_EXAMPLES": str(EXAMPLES)}
        ours |= {"MASTER_PORT": str(free_port())}
        return self.cluster.environment | ENVIRONMENT | ours

    def write_job(self, more: str = "", below: str = "") -> None:
        """(Re)write the job file; `below`: the folder below the root that disks and remote lie in."""
        (self.root / "run.toml").write_text(JOB.format(place=self.root / below, more=more))

    def begin(self, task: str = "") -> None:
        """Make the disks, and the remote this job's; with `task` those of a task of an array."""
        for node in (*NODES, "login"):
            (self.root / task / node / "nvme" / "run").mkdir(parents=True)
        (self.root / task / "nas").mkdir()
        made = self.ckptd("check", "--init-remote", str(self.root / "run.toml"), SLURM_ARRAY_TASK_ID=task)
        assert made.returncode == 0, made.stdout + made.stderr

    def submit(self, *train: object, options: tuple[str, ...] = (), **more: str) -> str:
        """`sbatch job.sbatch` with the trainer; the job's number."""
        trainer = [sys.executable, "-m", "tests.slurm.train", str(self.root), *map(str, train)]
        script = str(EXAMPLES / "job.sbatch")
        done = subprocess.run(
            [
                "sbatch",
                "--parsable",
                "--open-mode=append",
                f"--output={self.root}/output",
                *options,
                script,
                *trainer,
            ],
            env=self.environment | more,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def ckptd(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A command of ckptd, outside of any job."""
        return subprocess.run(
            [sys.executable, "-m", "ckptd", *arguments],
            env=self.environment | {"SLURMD_NODENAME": "login"} | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )

    def said(self) -> str:
        """What the jobs said."""
        return (self.root / "output").read_text() if (self.root / "output").exists() else ""

    def lines(self, name: str) -> list[str]:
        """What the trainer wrote down."""
        path = self.root / name
        return path.read_text().splitlines() if path.exists() else []

    def commits(self) -> dict[str, dict[str, Any]]:
        """Tag → COMMIT, straight from the remote."""
        found = (self.root / "nas" / "_ckptd" / "commits").glob("*~zero.json")
        return {path.name.partition("~")[0]: json.loads(path.read_bytes()) for path in found}

    def saved(self) -> list[str]:
        """Tags that all ranks have saved."""
        tags = [path.name.rpartition(".")[0] for path in self.root.glob("sums/*")]
        return sorted({tag for tag in tags if tags.count(tag) == self.ranks})

    def newest(self, tags: Iterable[str]) -> int:
        """The highest step."""
        return max(int(tag.removeprefix("global_step")) for tag in tags)

    def starts_again(self, job: str) -> None:
        """Until a requeued job trains again, now and not in two minutes, at or above the newest COMMIT."""
        self.cluster.wait_state(job, "PENDING")
        newest = self.newest(self.commits())
        self.cluster.said("scontrol", "update", f"JobId={job}", "StartTime=now")
        self.cluster.wait("the second start", lambda: len(self.lines("starts")) == 2)
        assert self.lines("starts")[1] == f"resume {newest}", self.said()[-5000:]

    def wait_saved(self, tag: str, committed: bool = False) -> None:
        """Until all ranks have written the save down; with `committed`, until it has its COMMIT."""
        self.cluster.wait(
            f"{tag} in {self.root}: {self.said()[-3000:]}",
            lambda: tag in self.saved() and (not committed or tag in self.commits()),
        )

    def ended(self, job: str, *states: str, seconds: float = PATIENCE_SECONDS) -> dict[str, str]:
        """Wait for the end of the job in one of the states; nothing that it started is left."""
        try:
            found = self.cluster.wait_state(job, *states, seconds=seconds)
        except AssertionError as error:
            error.add_note(self.said()[-5000:])
            raise
        self.cluster.wait("an end of all processes", lambda: not self.cluster.left_behind(), 60)
        return found

    def judge(self, *tags: str) -> None:
        """Exactly these are committed, `ckptd verify` says so, and their bytes are the trainer's."""
        assert sorted(self.commits()) == sorted(tags), self.said()[-5000:]
        verified = self.ckptd("verify", str(self.root / "nas"), "--read-data")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        for tag in tags:
            wanted = [json.loads(path.read_bytes()) for path in self.root.glob(f"sums/{tag}.*")]
            # what a killed upload leaves is no object, and zero_to_fp32.py lies beside the save's folder
            files = (path for path in (self.root / "nas" / tag).iterdir() if path.name != "_extra")
            there = {path.name: path.read_bytes() for path in files if ".ckptd-part-" not in path.name}
            assert there.keys() == {name for sums in wanted for name in sums}
            for name, data in there.items():
                assert hashlib.sha256(data).hexdigest() in {sums.get(name) for sums in wanted}, name
        seen: dict[int, float] = {}
        for step, loss in map(json.loads, self.lines("losses")):
            assert abs(seen.setdefault(step, loss) - loss) < 2e-3, (
                f"step {step} was trained otherwise the second time"
            )


@pytest.fixture
def place(cluster: Slurm, tmp_path: Path) -> Place:
    """One job file for all nodes, its remote made this job's."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "ckptd", f'exec {sys.executable} -m ckptd "$@"')
    here = Place(cluster, tmp_path)
    here.write_job()
    here.begin()
    return here


def test_a_job_that_ends_by_itself(place: Place) -> None:
    """Everything is committed when it ends; the next job goes on from the newest."""
    job = place.submit("--steps", 6)
    assert place.ended(job, "COMPLETED", "FAILED")["ExitCode"] == "0:0", place.said()
    place.judge("global_step2", "global_step4", "global_step6")
    job = place.submit("--steps", 8)
    assert place.ended(job, "COMPLETED", "FAILED")["ExitCode"] == "0:0", place.said()
    assert place.lines("starts") == ["fresh 0", "resume 6"]
    assert place.said().count("all nodes: ") == 2
    place.judge("global_step2", "global_step4", "global_step6", "global_step8")


def test_the_signal_before_the_time_limit(place: Place) -> None:
    """The trainer hears of it once, saves, and the daemons upload that; the job ends before its limit."""
    options = ("--time=3", "--signal=B:TERM@120")
    job = place.submit("--save-every", 1000, "--step-seconds", 0.5, options=options)
    assert place.ended(job, "FAILED", "TIMEOUT", "COMPLETED", seconds=400)["ExitCode"] == "7:0", place.said()
    assert sorted(place.lines("told")) == [f"rank {rank} SIGTERM" for rank in range(4)]
    assert len(place.saved()) == 1
    place.judge(*place.saved())


def test_a_job_killed_at_its_time_limit_uses_what_is_left(place: Place) -> None:
    """No signal beforehand. TERM reaches trainer and daemons at once, twice; what is saved then is committed
    within KillWait, and the next job goes on from it."""
    place.write_job('bandwidth = "100KB/s"')
    options = ("--time=1", "--signal=B:CONT@1")
    job = place.submit("--save-every", 5, "--step-seconds", 0.5, options=options)
    place.ended(job, "TIMEOUT", "FAILED", "COMPLETED", seconds=400)
    assert place.cluster.job(job)["JobState"] == "TIMEOUT", place.said()
    newest = place.newest(place.saved())
    assert newest == place.newest(place.commits()), place.said()
    place.write_job()
    job = place.submit("--steps", newest + 1, "--save-every", 1)
    assert place.ended(job, "COMPLETED", "FAILED")["ExitCode"] == "0:0", place.said()
    assert place.lines("starts")[1] == f"resume {newest}"
    place.judge(*place.commits())


def test_requeued_by_a_person(place: Place) -> None:
    """It goes on from what was saved and committed between TERM and the end."""
    place.write_job('bandwidth = "300KB/s"')
    job = place.submit("--save-every", 5, "--step-seconds", 0.5)
    place.wait_saved("global_step10", committed=True)
    place.cluster.said("scontrol", "requeue", job)
    place.starts_again(job)
    place.cluster.said("scancel", "--batch", "--signal=TERM", job)
    assert place.ended(job, "FAILED", "COMPLETED")["ExitCode"] == "7:0", place.said()
    place.judge(*place.saved())


def test_requeued_since_a_node_died(place: Place) -> None:
    """Its disk is lost; a spare node with an empty one takes part from the newest COMMIT on."""
    job = place.submit("--save-every", 5, "--step-seconds", 0.5)
    place.wait_saved("global_step5", committed=True)
    lost = "node2"
    place.cluster.lose(lost)
    try:
        place.starts_again(job)
        assert "spare" in place.cluster.job(job)["NodeList"]
        place.cluster.said("scancel", "--batch", "--signal=TERM", job)
        assert place.ended(job, "FAILED", "COMPLETED")["ExitCode"] == "7:0", place.said()
    finally:
        place.cluster.start_node(lost)
        place.cluster.wait_idle()
    place.judge(*place.commits())


def test_tasks_of_an_array_do_not_mix(place: Place) -> None:
    """Each has a save_dir and a remote of its own, by {SLURM_ARRAY_TASK_ID}; one is cancelled before."""
    place.write_job(below="{SLURM_ARRAY_TASK_ID}")
    tasks = [Place(place.cluster, place.root / number, ranks=2) for number in "01"]
    for number in "01":
        place.begin(number)
    options = ("--array=0-1", "--nodes=2", f"--output={place.root}/%a/output")
    job = place.submit("--save-every", 5, "--step-seconds", 0.5, options=options)
    for task in tasks:
        task.wait_saved("global_step5", committed=True)
    place.cluster.said("scancel", "--batch", "--signal=TERM", f"{job}_0")
    assert place.cluster.wait_state(f"{job}_0", "FAILED")["ExitCode"] == "7:0", tasks[0].said()
    assert place.cluster.job(f"{job}_1")["JobState"] == "RUNNING", tasks[1].said()
    place.cluster.said("scancel", "--batch", "--signal=TERM", f"{job}_1")
    assert tasks[1].ended(f"{job}_1", "FAILED")["ExitCode"] == "7:0", tasks[1].said()
    for task in tasks:
        task.judge(*task.saved())
    assert tasks[0].newest(tasks[0].saved()) < tasks[1].newest(tasks[1].saved())


@pytest.mark.parametrize("how", [(), ("--signal=TERM",), ("--signal=TERM", "--batch")])
def test_scancel(place: Place, how: tuple[str, ...]) -> None:
    """However the job is told, what the trainer saves then is committed."""
    place.write_job('bandwidth = "300KB/s"')
    job = place.submit("--save-every", 5, "--step-seconds", 0.5)
    place.wait_saved("global_step5")
    place.cluster.said("scancel", *how, job)
    found = place.ended(job, "CANCELLED", "FAILED", "COMPLETED")
    assert (found["JobState"], found["ExitCode"]) == (("FAILED", "7:0") if how else ("CANCELLED", "0:9")), (
        place.said()
    )
    place.judge(*place.saved())


def test_scancel_full_kills_at_once(place: Place) -> None:
    """It reaches srun, which kills its tasks: nothing is drained, and the next job takes what is there."""
    place.write_job('bandwidth = "300KB/s"')
    job = place.submit("--save-every", 5, "--step-seconds", 0.5)
    place.wait_saved("global_step10", committed=True)
    place.cluster.said("scancel", "--full", "--signal=TERM", job)
    assert place.ended(job, "FAILED", "COMPLETED")["ExitCode"] != "7:0", place.said()
    newest = place.newest(place.commits())
    job = place.submit("--steps", 30)
    assert place.ended(job, "COMPLETED", "FAILED")["ExitCode"] == "0:0", place.said()
    assert place.lines("starts")[1] == f"resume {newest}"
    place.judge(*place.commits())


def test_the_epilog_uploads_what_a_kill_left(place: Place) -> None:
    """Slurm keeps the nodes until then."""
    place.write_job('bandwidth = "300KB/s"')
    notes = place.cluster.root / "notes"
    job = place.submit("--save-every", 5, "--step-seconds", 0.5, CKPTD_EPILOG=str(notes))
    place.wait_saved("global_step5")
    assert list(notes.iterdir()) == [notes / job]
    place.cluster.said("scancel", "--full", "--signal=TERM", job)
    assert place.commits() == {}
    assert place.ended(job, "FAILED", "COMPLETED")["ExitCode"] != "7:0", place.said()
    place.judge(*place.saved())
    assert list(notes.iterdir()) == []


def test_a_rank_that_dies_ends_the_training_and_no_daemon(place: Place) -> None:
    """With --kill-on-bad-exit for all steps; and a daemon that was killed before does not matter."""
    job = place.submit("--save-every", 5, "--step-seconds", 0.5, "--crash", "13.2", SLURM_KILL_BAD_EXIT="1")
    place.wait_saved("global_step5", committed=True)
    daemon = next(pid for pid, line in place.cluster.processes("node3").items() if " run --job " in line)
    os.kill(daemon, signal.SIGKILL)
    assert place.ended(job, "FAILED", "COMPLETED")["JobState"] == "FAILED", place.said()
    assert "node3: task 2: Killed" in place.said()
    place.judge("global_step5", "global_step10")
