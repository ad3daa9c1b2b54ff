"""The launch scripts of examples/, with stand-ins for Slurm: they train on 0 and 4 alone (H54)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import runs
from tests.cluster.slurm import below, listed, send
from tests.e2e.harness import PATIENCE_SECONDS
from tests.support.real import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
TRAIN = """#!/bin/sh
# what a trainer does: train until TERM, then save on this node's own disk, which takes a while, and end
echo "$CKPTD_CHOICE" >> "$WORK/trained-$SLURMD_NODENAME"
[ $# = 0 ] && exit 7
save() {
    sleep 1
    mkdir -p "$WORK/$SLURMD_NODENAME/nvme/run/$1"
    cp "$SAVES/node${SLURM_NODEID:-$NODE_RANK}/$1/"* "$WORK/$SLURMD_NODENAME/nvme/run/$1/"
    exit 7
}
trap 'save "$1"' TERM
echo training
while :; do sleep 0.2; done
"""

DRAIN = """#!/bin/sh
# what a daemon does: watch until TERM, then drain, which takes a while, and end; nothing to resume from
[ "$1" = resume ] && exit 4
[ "$1" = drain ] && exit 0
drain() {
    echo draining
    sleep 2
    echo "$SLURMD_NODENAME" >> "$WORK/drained"
    exit 0
}
trap drain TERM
echo watching
while :; do sleep 0.2; done
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """One job file for every node, a trainer, and Slurm's commands and ckptd on PATH."""
    runs.prepare([runs.LOCAL_2])
    (tmp_path / "bin").mkdir()
    (tmp_path / "nas").mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "nvme" / "run").mkdir(parents=True)
    (tmp_path / "steps").mkdir()
    for name in ("srun", "squeue", "scancel"):
        stand_in = f"{sys.executable} {REPOSITORY}/tests/cluster/slurm.py {name}"
        program(tmp_path / "bin" / name, f'#!/bin/sh\nexec {stand_in} "$@"\n')
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


