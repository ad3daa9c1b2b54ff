"""EIO by the device mapper, below save_dir or below a directory remote."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.vm.guest.lab import EXPORT_DISK, NAS, NODE, NODE_DISK, Lab, mount, sh
from tests.vm.image import UID


class Mapped:
    """A disk whose table can be changed under its file system."""

    def __init__(self, name: str, device: str, place: Path) -> None:
        self.name, self.device, self.place = name, device, place
        self.path = f"/dev/mapper/{name}"
        self.sectors = int(sh("blockdev", "--getsz", device))
        sh("dmsetup", "create", name, "--table", self._linear(0, self.sectors))
        sh("mkfs.ext4", "-q", "-F", self.path)
        self.mount()
        os.chown(place, UID, UID)
        (place / "run").mkdir()
        os.chown(place / "run", UID, UID)

    def unmount(self) -> bool:
        """Unmount it; whether nobody has it open."""
        return os.system(f"umount {self.place} 2>/dev/null") == 0

    def mount(self) -> None:
        """Mount it, repaired if need be, as an operator does."""
        os.system(f"umount -l {self.place} 2>/dev/null; e2fsck -fy {self.path} >/dev/null 2>&1")
        mount(self.path, self.place)

    def _linear(self, first: int, count: int) -> str:
        return f"{first} {count} linear {self.device} {first}"

    def _load(self, table: str) -> None:
        sh("dmsetup", "suspend", "--noflush", "--nolockfs", self.name)
        sh("dmsetup", "reload", self.name, "--table", table)
        sh("dmsetup", "resume", self.name)

    def heal(self) -> None:
        """Give it back."""
        self._load(self._linear(0, self.sectors))

    def refuse_writes(self) -> None:
        """Fail every write with EIO."""
        self._load(f"0 {self.sectors} flakey {self.device} 0 0 100 1 error_writes")

    def refuse_all(self) -> None:
        """Fail every read and write with EIO."""
        self._load(f"0 {self.sectors} error")
        Path("/proc/sys/vm/drop_caches").write_text("3")


def _begin(lab: Lab, remote: str = "") -> tuple[Mapped, Mapped]:
    sh("modprobe", "dm-flakey")
    node, nas = Mapped("node", NODE_DISK, NODE), Mapped("nas", EXPORT_DISK, NAS)
    lab.on_server = NAS / "run"
    lab.write_job(remote=remote)
    lab.start()
    return node, nas


def node(lab: Lab) -> None:
    """save_dir's disk refuses writes, the journal's among them."""
    here, _ = _begin(lab)
    lab.save(1)
    lab.committed(1)
    here.refuse_writes()
    os.system(f"setpriv --reuid={UID} touch {lab.save_dir}/x; sync")
    time.sleep(30)
    lab.check("the daemon lives", lab.daemon and lab.daemon.poll() is None, lab.now())
    here.heal()
    lab.stop()
    here.mount()
    lab.start()
    lab.save(3)
    lab.until(
        "a save after that is committed",
        lambda: list(lab.on_server.glob("_ckptd/commits/global_step3~*")),
        180,
    )
    lab.judge()
    lab.stop()


def remote(lab: Lab) -> None:
    """A directory remote's disk refuses writes, then reads too; it is repaired while the daemon runs."""
    _, nas = _begin(lab)
    lab.save(1)
    lab.committed(1)
    nas.refuse_writes()
    lab.save(2)
    lab.until("status names a disk that refuses writes", lambda: _errors(lab), 120)
    time.sleep(20)
    nas.refuse_all()
    lab.save(3)
    lab.until("and one that cannot be read", lambda: "Input/output error" in str(_errors(lab)), 120)
    time.sleep(20)
    lab.check("the daemon lives", lab.daemon and lab.daemon.poll() is None, lab.now())
    lab.check(
        "what is not committed stays here", {"global_step2", "global_step3"} <= {*lab.here()}, lab.here()
    )
    nas.heal()
    lab.until("the disk can be unmounted beside the daemon", nas.unmount, 60)
    nas.mount()
    lab.committed(3, 240)
    lab.until("status names nothing any more", lambda: not _errors(lab), 60)
    lab.judge()
    lab.stop()


def _errors(lab: Lab) -> list[str]:
    """Return the open problems of the remote's disk."""
    return [
        f"{code}: {text}" for code, text in lab.problems().items() if code.startswith(("remote", "upload"))
    ]
