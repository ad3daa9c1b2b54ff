"""What a network file system does to a directory remote: errors of its calls, and a mount that hangs.

strace makes single calls of the real remote child fail as NFS makes them fail; the mount that hangs is a FUSE
mount (sshfs) whose process is stopped. No kernel here knows NFS or SMB: their own behaviour was never seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.base import retry
from ckptd.daemon.uploads import session
from ckptd.errors import NoSpaceError, StorageError
from tests.faults.hanging import sshfs
from tests.faults.transfer_rig import BIG, Rig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.remote.messages import Attached

pytestmark = [pytest.mark.faults, pytest.mark.root]

FULL = bool(os.environ.get("CKPTD_FULL"))
MEGABYTES = 4
_CALL = re.compile(r"(\w+)(?:\(| resumed>)")
"""In a line of strace: whole, or the end of one that was interrupted."""


class Nas:
    """A rig whose remote is a folder here."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "nas"
        self.rig = Rig(folder, self.root)
        self.rig.until("attached", lambda: self.rig.session.is_ready)
        self.steps = 0

    def save(self) -> Path:
        """A save that is not uploaded yet; its folder in the remote is there already."""
        self.steps += 1
        folder = self.rig.save(self.steps, MEGABYTES)
        (self.root / folder.name).mkdir(exist_ok=True)
        return folder

    @property
    def child(self) -> int:
        """The remote's process."""
        pid = self.rig.session._client.pid
        assert pid is not None
        return pid

    @property
    def attached(self) -> Attached:
        """What the remote was seen to be."""
        found = self.rig.session.attached
        assert found is not None
        return found

    def is_whole(self, folder: Path) -> bool:
        """Every byte there, one COMMIT, nothing half left behind."""
        there = self.root / folder.name
        commits = list((self.root / "_ckptd" / "commits").glob(f"{folder.name}~*"))
        return {p.name: p.read_bytes() for p in there.iterdir()} == {
            p.name: p.read_bytes() for p in folder.iterdir()
        } and [p.name for p in commits] == [f"{folder.name}~g1~zero.json"]


