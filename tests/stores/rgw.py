"""Ceph's RADOS gateway as processes on this machine: one monitor, one OSD, one gateway, on 127.0.0.1 alone.

Real production code for the suite of S3 (`make rgw-packages`, `make stores-full`): it checks signatures and
Content-MD5, heeds If-None-Match on PUT and ignores it on Complete. Every process ends with the one that
started it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid
from typing import TYPE_CHECKING

from tests.stores.servers import ACCESS_KEY, BUCKET, SECRET_KEY, START_SECONDS, Server, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool")
_DISK_BYTES = 8 << 30

_CONF = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {root}/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush update on start = false
mon allow pool size one = true
mon data avail warn = 2
mon data avail crit = 1
run dir = {root}/run
admin socket = {root}/run/$name.asok
log file = {root}/log/$name.log
pid file = {root}/run/$name.pid
mon data = {root}/mon
osd data = {root}/osd
osd objectstore = bluestore
bluestore block create = true
bluestore block size = {disk}
osd memory target = 1073741824
rgw data = {root}/run
rgw dynamic resharding = false
rgw crypt require ssl = false
rgw crypt s3 kms backend = testing
rgw crypt s3 kms encryption keys = testkey=YmluCmJvb3N0CmJvb3N0LWJ1aWxkCmNlcGguY29uZgo=
"""
"""cephx is needed: without it the gateway waits for ever."""

_KEYS = {
    "mon.": ["--cap", "mon", "allow *"],
    "client.admin": ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"],
    "osd.0": ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
    "client.rgw.a": ["--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"],
}


def missing() -> str | None:
    """Why it cannot run here; None when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: as root, `make rgw-packages`"
    return None if os.geteuid() == 0 else "Ceph's daemons are started by root alone"


@contextlib.contextmanager
def rgw(root: Path) -> Iterator[Server]:
    """A cluster of its own below `root`; `bucket` exists."""
    for name in ("mon", "osd", "run", "log"):
        (root / name).mkdir()
    mon2, mon1, port = free_port(), free_port(), free_port()
    fsid = str(uuid.uuid4())
    text = _CONF.format(fsid=fsid, mon1=mon1, mon2=mon2, root=root, disk=_DISK_BYTES)
    (root / "ceph.conf").write_text(text)
    server = Server("rgw", [], port, root / "log" / "client.rgw.a.log")
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _start(root, fsid, f"[v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]", port, daemons)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        # the gateway first, the monitor last
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            _end(daemon)


def _start(root: Path, fsid: str, mon: str, port: int, daemons: list[subprocess.Popen[bytes]]) -> None:
    conf, keyring = ["-c", "ceph.conf"], "keyring"

    def run(*command: str) -> None:
        done = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            message = f"{' '.join(command)}: {done.stderr[-2000:]}"
            raise RuntimeError(message)

    def begin(*command: str) -> None:
        words = ["setpriv", "--pdeathsig", "KILL", *command, "-f"]
        silent = subprocess.DEVNULL
        daemons.append(subprocess.Popen(words, cwd=root, stdin=silent, stdout=silent, stderr=silent))

    for number, (name, caps) in enumerate(_KEYS.items()):
        create = [] if number else ["--create-keyring"]
        run("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps)
    run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", mon, "monmap")
    run("ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", keyring)
    begin("ceph-mon", *conf, "-i", "a")
    disk = str(uuid.uuid4())
    run("ceph", *conf, "osd", "new", disk)
    run("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", disk)
    begin("ceph-osd", *conf, "-i", "0")
    run("ceph", *conf, "osd", "crush", "add", "osd.0", "1", "root=default")
    begin("radosgw", *conf, "-n", "client.rgw.a", "--rgw-frontends", f"beast endpoint=127.0.0.1:{port}")
    user = ["--uid", "t", "--display-name", "t", "--access-key", ACCESS_KEY, "--secret", SECRET_KEY]
    run("radosgw-admin", *conf, "user", "create", *user)
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    message = f"radosgw does not listen: {(root / 'log' / 'client.rgw.a.log').read_text()[-2000:]}"
    raise RuntimeError(message)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    try:
        daemon.wait(200)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
