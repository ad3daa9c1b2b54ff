"""A NAS by NFS, client and server the kernel's own."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.vm.guest.lab import EXPORT, EXPORT_DISK, NAS, NODE, SHARED, SPARE_DISK, Lab, mount, sh
from tests.vm.image import UID

SLOW = 'bandwidth = "400kB/s"'


def _begin(lab: Lab, version: str, remote: str = "") -> None:
    lab.node_disk()
    lab.nas(version)
    lab.write_job(remote=remote)


def _send_second(lab: Lab, version: str) -> None:
    """One save is committed, and the next one is being sent."""
    _begin(lab, version, SLOW)
    lab.start()
    lab.save(1)
    lab.committed(1)
    lab.save(2)
    lab.until("the next one is being sent", lambda: lab.sends(2), 30)


def life(lab: Lab, version: str) -> None:
    """Commits and deletions, here and there."""
    _begin(lab, version, "keep_last = 3")
    code, text, _ = lab.ckptd("check", lab.job)
    lab.check("check finds nothing wrong", code == 0, text[-300:] if code else "")
    lab.start()
    lab.save(1, 6)
    lab.until(
        "the newest is committed", lambda: list(lab.on_server.glob("_ckptd/commits/global_step6~*")), 120
    )
    lab.until("keep_last leaves 3 there", lambda: lab.commits() == 3, 90)
    lab.until("save_total_limit leaves 2 here", lambda: len(lab.here()) == 2, 90)
    lab.judge()
    lab.stop()


def hang(lab: Lab, version: str) -> None:
    """The server goes in the middle of a write to a hard mount, and comes back."""
    _send_second(lab, version)
    time.sleep(1.5)
    lab.server_stops()
    begun = time.monotonic()
    lab.save(3, 2)
    lab.check(
        "training goes on", time.monotonic() - begun < 30, f"{time.monotonic() - begun:.0f} s for two saves"
    )
    codes = {"remote-unreachable", "transfer-stalled", "remote-silent"}
    lab.until("status says that the remote is away", lambda: codes & set(lab.problems()), 150)
    code, text, seconds = lab.ckptd("status", lab.job)
    lab.check("status answers", code != -1 and seconds < 20, f"{code} after {seconds:.0f} s: {text[:160]}")
    code, text, seconds = lab.ckptd("resume", lab.job)
    lab.check("resume ends by itself", code != -1, f"{code} after {seconds:.0f} s: {text.strip()[-160:]}")
    lab.stop()
    begun = time.monotonic()
    lab.start()
    lab.save(5)
    lab.until(
        "a daemon started meanwhile seals",
        lambda: '"global_step5", "action": "complete"' in lab.log.read_text(),
        60,
    )
    lab.server()
    lab.committed(5, 240)
    lab.judge()
    lab.stop()


def stale(lab: Lab, version: str) -> None:
    """Handles go stale: the folder is replaced by a copy, then the file system by an empty one."""
    _send_second(lab, version)
    sh("exportfs", "-ua")
    sh("cp", "-a", lab.on_server, EXPORT / "copy")
    shutil.rmtree(lab.on_server)
    (EXPORT / "copy").rename(lab.on_server)
    lab.server()
    lab.committed(2, 240)
    lab.judge()
    sh("exportfs", "-ua")
    sh("umount", "-l", EXPORT)
    sh("mkfs.ext4", "-q", "-F", SPARE_DISK)
    mount(SPARE_DISK, EXPORT)
    os.chown(EXPORT, UID, UID)
    lab.server()
    lab.save(3)
    time.sleep(60)
    strange = [str(p) for p in EXPORT.rglob("*") if p.name != "lost+found"]
    lab.check("nothing is written to a file system that is not ours", not strange, strange[:5])
    lab.check("the save stays here", "global_step3" in lab.here(), lab.problems())
    sh("exportfs", "-ua")
    sh("umount", "-l", EXPORT)
    mount(EXPORT_DISK, EXPORT)
    lab.server()
    lab.committed(3, 240)
    lab.judge()
    lab.stop()


def squash(lab: Lab, version: str) -> None:
    """A daemon of root's, whose rights the server takes away."""
    lab.node_disk()
    lab.nas(version, export=f"{SHARED},root_squash")
    lab.write_job()
    code, text, _ = lab.ckptd("check", lab.job, as_root=True)
    lab.check("check fails", code != 0 and "Permission denied" in text, text[-300:])
    lab.start(as_root=True)
    lab.save(1, 4)
    lab.until("status names root_squash", lambda: "squash" in str(lab.problems()), 90)
    time.sleep(5)
    lab.check("nothing is deleted", len(lab.here()) == 4, lab.here())
    lab.server()
    lab.until(
        "the newest is committed", lambda: list(lab.on_server.glob("_ckptd/commits/global_step4~*")), 240
    )
    lab.judge()
    lab.stop()


def full(lab: Lab, version: str) -> None:
    """No space on the server (ENOSPC), then some."""
    _begin(lab, version)
    ballast = EXPORT / "ballast"
    status = os.statvfs(EXPORT)
    sh("fallocate", "-l", status.f_bavail * status.f_frsize - 4_000_000, ballast)
    _without_room(lab, lambda: ballast.unlink())


def quota(lab: Lab, version: str) -> None:
    """The user's quota on the server is used up (EDQUOT), then raised."""
    _begin(lab, version)
    sh("setquota", "-u", UID, 0, 4000, 0, 0, EXPORT)
    _without_room(lab, lambda: sh("setquota", "-u", UID, 0, 0, 0, 0, EXPORT))


def _without_room(lab: Lab, make_room: Callable[[], object]) -> None:
    lab.start()
    lab.save(1, 6)
    lab.until("status says that there is no room", lambda: "remote-full" in lab.problems(), 90)
    time.sleep(5)
    verdict = lab.judge()
    safe = {tag for tag, _ in verdict.committed} | verdict.whole
    lab.check("no save is lost", len(safe) == 6, sorted(safe))
    make_room()
    lab.committed(6, 240)
    lab.judge()
    lab.stop()


def nodes(lab: Lab, version: str) -> None:
    """Two nodes of one job, each with its client and its rank's shards."""
    lab.node_disk()
    lab.nas(version)
    second = Path("/mnt/nas2")
    mount("127.0.0.1:/export", second, f"vers={version},hard,nosharecache,noac")
    labs = []
    for number, nas in enumerate((NAS, second)):
        one = Lab()
        one.save_dir, one.url = NODE / f"run{number}", nas / "run"
        one.job, one.log = Path(f"/tmp/node{number}.toml"), Path(f"/tmp/node{number}.log")
        one.save_dir.mkdir()
        os.chown(one.save_dir, UID, UID)
        one.write_job(top=f'name = "two"\nnode_name = "node-{number}"')
        one.start()
        labs.append(one)
    for step in range(1, 6):
        for number, one in enumerate(labs):
            one.serial = step
            one.save(step, 1, "--rank", number)
    lab.told = labs[0].told
    lab.committed(1, 120)
    lab.until(
        "the newest is committed", lambda: list(lab.on_server.glob("_ckptd/commits/global_step5~*")), 120
    )
    lab.judge()
    for one in labs:
        one.stop()
        lab.is_well = lab.is_well and one.is_well
