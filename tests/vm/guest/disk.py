"""EIO by the device mapper, below save_dir and below the NAS."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.vm.guest.lab import EXPORT_DISK, NAS, NODE, NODE_DISK, Lab, mount, sh
from tests.vm.image import UID

SECTOR_BYTES = 512


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

    def break_file(self, path: Path) -> None:
        """Fail reads of a file's first 32 KiB with EIO."""
        sh("sync")
        first = next(line for line in sh("filefrag", "-b512", "-v", path).splitlines() if " 0:" in line)
        at = int(first.replace(":", " ").replace("..", " ").split()[3])
        Path("/proc/sys/vm/drop_caches").write_text("3")
        rest = self._linear(at + 64, self.sectors - at - 64)
        self._load(f"{self._linear(0, at)}\n{at} 64 error\n{rest}")


def _begin(lab: Lab, remote: str = "") -> tuple[Mapped, Mapped]:
    sh("modprobe", "dm-flakey")
    node, nas = Mapped("node", NODE_DISK, NODE), Mapped("nas", EXPORT_DISK, NAS)
    lab.on_server = NAS / "run"
    lab.write_job(remote=remote)
    lab.start()
    return node, nas


def shard(lab: Lab) -> None:
    """A shard of a sealed save cannot be read."""
    node, _ = _begin(lab, 'bandwidth = "60kB/s"')
    lab.save(1)
    lab.committed(1)
    lab.save(2)
    lab.until("it is sealed", lambda: '"global_step2", "action": "complete"' in lab.log.read_text(), 60)
    node.break_file(lab.save_dir / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    lab.until("status says so", lambda: lab.problems(), 120)
    lab.save(3)
    lab.until(
        "the next one is committed", lambda: list(lab.on_server.glob("_ckptd/commits/global_step3~*")), 120
    )
    lab.check("what cannot be read is kept", "global_step2" in lab.here(), lab.here())
    code, text, _ = lab.ckptd("resume", lab.job)
    lab.check("resume offers the newest", code == 0 and "global_step3" in text, f"{code}: {text[-300:]}")
    node.heal()
    lab.committed(3, 240)
    lab.judge()
    lab.stop()


def nas(lab: Lab) -> None:
    """The NAS's disk refuses writes."""
    _, there = _begin(lab)
    lab.save(1)
    lab.committed(1)
    there.refuse_writes()
    lab.save(2, 2)
    lab.until("status says so", lambda: lab.problems(), 120)
    time.sleep(10)
    lab.check("both saves are here", {"global_step2", "global_step3"} <= set(lab.here()), lab.here())
    there.heal()
    there.mount()
    lab.until(
        "the newest is committed", lambda: list(lab.on_server.glob("_ckptd/commits/global_step3~*")), 240
    )
    lab.judge()
    lab.stop()


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
