"""The service as docs/install.md says, under a systemd that is the guest's first process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.vm.guest.lab import EXPORT_DISK, NAS, NODE_DISK, Lab, mount, sh
from tests.vm.guest.nfs import SLOW
from tests.vm.image import UID, USER

UNIT = f"ckptd@{USER}"
_FSTAB = f"{NODE_DISK} /nvme xfs defaults 0 0\n{EXPORT_DISK} {NAS} ext4 defaults 0 0\n"


def show(name: str) -> str:
    """Return a property of the unit."""
    return sh("systemctl", "show", "-P", name, UNIT).strip()


def follow(lab: Lab) -> Lab:
    """Take the service's lines from the journal for the case's log."""
    lab.log.write_text(sh("journalctl", "-u", UNIT, "-o", "cat", "--no-pager"))
    return lab


def _stop(lab: Lab, seconds: float) -> None:
    begun = time.monotonic()
    code = os.waitstatus_to_exitcode(os.system(f"systemctl stop {UNIT}"))
    took = time.monotonic() - begun
    result = f"{code} after {took:.0f} s, {show('Result')}, {show('ActiveState')}"
    holds = code == 0 and took < seconds and show("ActiveState") == "inactive"
    lab.check(f"systemctl stop ends within {seconds:.0f} s and fails nothing", holds, result)


def install(lab: Lab) -> None:
    """Install, reload, watchdog, stop in mid-upload; `again` then finds it started by a boot."""
    lab.node_disk()
    sh("mkfs.ext4", "-q", "-F", EXPORT_DISK)
    mount(EXPORT_DISK, NAS)
    lab.on_server = NAS / "run"
    lab.on_server.mkdir()
    os.chown(lab.on_server, UID, UID)
    Path("/etc/fstab").write_text(Path("/etc/fstab").read_text() + _FSTAB)
    lab.write_job()
    said = sh("ckptd", "service", "install", "--run-as", USER, "--now")
    lab.check("service install --now starts it", show("ActiveState") == "active", said[-200:])
    lab.check("it is enabled", sh("systemctl", "is-enabled", UNIT).strip() == "enabled")
    lab.save(1, 2)
    lab.committed(2, 90)
    lab.write_job(remote=SLOW)
    sh("systemctl", "reload", UNIT)
    lab.check("systemctl reload takes a job file", show("ActiveState") == "active")
    lab.job.write_text("save_dir = 7\n")
    code = os.waitstatus_to_exitcode(os.system(f"systemctl reload {UNIT}"))
    lab.check("systemctl reload refuses a bad one", code != 0 and show("ActiveState") == "active", code)
    lab.write_job(remote=SLOW)
    _watchdog(lab)
    lab.save(3)
    follow(lab)
    lab.until("the next one is being sent", lambda: follow(lab).sends(3), 60)
    _stop(lab, 60)
    lab.check("the drain sent what was under way", lab.commits() == 3, lab.commits())
    follow(lab)
    lab.judge()
    sh("systemctl", "start", UNIT)


def _watchdog(lab: Lab) -> None:
    folder = Path(f"/run/systemd/system/{UNIT}.service.d")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "watchdog.conf").write_text("[Service]\nWatchdogSec=15s\n")
    sh("systemctl", "daemon-reload")
    sh("systemctl", "restart", UNIT)
    stopped = show("MainPID")
    sh("kill", "-STOP", stopped)
    lab.until(
        "the watchdog replaces a daemon that stands still",
        lambda: show("MainPID") not in ("0", stopped) and show("ActiveState") == "active",
        90,
    )
    (folder / "watchdog.conf").unlink()
    sh("systemctl", "daemon-reload")
    sh("systemctl", "restart", UNIT)


def again(lab: Lab) -> None:
    """After a boot: what was enabled runs, and goes on."""
    lab.on_server = NAS / "run"
    lab.until("the boot started the service", lambda: show("ActiveState") == "active", 60)
    lab.serial = 10
    lab.save(4, 2)
    lab.until(
        "the newest is committed", lambda: list(lab.on_server.glob("_ckptd/commits/global_step5~*")), 120
    )
    lab.check("the journal knows its saves", "device-changed" not in lab.problems(), lab.problems())
    _stop(lab, 30)


def hang(lab: Lab) -> None:
    """A NAS that hangs in the middle of a write: stop, start, and the way back."""
    lab.node_disk()
    lab.nas("4.2")
    lab.write_job(remote=SLOW)
    sh("ckptd", "service", "install", "--run-as", USER, "--now")
    lab.save(1)
    lab.committed(1)
    lab.save(2)
    lab.until("the next one is being sent", lambda: follow(lab).sends(2), 60)
    time.sleep(1.5)
    lab.server_stops()
    time.sleep(5)
    _stop(lab, 150)
    # systemd looks at each path of ReadWritePaths= first, and waits for the one that hangs
    sh("systemctl", "start", "--no-block", UNIT)
    lab.save(3)
    time.sleep(100)
    lab.check("systemd goes on trying", show("ActiveState") == "activating", show("ActiveState"))
    lab.server()
    lab.committed(3, 240)
    lab.check("the service came up by itself", show("ActiveState") == "active", show("NRestarts"))
    follow(lab)
    lab.judge()
    _start_beside(lab)
    _stop(lab, 60)


def _start_beside(lab: Lab) -> None:
    """Start it while the NAS hangs with the drop-in of docs/operations.md, which names the folder above."""
    sh("systemctl", "stop", UNIT)
    lab.server_stops()
    override = f"[Service]\nReadWritePaths=\nReadWritePaths={lab.save_dir} {NAS.parent}\n"
    Path(f"/etc/systemd/system/{UNIT}.service.d/override.conf").write_text(override)
    sh("systemctl", "daemon-reload")
    sh("systemctl", "start", "--no-block", UNIT)
    lab.until("with the drop-in it starts beside", lambda: show("ActiveState") == "active", 60)
    lab.save(4)
    is_sealed = '"global_step4", "action": "complete"'
    lab.until("and seals", lambda: is_sealed in follow(lab).log.read_text(), 60)
    lab.server()
    lab.committed(4, 240)
    follow(lab)
    lab.judge()
