"""A real systemd, booted in namespaces of its own on a machine whose first process is something else.

Needs root. Its root is an overlay whose upper layer is memory: what it writes or removes ends with it. The
interpreter, its packages and ckptd lie read-only in /opt, because a service sees neither /tmp nor /root.
Cgroups: version 1 for memory, as the machine has it, and systemd's own; the groups are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
USER, UID = "trainer", 4242
_MEMORY, _SYSTEMD = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/systemd")

_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {work}/layer; mkdir {work}/layer/up {work}/layer/work {work}/layer/root
root={work}/layer/root
mount -t overlay -o lowerdir=/,upperdir={work}/layer/up,workdir={work}/layer/work overlay $root
mount -t proc proc $root/proc
mount --bind $root/proc/sys $root/proc/sys
mount -o remount,bind,ro $root/proc/sys
mount -t sysfs -o ro sysfs $root/sys
mount -t tmpfs -o mode=755 tmpfs $root/dev
mkdir $root/dev/pts $root/dev/shm
for node in null zero full random urandom tty; do
  touch $root/dev/$node
  mount --bind /dev/$node $root/dev/$node
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts $root/dev/pts
ln -s pts/ptmx $root/dev/ptmx
for place in run tmp opt mnt dev/shm var/lib/ckptd; do
  mkdir -p $root/$place
  mount -t tmpfs tmpfs $root/$place
done
chmod 1777 $root/tmp $root/dev/shm
for place in {closed}; do chmod o+x $root$place; done
cd $root/opt; mkdir {names}
{binds}
mkdir $root/mnt/nvme $root/mnt/nas
mount -t tmpfs tmpfs $root/mnt/nas
chown {uid}:{uid} $root/mnt/nvme $root/mnt/nas
: > $root/etc/fstab
echo '{user}:x:{uid}:{uid}::/nonexistent:/bin/sh' >> $root/etc/passwd
echo '{user}:x:{uid}:' >> $root/etc/group
mount -t tmpfs -o mode=755 tmpfs $root/sys/fs/cgroup
cd $root/sys/fs/cgroup; mkdir systemd memory unified
mount -t cgroup -o none,name=systemd cgroup systemd
mount -t cgroup -o memory cgroup memory
mount -t cgroup2 cgroup2 unified
cd $root; mkdir -p mnt/before
pivot_root . mnt/before
umount -l /mnt/before
mount --make-rshared /
/opt/python/bin/{version} -c 'import venv; venv.create("/opt/ckptd", symlinks=True, with_pip=False)'
printf '%s\\n' {path} > /opt/ckptd/lib/{version}/site-packages/here.pth
printf '#!/opt/ckptd/bin/python\\nfrom ckptd.cli.main import main\\nmain()\\n' > /opt/ckptd/bin/ckptd
chmod 755 /opt/ckptd/bin/ckptd
export container=test
exec {systemd} --system --unit=basic.target
"""
"""The machine's own disk is the lower layer of an overlay and never written: systemd cleans /tmp as it boots.

/proc/sys and /sys are read-only, so that nothing of the kernel's is set either. The interpreter finds its own
library by the path that it was built with: where that leads through a folder of root's, another user gets the
system's library of another release, so the layer opens it.
Mounts are shared, as systemd makes them on a machine of its own: it mounts credentials in a namespace beside.
"""


def why_not() -> str | None:
    """Why none can be booted here; None when one can."""
    if os.geteuid() != 0:
        return "booting systemd in namespaces needs root"
    if not SYSTEMD.exists():
        return "there is no systemd here (make system-packages)"
    if not (_MEMORY / "memory.limit_in_bytes").exists() or not _SYSTEMD.exists():
        return "no cgroup version 1 memory controller, or no systemd hierarchy"
    return None


@dataclass
class Booted:
    """A running systemd; `pid` is its own, seen from outside."""

    work: Path
    pid: int
    memory: Path

    def run(self, *argv: str, seconds: float = 200.0) -> subprocess.CompletedProcess[str]:
        """A command beside it, in all of its namespaces, as root."""
        environment = {"PATH": "/opt/ckptd/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-a", "--wd=/", *argv],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )

    def inside(self, path: str) -> Path:
        """A path in there, seen from here."""
        return Path(f"/proc/{self.pid}/root") / path.lstrip("/")

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def wait(self, what: str, done: Callable[[], object], seconds: float = 200.0) -> None:
        """Until `done`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError, KeyError):
                if done():
                    return
            time.sleep(0.1)
        raise AssertionError(f"waited for {what}: {self.log()}")

    def journal(self, unit: str, pattern: str, *more: str) -> str:
        """The newest line of a unit that fits."""
        found = self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit, "-g", pattern, *more)
        return (found.stdout.splitlines() or [""])[-1]

    def log(self) -> str:
        """The journal's end."""
        return self.run("journalctl", "--no-pager", "-n", "40", "-o", "cat").stdout


@contextlib.contextmanager
def booted(work: Path) -> Iterator[Booted]:
    """Boot one, wait until it is up, end it."""
    script = work / "boot.sh"
    (work / "layer").mkdir()
    script.write_text(_script(work))
    groups = [place / f"ckptd-boot-{os.getpid()}" for place in (_MEMORY, _SYSTEMD)]
    for group in groups:
        group.mkdir()
    enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    names = [
        "--pid",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--cgroup",
        "--fork",
        "--mount-proc",
        "--kill-child",
    ]
    with (work / "console").open("wb") as console:
        holder = subprocess.Popen(
            ["sh", "-c", f'{enter}exec unshare "$@" sh {script}', "sh", *names],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
    try:
        made = Booted(work=work, pid=_first_child(holder, work), memory=groups[0])
        states = ("running", "degraded")
        made.wait("boot", lambda: made.run("systemctl", "is-system-running").stdout.strip() in states)
        yield made
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(200)
        for group in groups:
            _remove_group(group)


def _script(work: Path) -> str:
    folders = [Path(p) for p in sys.path if p.endswith("site-packages") and Path(p).is_dir()]
    base = Path(sys.base_prefix)
    pairs = [(base, "python"), (REPOSITORY, "source")]
    pairs += [(folder, f"packages{number}") for number, folder in enumerate(folders)]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    mounts = [f"mount --bind {source} {name}; mount -o remount,bind,ro {name}" for source, name in pairs]
    return _BOOT.format(
        work=work,
        user=USER,
        uid=UID,
        names=" ".join(name for _, name in pairs),
        closed=" ".join(str(p) for p in base.resolve().parents if not p.stat().st_mode & stat.S_IXOTH),
        binds="\n".join(mounts),
        version=version,
        path=" ".join(f"/opt/{name}" for _, name in pairs[1:]),
        systemd=SYSTEMD,
    )


def _first_child(holder: subprocess.Popen[bytes], work: Path) -> int:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                if os.readlink(f"/proc/{pid}/exe") == str(SYSTEMD.resolve()):
                    return int(pid)
        if holder.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"systemd did not start: {(work / 'console').read_text()[-2000:]}")


def _remove_group(group: Path) -> None:
    """Bottom up, once its processes are gone."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)
            return
        time.sleep(0.1)
    shutil.rmtree(group, ignore_errors=True)