def first_start(work: Path) -> None:
    """Make the remote this job's."""
    initialised = subprocess.run(
        [work / "bin" / "ckptd", "check", "--init-remote", work / "run.toml"],
        env=os.environ | {"SLURMD_NODENAME": "a"},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert initialised.returncode == 0


def begin(work: Path, script: str, *command: str, **more: str) -> subprocess.Popen[bytes]:
    """A launch script of examples/, as a user starts it; what it says is added to `output`."""
    environment = {
        "PATH": f"{work / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CKPTD_JOB": str(work / "run.toml"),
        "CKPTD_TEST_NODES": "a b",
        "CKPTD_TEST_STEPS": str(work / "steps"),
        "SLURM_JOB_ID": "17",
        "RANKS_PER_NODE": "2",
        "WORK": str(work),
        "SAVES": str(runs.LOCAL_2.save_dir(0).parent),
    }
    with (work / "output").open("ab") as out:
        return subprocess.Popen(
            [str(EXAMPLES / script), *command],
            env=os.environ | environment | more,
            cwd=REPOSITORY,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def end_of(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; nothing that it started outlives it."""
    try:
        return process.wait(400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def launch(work: Path, script: str, *command: str, **more: str) -> tuple[int, str]:
    """Its exit code and what was said."""
    (work / "output").write_text("")
    return end_of(begin(work, script, *command, **more)), (work / "output").read_text()


def terminated(work: Path, *scripts: Callable[[], subprocess.Popen[bytes]]) -> tuple[set[int], str]:
    """TERM to each script once both nodes train and are watched, as at the end of an allocation."""
    (work / "output").write_text("")
    started = [script() for script in scripts]
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (said := (work / "output").read_text()).count("watching") < 2 or said.count("training\n") < 2:
            assert time.monotonic() < deadline, said
            assert all(process.poll() is None for process in started), said
            time.sleep(0.1)
        for process in started:
            process.terminate()
        return {end_of(process) for process in started}, (work / "output").read_text()
    finally:
        for process in started:
            process.kill()
            end_of(process)


def test_a_run_from_slurm_to_torchrun_and_back(work: Path) -> None:
    """Nothing committed: fresh; then from one tag on every node; a remote that is away: nothing is trained.

    TERM reaches trainers first; what they save then is committed when the script ends, though they are gone.
    """
    first_start(work)
    commits, train = work / "nas" / "_ckptd" / "commits", str(work / "train.sh")
    codes, said = terminated(work, partial(begin, work, "slurm/job.sbatch", train, "global_step2"))
    assert codes == {7}, said
    assert "all nodes: fresh" in said
    assert told(work) == ["train TERM", "ckptd-run TERM"]
    assert (commits / "global_step2~g1~zero.json").exists(), said

    def node(rank: int) -> subprocess.Popen[bytes]:
        given = {"NNODES": "2", "NODE_RANK": str(rank), "SLURMD_NODENAME": "ab"[rank]}
        return begin(work, "torchrun/node.sh", train, "global_step4", **given)

    codes, said = terminated(work, partial(node, 0), partial(node, 1))
    assert codes == {7}, said
    assert (commits / "global_step4~g1~zero.json").exists(), said
    code, said = launch(work, "slurm/job.sbatch", train)
    assert code == 7, said
    assert "all nodes: resume global_step4" in said
    for name in ("a", "b"):
        trained = (work / f"trained-{name}").read_text().splitlines()
        assert trained == ["fresh", "resume global_step2", "resume global_step4"]
        assert (work / name / "nvme" / "run" / "latest").read_text() == "global_step4"
    (work / "nas").rename(work / "away")
    code, said = launch(work, "slurm/job.sbatch", train, "global_step2")
    assert code == 69, said
    assert "nothing was trained" in said
    assert (work / "trained-a").read_text().count("\n") == 3


def told(work: Path) -> list[str]:
    """Which steps got which signals, in this order."""
    return (work / "steps" / "signals").read_text().splitlines()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], work: Path) -> None:
    """Until it holds, while the script runs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        said = (work / "output").read_text()
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def test_term_before_a_step_is_listed_reaches_it(work: Path) -> None:
    """The trainer saves all the same, and only then are the daemons told to drain."""
    program(work / "bin" / "ckptd", DRAIN)
    train = str(work / "train.sh")
    process = begin(work, "slurm/job.sbatch", train, "global_step2", CKPTD_TEST_LISTED_AFTER="3")
    try:
        wait_for(lambda: '"train"' in "".join(p.read_text() for p in work.glob("steps/*")), process, work)
        process.terminate()
    finally:
        code = end_of(process)
    said = (work / "output").read_text()
    assert code == 7, said
    assert told(work) == ["train TERM", "ckptd-run TERM"]
    for name in ("a", "b"):
        assert list((work / name / "nvme" / "run" / "global_step2").iterdir()), said
    assert sorted((work / "drained").read_text().split()) == ["a", "b"]


def test_term_to_all_steps_at_once_loses_no_save(work: Path) -> None:
    """What `scancel --signal=TERM JOB` does: the daemons have drained before the trainer saves."""
    first_start(work)
    process = begin(work, "slurm/job.sbatch", str(work / "train.sh"), "global_step2")
    try:
        wait_for(lambda: (work / "output").read_text().count("watching") == 2, process, work)
        wait_for(lambda: (work / "output").read_text().count("training\n") == 2, process, work)
        for step in listed(work / "steps").values():
            send(below(int(str(step["srun"]))), signal.SIGTERM)
    finally:
        code = end_of(process)
    said = (work / "output").read_text()
    assert code == 7, said
    assert said.count("drained: all that is complete here is committed") == 2, said
    assert (work / "nas" / "_ckptd" / "commits" / "global_step2~g1~zero.json").exists(), said


def test_term_while_daemons_drain_lets_them(work: Path) -> None:
    """The trainer ended by itself: what the end of the allocation adds must not end the drain."""
    program(work / "bin" / "ckptd", DRAIN)
    process = begin(work, "slurm/job.sbatch", str(work / "train.sh"))
    try:
        wait_for(lambda: (work / "output").read_text().count("draining") == 2, process, work)
        process.terminate()
    finally:
        code = end_of(process)
    assert code == 7, (work / "output").read_text()
    assert told(work) == ["ckptd-run TERM"]
    assert sorted((work / "drained").read_text().split()) == ["a", "b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_srun_that_stands_in_kills_on_term(work: Path, number: signal.Signals) -> None:
    """As the real one does (src/srun/signals.c): nothing that it started sees a signal it could heed."""
    program(work / "bin" / "ckptd", DRAIN)
    process = begin(work, str(work / "bin" / "srun"), "--job-name=ckptd", "ckptd", "run")
    try:
        wait_for(lambda: (work / "output").read_text().count("watching") == 2, process, work)
        process.send_signal(number)
    finally:
        code = end_of(process)
    assert code == 128 + signal.SIGKILL
    assert not (work / "drained").exists()


def test_nodes_that_disagree_do_not_train(work: Path) -> None:
    program(
        work / "bin" / "ckptd",
        '#!/bin/sh\n[ "$SLURM_NODEID" = 0 ] && { echo /x/global_step2; exit 0; }\nexit 4\n',
    )
    code, said = launch(work, "slurm/job.sbatch", str(work / "train.sh"), "global_step2")
    assert code == 65
    assert "nodes disagree" in said
    assert not list(work.glob("trained-*"))


@pytest.mark.parametrize(("code", "expected"), [(0, 7), (4, 7), (69, 69), (65, 65), (1, 1)])
def test_torchrun_trains_on_0_and_4_alone(work: Path, code: int, expected: int) -> None:
    program(
        work / "bin" / "ckptd",
        f'#!/bin/sh\n[ "$1" = resume ] && {{ echo /x/global_step2; exit {code}; }}\nexec sleep 600\n',
    )
    program(work / "train.sh", '#!/bin/sh\necho "$CKPTD_CHOICE" > "$WORK/trained"\nexit 7\n')
    ended, said = launch(work, "torchrun/node.sh", str(work / "train.sh"), NNODES="2", NODE_RANK="0")
    assert ended == expected, said
    assert (work / "trained").exists() == (code in (0, 4))


@pytest.mark.root
@pytest.mark.parametrize("owner", [0, 54321])
def test_the_epilog_runs_no_note_of_another_user(tmp_path: Path, owner: int) -> None:
    """Everybody may write where notes lie, and the number of the next job can be guessed."""
    note, ran = tmp_path / "17", tmp_path / "ran"
    note.write_text(f'touch {ran}\nckptd() {{ echo "$@" >> {ran}; }}\nCKPTD_JOB=/x/run.toml\n')
    os.chown(note, owner, owner)
    job = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_USER": "root",
        "CKPTD_EPILOG": str(tmp_path),
    }
    done = subprocess.run([EXAMPLES / "slurm" / "epilog.sh"], env=os.environ | job, check=False, timeout=60)
    assert done.returncode == 0
    assert not note.exists()
    assert ran.exists() == (owner == 0)
    if owner == 0:
        assert ran.read_text() == "drain /x/run.toml --deadline 10m\n"
