"""What a case has in the guest: a NAS by the kernel's NFS on the loopback, a disk, a daemon, a trainer.

Lines on standard output are what the case came to: one of JSON for each thing that was looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.vm.image import UID, USER
from tests.vm.judge import Told, Verdict, judge

EXPORT_DISK, NODE_DISK, SPARE_DISK = "/dev/ubdb", "/dev/ubdc", "/dev/ubdd"
EXPORT, NAS, NODE = Path("/export"), Path("/mnt/nas"), Path("/nvme")
AS_TRAINER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", f"HOME=/home/{USER}")
SHARED = "rw,sync,no_subtree_check,fsid=1"
JOB = """save_dir = "{save_dir}"
settle = "1s"
existing = "all"
{top}
[local]
save_total_limit = 2
forms = []
min_free = "1MB"
[[remote]]
name = "nas"
url = "{url}"
forms = ["zero"]
{remote}
"""


def sh(*command: object, seconds: float = 120.0) -> str:
    """Run a command that has to succeed; returns what it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False, env=ENV)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


ENV = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Of ckptd, which is the installed one."""


class Lab:
    """One node, its job and its NAS; `save_dir` and `url` as the job file has them."""

    def __init__(self) -> None:
        self.told = Told()
        self.job = Path("/etc/ckptd/train/jobs.d/run.toml")
        self.log = Path("/tmp/run.log")
        self.save_dir, self.url = NODE / "run", NAS / "run"
        self.on_server = EXPORT / "run"
        """The remote, seen from the NFS server."""
        self.daemon: subprocess.Popen[bytes] | None = None
        self.is_well = True
        self.serial = 1
        self._read_bytes = 0

    def check(self, what: str, holds: object, detail: object = "") -> None:
        """Say whether something holds."""
        self.is_well = self.is_well and bool(holds)
        print(json.dumps({"what": what, "holds": bool(holds), "detail": str(detail)}), flush=True)

    def until(self, what: str, done: Callable[[], object], seconds: float) -> float:
        """Wait for something and say how long it took."""
        begun = time.monotonic()
        while not (holds := done()) and time.monotonic() - begun < seconds:
            time.sleep(0.3)
        took = time.monotonic() - begun
        detail = f"after {took:.0f} s" if holds else f"not within {took:.0f} s; {self.now()}"
        self.check(what, holds, detail)
        return took

    def now(self) -> str:
        """Return what status.json and the log's end say."""
        lines = self.log.read_text().splitlines()[-4:] if self.log.exists() else []
        return " | ".join([str(self.problems()), *(line[:300] for line in lines)])

    # --- disks and server ----------------------------------------------------------------------------

    def node_disk(self, device: str = NODE_DISK, *, is_new: bool = True) -> None:
        """Make and mount the node's disk."""
        if is_new:
            sh("mkfs.xfs", "-q", "-f", device)
        mount(device, NODE)
        self.save_dir.mkdir(exist_ok=True)
        for folder in (NODE, self.save_dir):
            os.chown(folder, UID, UID)

    def nas(self, version: str, *, export: str = f"{SHARED},no_root_squash") -> None:
        """Export a disk by NFS and mount it as a client, hard."""
        sh("mkfs.ext4", "-q", "-F", "-O", "quota", EXPORT_DISK)
        mount(EXPORT_DISK, EXPORT, "usrquota")
        os.chown(EXPORT, UID, UID)
        self.on_server.mkdir()
        os.chown(self.on_server, UID, UID)
        self.server(export)
        time.sleep(11)  # the server's grace after its start
        mount("127.0.0.1:/export", NAS, f"vers={version},hard")

    def server(self, export: str = f"{SHARED},no_root_squash") -> None:
        """Start the kernel's NFS server, if it does not run, and export."""
        nfsd = Path("/proc/fs/nfsd")
        if not os.path.ismount(nfsd):
            sh("modprobe", "nfsd")
            if not os.path.ismount(nfsd):
                mount("nfsd", nfsd, kind="nfsd")
        for name in ("rpcbind", "rpc.statd", "rpc.mountd"):
            if subprocess.run(["pidof", name], capture_output=True, check=False).returncode:
                sh(name, *(["-w"] if name == "rpcbind" else []))
        if (nfsd / "threads").read_text() == "0\n":
            for limit in ("nfsv4leasetime", "nfsv4gracetime"):
                (nfsd / limit).write_text("10\n")
        sh("rpc.nfsd", 4)
        sh("exportfs", "-ua")
        sh("exportfs", "-o", export, "127.0.0.1:/export")

    def server_stops(self) -> None:
        """Stop it: a hard mount hangs from now on."""
        sh("rpc.nfsd", 0)

    # --- daemon and trainer --------------------------------------------------------------------------

    def write_job(self, *, top: str = "", remote: str = "") -> None:
        """Write the job file."""
        self.job.parent.mkdir(parents=True, exist_ok=True)
        text = JOB.format(save_dir=self.save_dir, url=self.url, top=top, remote=remote)
        self.job.write_text(text)

    def start(self, *, as_root: bool = False) -> float:
        """Start a daemon, and wait until it watches; returns the seconds that took."""
        marks = self.log.read_text().count('"watching ') if self.log.exists() else 0
        command = [*(() if as_root else AS_TRAINER), "ckptd", "run", "--job", str(self.job)]
        with self.log.open("ab") as out:
            self.daemon = subprocess.Popen(
                [*command, "--log-format", "json"], stdout=out, stderr=out, env=ENV
            )
        return self.until("a daemon watches", lambda: self.log.read_text().count('"watching ') > marks, 60)

    def stop(self, seconds: float = 60.0) -> None:
        """SIGTERM; the daemon has to end in time."""
        assert self.daemon is not None
        self.daemon.terminate()
        self.until("SIGTERM ends the daemon", lambda: self.daemon and self.daemon.poll() is not None, seconds)
        self.daemon.kill()

    def save(self, first: int, count: int = 1, *more: object, save_dir: Path | None = None) -> None:
        """Have the trainer save."""
        command = [*AS_TRAINER, sys.executable, "-m", "tests.vm.trainer", save_dir or self.save_dir]
        command += [first, count, self.serial, "--pause", 0, "--every", 0.5, *more]
        self.serial += count
        words = [str(word) for word in command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.told.read(done.stdout)

    def ckptd(
        self, *arguments: object, seconds: float = 90.0, as_root: bool = False
    ) -> tuple[int, str, float]:
        """Run a command; exit status (-1: it was ended after `seconds`), what it said, seconds."""
        words = [str(word) for word in (*(() if as_root else AS_TRAINER), "ckptd", *arguments)]
        begun = time.monotonic()
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=seconds, check=False, env=ENV
            )
        except subprocess.TimeoutExpired as error:
            return -1, str(error.stdout), seconds
        return done.returncode, done.stdout + done.stderr, time.monotonic() - begun

    # --- looking -------------------------------------------------------------------------------------

    def problems(self) -> dict[str, str]:
        """Return the open problems: code → text."""
        path = self.save_dir / "_ckptd/state/status.json"
        try:
            job: dict[str, Any] = json.loads(path.read_bytes())["jobs"][0]
        except (OSError, IndexError, ValueError):
            return {}
        return {p["code"]: p["text"] for p in job["problems"]}

    def commits(self) -> int:
        """Count the COMMITs, on the server."""
        return len(list((self.on_server / "_ckptd/commits").glob("*~zero.json")))

    def here(self) -> Sequence[str]:
        """Return the saves in save_dir."""
        return sorted(folder.name for folder in self.save_dir.glob("global_step*"))

    def sends(self, step: int) -> bool:
        """Whether the log says that an upload of this step began."""
        return f'"global_step{step}", "action": "upload"' in self.log.read_text()

    def committed(self, count: int, seconds: float = 180.0) -> None:
        """Wait for so many COMMITs."""
        self.until(f"{count} committed", lambda: self.commits() >= count, seconds)

    def judge(self) -> Verdict:
        """Compare every byte with the trainer's, on node and server; says what is wrong."""
        text = self.log.read_text() if self.log.exists() else ""
        self.told.read(text[self._read_bytes :])
        self._read_bytes = len(text)
        self.told.errors.clear()
        verdict = judge(self.save_dir, self.on_server, self.told)
        detail = (
            "; ".join(verdict.wrong) or f"{len(verdict.committed)} COMMITs, {len(self.told.sealed)} sealed"
        )
        self.check("every byte is the trainer's, nothing sealed is lost", not verdict.wrong, detail)
        return verdict


def mount(device: str, place: Path, options: str = "", *, kind: str = "") -> None:
    """Mount."""
    place.mkdir(parents=True, exist_ok=True)
    sh("mount", *(["-t", kind] if kind else []), *(["-o", options] if options else []), device, place)