@pytest.fixture(scope="module")
def nas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nas]:
    """One child for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry, "backoff_seconds", lambda tries: 0.2)
        made = Nas(tmp_path_factory.mktemp("nfs"))
        yield made
        made.rig.close()


@contextlib.contextmanager
def injected(pid: int, *faults: str, paths: tuple[Path, ...] = ()) -> Iterator[None]:
    """Calls of that process fail: `faults` as strace's inject=, on `paths` alone where there are any."""
    calls = ",".join(fault.partition(":")[0] for fault in faults)
    log = Path(tempfile.mkdtemp()) / "calls"
    command = ["strace", "-f", "-o", str(log), "-e", f"trace={calls}", "-p", str(pid)]
    for fault in faults:
        command += ["-e", f"inject={fault}"]
    for path in paths:
        command += ["-P", str(path)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        for line in tracer.stderr:
            if "attached" in line:
                break
        else:
            raise AssertionError("strace cannot attach")
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(10)
        tracer.stderr.close()
    lines = [line for line in log.read_text().splitlines() if "INJECTED" in line]
    hit = {found[1] for line in lines if (found := _CALL.search(line))}
    assert hit == set(calls.split(",")), "every fault was hit"


def partial_of(nas: Nas, folder: Path) -> Path:
    """Where the big shard is written before it gets its name."""
    digest = hashlib.sha256(f"id-{nas.rig.node.name}\0{folder.name}/{BIG}".encode()).hexdigest()
    return nas.root / folder.name / f".ckptd-part-{digest[:24]}"


PASSING = {
    "a handle that is stale once": ("linkat:error=ESTALE:when=1",),
    "no flush of a folder": ("fsync:error=EINVAL",),
    "no owner but one's own, no links": ("fchown:error=EPERM", "linkat:error=EPERM"),
}


@pytest.mark.parametrize("what", PASSING if FULL else list(PASSING)[:2])
def test_what_nfs_refuses_and_we_can_do_without(nas: Nas, what: str) -> None:
    """No attempt fails."""
    folder = nas.save()
    for path in folder.iterdir() if "owner" in what else ():
        os.chown(path, -1, 4242)
    commits = nas.root / "_ckptd" / "commits"
    paths = (nas.root / folder.name, commits, nas.root) if "flush" in what else ()
    with injected(nas.child, *PASSING[what], paths=paths):
        nas.rig.upload()
    assert not nas.rig.failures
    assert nas.is_whole(folder)


LATE = {
    "EIO at flush": ("fdatasync:error=EIO:when=1", StorageError, "Input/output error"),
    "quota at flush": ("fdatasync:error=EDQUOT:when=1", NoSpaceError, "Disk quota exceeded"),
    "full at close": ("close:error=ENOSPC:when=1", NoSpaceError, "No space left"),
}
if FULL:
    LATE |= {
        "stale at flush": ("fdatasync:error=ESTALE:when=1", StorageError, "Stale file handle"),
        "EIO at write": ("write:error=EIO:when=1", StorageError, "Input/output error"),
        "EIO at the last flush": ("fsync:error=EIO:when=1", StorageError, "Input/output error"),
        "EIO at close": ("close:error=EIO:when=1", StorageError, "Input/output error"),
        "full at the last flush": ("fsync:error=ENOSPC:when=1", NoSpaceError, "No space left"),
    }


@pytest.mark.parametrize("what", LATE)
def test_what_an_nfs_server_says_late(nas: Nas, what: str) -> None:
    """That attempt is dead, said in words; the next one writes again what was not durable: one COMMIT."""
    fault, kind, words = LATE[what]
    folder = nas.save()
    with injected(nas.child, fault, paths=(partial_of(nas, folder),)):
        nas.rig.until("a failure", lambda: nas.rig.failures)
    nas.rig.upload()
    # each thread of each attempt has a first call of its own
    assert {type(error) for error in nas.rig.failures} == {kind}
    assert words in nas.rig.failures[0].message
    assert any(words in text for text in nas.rig.said)
    assert nas.is_whole(folder)


def test_a_squashed_root_and_missing_links_are_said(nas: Nas) -> None:
    """When the remote is tried anew, as `check` does."""
    first = nas.attached
    assert not [note for note in first.abilities.notes if "root_squash" in note or "links" in note]
    with injected(nas.child, "linkat:error=EPERM"):
        nas.rig.session.attached = None
        nas.rig.until("attached again", lambda: nas.rig.session.attached is not None)
    assert any("no hard links there" in note for note in nas.attached.abilities.notes)
    nas.save()
    with injected(nas.child, "linkat:error=EACCES"):
        nas.rig.until("denied", lambda: nas.rig.failures)
    assert "the server squashes root (root_squash)" in nas.rig.failures[0].message
    assert "run ckptd as the user who trains" in nas.rig.failures[0].hint
    nas.rig.upload()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A FUSE mount over a real SSH server, and the process that serves it."""
    with sshfs(tmp_path) as (point, process, _):
        yield point, process


def test_a_mount_that_hangs_hurts_only_its_own_child(
    tmp_path: Path,
    mounted: tuple[Path, subprocess.Popen[bytes]],
    nas: Nas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns go on, the other remote ships, status says it; when the mount comes back: one COMMIT."""
    point, process = mounted
    monkeypatch.setattr(session, "IDLE_SECONDS", 1.5)
    monkeypatch.setattr(session, "STALLED_SECONDS", 2.5)
    far = Rig(tmp_path, point / "run", bytes_per_second=1 << 20)
    try:
        folder = far.save(1, 5)

        def has_part() -> bool:
            # unlike rglob, os.walk passes over what is removed meanwhile
            return any(n.startswith(".ckptd-part-") for _, _, names in os.walk(point) for n in names)

        far.until("some bytes", lambda: has_part() and far.session.is_transferring)
        process.send_signal(signal.SIGSTOP)
        other = nas.save()
        # a turn that waited for the mount would wait until SIGCONT, which comes after this
        end = time.monotonic() + 200
        while not (far.failures and nas.rig.result) and time.monotonic() < end:
            for rig in (far, nas.rig):
                rig.turn()
        assert nas.is_whole(other), "the other remote goes on"
        assert far.failures, "the hung one is cut"
        assert any("no byte moved" in text for text in far.said)
        process.send_signal(signal.SIGCONT)
        far.upload()
        there = point / "run" / folder.name
        assert {p.name: p.read_bytes() for p in there.iterdir()} == {
            p.name: p.read_bytes() for p in folder.iterdir()
        }
        commits = list((point / "run" / "_ckptd" / "commits").iterdir())
        assert [p.name for p in commits] == ["global_step1~g1~zero.json"]
        assert "transfer-stalled" not in {problem.code for problem in far.problems.all()}
    finally:
        process.send_signal(signal.SIGCONT)
        far.close()
