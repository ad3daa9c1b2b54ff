"""Build the guest's disk for `make vm`: Debian by debootstrap, ckptd installed in /opt/ckptd.

Everything lies in `.build/vm`; a step whose input is unchanged is not done again. Needs root and what
`make vm-packages` installs. The mirror is the one that this machine's apt uses.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / ".build" / "vm"
TREE = BUILD / "rootfs"
IMAGE = BUILD / "root.img"
RELEASE = "bookworm"
PACKAGES = (
    "systemd-sysv", "udev", "dbus", "kmod", "procps", "util-linux", "iproute2", "python3", "python3-venv",
    "nfs-kernel-server", "nfs-common", "rpcbind", "quota", "dmsetup", "xfsprogs", "e2fsprogs",
)  # fmt: skip
MODULES = Path("/usr/lib/uml/modules")
USER, UID = "train", 1500
SITE = "opt/ckptd/lib/python3.11/site-packages"

_UNIT = """[Unit]
Description=one case of make vm
After=multi-user.target
[Service]
ExecStart=/srv/case.sh
TimeoutStopSec=5s
[Install]
WantedBy=multi-user.target
"""
_START = """#!/bin/bash
# Run the case that the kernel's command line names; its output goes to the host's folder.
word() { sed -n "s/.*vm.$1=\\([^ ]*\\).*/\\1/p" /proc/cmdline; }
mkdir -p /host /repository
mount -t hostfs none /host -o "$(word share)"; mount -t hostfs none /repository -o "$(word repository)"
export PATH=/opt/ckptd/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 NO_COLOR=1 COLUMNS=200
export PYTHONPATH=/repository PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
IFS=: read -ra words <<<"$(word case)"
/opt/ckptd/bin/python -m tests.vm.guest "${words[@]}" </dev/null >>/host/case.out 2>&1
echo "ended with $?" >>/host/case.out; sync; systemctl poweroff --force
"""


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


def _mirror() -> str:
    """Return where apt finds the release's main component."""
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for uri, release, component in (line.split() for line in found.splitlines()):
        if (release, component) == (RELEASE, "main"):
            return uri
    raise SystemExit(f"apt on this machine knows no {RELEASE}/main, which the guest is made of")


def _is_done(step: str, *inputs: str) -> bool:
    """Whether the step was done with the same inputs; notes them otherwise once `_done` is called."""
    stamp = BUILD / f".{step}"
    return stamp.exists() and stamp.read_text() == "\n".join(inputs)


def _done(step: str, *inputs: str) -> None:
    (BUILD / f".{step}").write_text("\n".join(inputs))


def _install_debian() -> bool:
    if _is_done("debian", *PACKAGES):
        return False
    shutil.rmtree(TREE, ignore_errors=True)
    _run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", RELEASE, TREE, _mirror())
    for path in (TREE / "var/cache/apt/archives").glob("*.deb"):
        path.unlink()
    _done("debian", *PACKAGES)
    return True


def _install_ckptd() -> bool:
    """Install the wheel of this tree with its dependencies, as `make install` does."""
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(
            f"the guest's Python is 3.11, this one {sys.version.split()[0]}; type make PYTHON=python3.11 vm"
        )
    sources = sorted(
        p
        for part in ("ckptd", "systemd", "config")
        for p in (ROOT / part).rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    )
    code = hashlib.sha256(b"".join(str(p).encode() + p.read_bytes() for p in sources)).hexdigest()
    if _is_done("ckptd", code):
        return False
    shutil.rmtree(TREE / "opt/ckptd", ignore_errors=True)
    _run("chroot", TREE, "python3", "-m", "venv", "--without-pip", "/opt/ckptd")
    _run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "-c",
        ROOT / "constraints.txt",
        "--target",
        TREE / SITE,
        ROOT,
    )
    launcher = TREE / "opt/ckptd/bin/ckptd"
    launcher.write_text("#!/opt/ckptd/bin/python\nfrom ckptd.__main__ import entry\nentry()\n")
    launcher.chmod(0o755)
    _done("ckptd", code)
    return True


def _set_up() -> None:
    """Write the guest's own settings: user, name, units, kernel modules."""
    modules = max(MODULES.iterdir())
    shutil.copytree(modules, TREE / "lib/modules" / modules.name, dirs_exist_ok=True)
    _run("chroot", TREE, "depmod", modules.name)
    if f"{USER}:" not in (TREE / "etc/passwd").read_text():
        _run("chroot", TREE, "useradd", "-m", "-u", str(UID), "-s", "/bin/bash", USER)
    (TREE / "etc/hostname").write_text("vm\n")
    (TREE / "etc/hosts").write_text("127.0.0.1 localhost vm\n")
    (TREE / "etc/fstab").write_text("/dev/ubda / ext4 defaults 0 0\n")
    (TREE / "etc/systemd/system/case.service").write_text(_UNIT)
    (TREE / "srv/case.sh").write_text(_START)
    (TREE / "srv/case.sh").chmod(0o755)
    _run("chroot", TREE, "systemctl", "-q", "enable", "case.service")
    _run(
        "chroot",
        TREE,
        "systemctl",
        "-q",
        "mask",
        "nfs-server.service",
        "getty@tty1.service",
        "systemd-timesyncd.service",
    )


def build() -> Path:
    """Return the guest's disk, an ext4 image; it is never written: each guest has a layer of its own."""
    missing = [tool for tool in ("linux.uml", "debootstrap") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"missing: {', '.join(missing)}; type make vm-packages")
    BUILD.mkdir(parents=True, exist_ok=True)
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    is_new = [_install_debian(), _install_ckptd(), not _is_done("image", own)]
    if any(is_new) or not IMAGE.exists():
        _set_up()
        IMAGE.unlink(missing_ok=True)
        _run("truncate", "-s", "3G", IMAGE)
        _run("mkfs.ext4", "-q", "-F", "-d", TREE, IMAGE)
        _done("image", own)
    return IMAGE


if __name__ == "__main__":
    print(build())
