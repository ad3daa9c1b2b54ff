"""A cluster of Slurm's own daemons on this machine: one munged, one slurmctld, a slurmd for each node.

All lies below one folder and listens on 127.0.0.1 alone; no service of the machine is touched. A node is a
name: its disk is a folder, its processes are those whose environment names it, each is ended by its pid.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.harness import PATIENCE_SECONDS
from tests.stores.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
KILL_WAIT_SECONDS = 15
"""Slurm's KillWait, between SIGTERM and SIGKILL; its default is 30."""
MARK = "CKPTD_TEST_NODE"
"""In the environment of a slurmd and of the slurmstepds that it starts."""
_CONF = """
ClusterName=ckptd
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={root}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout=10
MailProg=/bin/true
{more}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def missing() -> str | None:
    """Why it cannot run here; None when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: as root, `make slurm-packages`"
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        return (
            "srun would listen on the network: this machine's own name must stand for 127.0.0.1 in /etc/hosts"
        )
    return None if os.geteuid() == 0 else "slurmd is started by root alone"


@dataclass
class Slurm:
    """A running cluster of `nodes`."""

    root: Path
    nodes: tuple[str, ...]
    more: str = ""
    """Further lines of slurm.conf; `{root}` is filled in."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        """Which marks every process of this cluster, as SLURM_CONF in its environment."""
        return self.root / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands."""
        return os.environ | {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Start everything; all nodes are idle then."""
        for name in ("state", "spool", "log"):
            (self.root / name).mkdir()
        named = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=4"
            for node in self.nodes
        )
        text = _CONF.format(
            root=self.root,
            port=free_port(),
            kill_wait=KILL_WAIT_SECONDS,
            more=self.more.format(root=self.root),
        )
        self.conf.write_text(text + named)
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        files = {"key": key, "socket": self.root / "munge.socket", "pid": self.root / "munged.pid"}
        files |= {"seed": self.root / "munge.seed", "log": self.root / "log" / "munged.file"}
        places = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *places)
        self.wait("munged", files["socket"].exists)
        self._start("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Until every node is there and does nothing."""
        self.wait(
            "idle nodes", lambda: self.said("sinfo", "-h", "-o", "%T %D") == f"idle {len(self.nodes)}\n"
        )

    def start_node(self, node: str) -> None:
        """Start its slurmd."""
        (self.root / "spool" / node).mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node, **{MARK: node})

    def _start(self, name: str, *command: str, **more: str) -> None:
        with (self.root / "log" / name).open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment | more, stdout=log, stderr=log, start_new_session=True
            )

    def said(self, *command: str) -> str:
        """What a command of Slurm prints. Raises: AssertionError with what it says where it fails."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stderr}{self.logs()}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        words = self.said("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, number: str, *states: str, seconds: float = PATIENCE_SECONDS) -> dict[str, str]:
        """Wait until the job is in one of the states; return what is said of it."""
        self.wait(
            f"job {number} to be {' or '.join(states)}",
            lambda: self.job(number)["JobState"] in states,
            seconds,
        )
        return self.job(number)

    def lose(self, node: str) -> None:
        """SIGKILL to all that runs on a node, its slurmd among it."""
        while found := self.processes(node):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.daemons[node].wait(20)
            time.sleep(0.05)

    def processes(self, node: str = "") -> dict[int, str]:
        """Running processes of this cluster, or of one of its nodes, with their command lines."""
        wanted = [f"{MARK}={node}".encode(), f"SLURMD_NODENAME={node}".encode()] if node else []
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (place / "environ").read_bytes().split(b"\0")
                if f"SLURM_CONF={self.conf}".encode() in environment and (
                    not node or any(word in environment for word in wanted)
                ):
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def left_behind(self) -> dict[int, str]:
        """Processes of this cluster that are no daemons of Slurm."""
        ours = {daemon.pid for daemon in self.daemons.values()}
        return {p: c for p, c in self.processes().items() if p not in ours and "slurmscriptd" not in c}

    def wait(self, what: str, done: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until `done`. Raises: AssertionError with the ends of all logs."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The ends of what the daemons of Slurm logged."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted((self.root / "log").iterdir())
        )

    def end(self) -> None:
        """SIGKILL to every process of the cluster, by its pid."""
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self.daemons.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(1)


@contextlib.contextmanager
def slurm(root: Path, nodes: tuple[str, ...], more: str = "") -> Iterator[Slurm]:
    """A cluster that ends with the block."""
    here = Slurm(root, nodes, more)
    try:
        here.start()
        yield here
    finally:
        here.end()
