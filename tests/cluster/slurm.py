"""Stand-ins for srun, squeue and scancel: a step is one process per node on this machine.

As Slurm does it (src/srun/signals.c, src/slurmd/slurmstepd/req.c of SchedMD/slurm): srun answers SIGTERM and
SIGHUP by SIGKILL to all tasks; scancel's signal reaches every process of a step, whatever session it is in;
squeue lists a step before its processes run. CKPTD_TEST_NODES names the nodes, CKPTD_TEST_STEPS is a folder
for the steps, CKPTD_TEST_LISTED_AFTER says after how many seconds a step is there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
STEPS = Path(os.environ.get("CKPTD_TEST_STEPS", "steps"))


def srun(arguments: list[str]) -> int:
    """Run the command once per node, with Slurm's variables; the highest exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--ntasks-per-node", type=int, choices=[1])
    parser.add_argument("--kill-on-bad-exit", type=int, choices=[0])
    parser.add_argument("--wait", type=int, choices=[0])
    parser.add_argument("--job-name")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    # what a task leaves behind is the step's as well
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    listed_at = time.time() + float(os.environ.get("CKPTD_TEST_LISTED_AFTER", "0"))
    name = given.job_name or Path(given.command[0]).name
    step = _register({"name": name, "srun": os.getpid(), "listed_at": listed_at})
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, partial(_force_termination, step))
    time.sleep(max(0.0, listed_at - time.time()))
    code = _run(given.command)
    step.write_text("")  # numbers are not given twice
    return code


def _run(command: list[str]) -> int:
    names = os.environ["CKPTD_TEST_NODES"].split()
    nodes: list[subprocess.Popen[bytes]] = []
    for number, name in enumerate(names):
        slurm = {
            "SLURM_NODEID": str(number),
            "SLURMD_NODENAME": name,
            "SLURM_JOB_NUM_NODES": str(len(names)),
        }
        nodes.append(subprocess.Popen(command, env=os.environ | slurm))
    return max((code if code >= 0 else 128 - code) for code in (node.wait() for node in nodes))


def _force_termination(step: Path, _number: int, _frame: FrameType | None) -> None:
    print("srun: forcing job termination", file=sys.stderr, flush=True)
    while found := below(os.getpid()):
        send(found, signal.SIGKILL)
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    step.write_text("")
    os._exit(128 + signal.SIGKILL)


def _register(step: dict[str, object]) -> Path:
    """A step of the next number."""
    number = 0
    while True:
        path = STEPS / str(number)
        try:
            with path.open("x") as stream:
                stream.write(json.dumps(step))
        except FileExistsError:
            number += 1
        else:
            return path


def listed(folder: Path) -> dict[str, dict[str, object]]:
    """Steps that are listed, by their number."""
    found = {}
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            step = json.loads(path.read_text())
            if path.name.isdecimal() and step["listed_at"] <= time.time():
                found[path.name] = step
    return found


def _steps() -> dict[str, dict[str, object]]:
    """The same by their id."""
    return {f"{os.environ['SLURM_JOB_ID']}.{number}": step for number, step in listed(STEPS).items()}


def below(root: int) -> list[int]:
    """Processes that descend from `root` and run."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = [root]
    for process in found:
        found += [pid for pid, parent in parents.items() if parent == process]
    return found[1:]


def send(processes: list[int], number: int) -> None:
    """A signal to each that is still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def squeue(arguments: list[str]) -> int:
    """Lists steps that are there; the batch script's too."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--noheader", "--steps"):
        parser.add_argument(flag, action="store_true", required=True)
    parser.add_argument("--jobs", choices=[os.environ["SLURM_JOB_ID"]], required=True)
    parser.add_argument("--format", required=True)
    given = parser.parse_args(arguments)
    batch = {f"{os.environ['SLURM_JOB_ID']}.batch": {"name": "batch"}}
    for step, known in (batch | _steps()).items():
        print(given.format.replace("%i", step).replace("%j", str(known["name"])))
    return 0


def scancel(arguments: list[str]) -> int:
    """The signal to every process of a step; `signals` in the folder says which steps were told what."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ctld", action="store_true", required=True)
    parser.add_argument("--signal", required=True)
    parser.add_argument("step")
    given = parser.parse_args(arguments)
    step = _steps().get(given.step)
    if step is None:
        print(f"scancel: error: Kill job error on job step id {given.step}: Invalid job id", file=sys.stderr)
        return 1
    with (STEPS / "signals").open("a") as stream:
        stream.write(f"{step['name']} {given.signal}\n")
    send(below(int(str(step["srun"]))), signal.Signals[f"SIG{given.signal}"])
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "squeue": squeue, "scancel": scancel}[sys.argv[1]](sys.argv[2:]))
