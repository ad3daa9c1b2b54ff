"""A stand-in for srun: one process per node on this machine, with Slurm's variables; the highest exit code.

SIGTERM is passed on to every node, as srun does; CKPTD_TEST_NODES names the nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType


def main() -> int:
    """Run the command once per node."""
    given = sys.argv[1:]
    first = next(i for i, a in enumerate(given) if not a.startswith("--"))
    command = given[first:]
    names = os.environ["CKPTD_TEST_NODES"].split()
    nodes: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        for node in nodes:
            node.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    for number, name in enumerate(names):
        slurm = {
            "SLURM_NODEID": str(number),
            "SLURMD_NODENAME": name,
            "SLURM_JOB_NUM_NODES": str(len(names)),
        }
        nodes.append(subprocess.Popen(command, env=os.environ | slurm))
        if told:  # while this one was started
            nodes[-1].send_signal(told[0])
    return max((code if code >= 0 else 128 - code) for code in (node.wait() for node in nodes))


if __name__ == "__main__":
    sys.exit(main())
