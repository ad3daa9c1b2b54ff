"""The launch scripts of examples/, with processes standing in for srun: they train on 0 and 4 alone (H54)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import runs
from tests.real import REPOSITORY

if TYPE_CHECKING:
    pass

EXAMPLES = REPOSITORY / "examples"
TRAIN = """#!/bin/sh
# what a trainer does: save once, on this node's own disk
echo "$CKPTD_CHOICE" >> "$WORK/trained-${SLURMD_NODENAME:-$NODE_NAME}"
mkdir -p "$WORK/${SLURMD_NODENAME:-$NODE_NAME}/nvme/run/$1"
cp "$SAVES/node${SLURM_NODEID:-$NODE_RANK}/$1/"* "$WORK/${SLURMD_NODENAME:-$NODE_NAME}/nvme/run/$1/"
while [ ! -e "$WORK/nas/_ckptd/commits/$1~g1~zero.json" ] && [ $((n=${n:-0}+1)) -lt 900 ]; do sleep 0.2; done
exit 7
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """One job file for every node, a trainer, and srun and ckptd on PATH."""
    runs.prepare([runs.LOCAL_2])
    (tmp_path / "bin").mkdir()
    (tmp_path / "nas").mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "nvme" / "run").mkdir(parents=True)
    program(
        tmp_path / "bin" / "srun",
        f'#!/bin/sh\nexec {sys.executable} {REPOSITORY}/tests/cluster/srun.py "$@"\n',
    )
    program(tmp_path / "bin" / "ckptd", f'#!/bin/sh\nexec {sys.executable} -m ckptd "$@"\n')
    program(tmp_path / "train.sh", TRAIN)
    (tmp_path / "run.toml").write_text(
        f'save_dir = "{tmp_path}/{{node_name}}/nvme/run"\nsettle = "0.5s"\nnode_name = "{{node_name}}"\n'
        f'[local]\nforms = []\n[[remote]]\nname = "nas"\nurl = "{tmp_path}/nas"\nsame_filesystem = true\n'
    )
    return tmp_path


def program(path: Path, text: str) -> None:
    """An executable file."""
    path.write_text(text)
    path.chmod(0o755)


def launch(work: Path, script: str, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A launch script of examples/, as a user starts it."""
    environment = {
        "PATH": f"{work / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CKPTD_JOB": str(work / "run.toml"),
        "CKPTD_TEST_NODES": "a b",
        "RANKS_PER_NODE": "2",
        "WORK": str(work),
        "SAVES": str(runs.LOCAL_2.save_dir(0).parent),
    }
    return subprocess.run(
        [str(EXAMPLES / script), *command],
        env=os.environ | environment | more,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def test_slurm_starts_fresh_then_resumes_and_refuses_to_guess(work: Path) -> None:
    """Nothing committed: 4, fresh; then 0, one tag for all; a remote that is away: nothing is trained."""
    assert subprocess.run(
        [work / "bin" / "ckptd", "check", "--init-remote", work / "run.toml"],
        env=os.environ | {"SLURMD_NODENAME": "a"},
        capture_output=True,
        check=False,
        timeout=120,
    ).returncode == 0  # fmt: skip
    done = launch(work, "slurm/job.sbatch", str(work / "train.sh"), "global_step2")
    assert done.returncode == 7, done.stdout + done.stderr
    assert "all nodes: fresh" in done.stdout
    done = launch(work, "slurm/job.sbatch", str(work / "train.sh"), "global_step4")
    assert done.returncode == 7, done.stdout + done.stderr
    for name in ("a", "b"):
        assert (work / f"trained-{name}").read_text().splitlines() == ["fresh", "resume global_step2"]
        assert (work / name / "nvme" / "run" / "latest").read_text() == "global_step2"
    (work / "nas").rename(work / "away")
    done = launch(work, "slurm/job.sbatch", str(work / "train.sh"), "global_step2")
    assert done.returncode == 69, done.stdout + done.stderr
    assert "nothing was trained" in done.stderr
    assert (work / "trained-a").read_text().count("\n") == 2


def test_nodes_that_disagree_do_not_train(work: Path) -> None:
    program(
        work / "bin" / "ckptd",
        '#!/bin/sh\n[ "$SLURM_NODEID" = 0 ] && { echo /x/global_step2; exit 0; }\nexit 4\n',
    )
    done = launch(work, "slurm/job.sbatch", str(work / "train.sh"), "global_step2")
    assert done.returncode == 65
    assert "nodes disagree" in done.stderr
    assert not list(work.glob("trained-*"))


@pytest.mark.parametrize(("code", "expected"), [(0, 7), (4, 7), (69, 69), (65, 65), (1, 1)])
def test_torchrun_trains_on_0_and_4_alone(work: Path, code: int, expected: int) -> None:
    program(
        work / "bin" / "ckptd",
        f'#!/bin/sh\n[ "$1" = resume ] && {{ echo /x/global_step2; exit {code}; }}\nexec sleep 600\n',
    )
    program(work / "train.sh", '#!/bin/sh\necho "$CKPTD_CHOICE" > "$WORK/trained"\nexit 7\n')
    done = launch(work, "torchrun/node.sh", str(work / "train.sh"), NNODES="2", NODE_RANK="0")
    assert done.returncode == expected, done.stderr
    assert (work / "trained").exists() == (code in (0, 4))
