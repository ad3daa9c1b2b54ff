"""The ground under a running daemon changes: rights, a mount that turns read-only, another file system (P19).

Each time status says it, nothing is lost, and the daemon goes on by itself once it is given back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.daemon.state import permissions
from ckptd.storage.local import probe
from tests.e2e.harness import PACE, PATIENCE_SECONDS, RUN, Node, made_before, node

pytestmark = [pytest.mark.real, pytest.mark.faults]
real_saves = made_before(RUN)

ONE = "forms = []\nsave_total_limit = 1"
ZERO = 'forms = ["zero"]'
DISK_BYTES = 48 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def said(here: Node, code: str) -> str:
    """The text of an open problem."""
    return next((p["text"] for p in here.status().get("problems", ()) if p["code"] == code), "")


def mount(*words: object) -> None:
    """Once nobody writes there any more, which `remount,ro` asks for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


def losetup(*words: object) -> None:
    """Once the device is free."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while subprocess.run(["losetup", *map(str, words)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


def umount(place: Path) -> None:
    """Unmount it once nobody uses it, in any mount namespace: else a mount would show it as it was before."""
    disk = loop_of(place)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while subprocess.run(["umount", str(place)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, place
        time.sleep(0.05)
    while not is_free(disk):
        assert time.monotonic() < deadline, disk
        time.sleep(0.05)


def loop_of(place: Path) -> Path:
    """Return the device that is mounted there."""
    return Path(f"/dev/loop{os.minor(place.stat().st_dev)}")


def is_free(loop: Path) -> bool:
    """Say whether no file stands behind the device."""
    return not Path(f"/sys/block/{loop.name}/loop/backing_file").exists()


@contextlib.contextmanager
def disk_at(place: Path, image: Path) -> Iterator[None]:
    """An ext4 of its own, as of an NVMe."""
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    mount("-o", "loop", image, place)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def test_rights_that_are_lost_and_given_back(tmp_path: Path) -> None:
    """Nothing is deleted without them, and what waits for that goes once they are back."""
    with node(tmp_path, local=ONE, remote=ZERO) as here:
        if os.geteuid() == 0:
            # root that is bound by the mode of what it owns, as any other user
            here.under = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
        here.start()
        here.save(1)
        here.save(2)
        here.wait("the first prune", lambda: here.local_tags() == {"global_step2"})
        (here.save_dir / "global_step3").mkdir()
        here.save_dir.chmod(0o555)
        here.save(3)
        here.wait_committed("global_step3~g1")
        here.wait("no-rights", lambda: "no-rights" in here.problems())
        assert here.local_tags() == {"global_step2", "global_step3"}
        assert here.status()["state"] == "attention"
        here.save_dir.chmod(0o755)
        here.wait("the second prune", lambda: here.local_tags() == {"global_step3"})
        here.wait("the end of it", lambda: not here.problems() & {"no-rights", "prune-blocked"})
        assert {line["tag"] for line in here.audit()} == {"global_step1", "global_step2"}


@as_root
def test_no_room_is_no_want_of_rights(tmp_path: Path) -> None:
    """On a disk without an inode left nothing can be tried out, and what goes is what makes room."""
    mount("-t", "tmpfs", "-o", "nr_inodes=30", "none", tmp_path)
    try:
        with files.opened_dir(tmp_path) as fd:
            probe.prove_rights(fd, "run", "mark")
            with contextlib.suppress(OSError):
                for number in range(30):
                    (tmp_path / str(number)).mkdir()
            with pytest.raises(OSError, match="No space"):
                probe.prove_rights(fd, "run", "mark")
            permissions.prove(fd, "run", "mark")
            assert permissions.can_clone(fd, "mark") is None
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.full
@as_root
def test_a_save_dir_that_turns_read_only(tmp_path: Path) -> None:
    """The state lies elsewhere: what is complete is uploaded, nothing goes, and later it catches up."""
    (tmp_path / "nvme").mkdir()
    mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", tmp_path / "nvme")
    try:
        with node(tmp_path, local=ONE, remote=ZERO) as here:
            here.environment = {"STATE_DIRECTORY": str(tmp_path / "state")}
            here.state = tmp_path / "state" / "run"
            here.start()
            here.save(1)
            here.wait_committed("global_step1~g1")
            here.nas.parent.rename(tmp_path / "away")
            here.save(2)
            here.wait(
                "the second", lambda: here.checkpoint("global_step2").get("local", {}).get("complete_at")
            )
            here.wait("a NAS that is away", lambda: "remote-unreachable" in here.problems())
            mount("-o", "remount,ro", tmp_path / "nvme")
            (tmp_path / "away").rename(here.nas.parent)
            here.wait_committed("global_step2~g1")
            here.wait("the problem", lambda: "Read-only" in said(here, "no-rights"))
            assert here.local_tags() == {"global_step1", "global_step2"}
            mount("-o", "remount,rw", tmp_path / "nvme")
            here.wait("the prune", lambda: here.local_tags() == {"global_step2"})
            here.wait("the end of it", lambda: not here.problems() & {"no-rights", "prune-blocked"})
            here.stop()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "nvme")], check=False)


@as_root
def test_a_state_directory_that_turns_read_only(tmp_path: Path) -> None:
    """What the journal cannot note is not done; mounted again, the job goes on from where it was."""
    state = tmp_path / "var"
    with disk_at(state, tmp_path / "image"), node(tmp_path, local=ONE, remote=ZERO) as here:
        here.environment = {"STATE_DIRECTORY": str(state)}
        here.state = state / "run"
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.wait("safe", lambda: (here.status().get("safe") or {}).get("step") == 1)
        mount("-o", "remount,abort", state)
        here.save(2)
        here.wait("the word of it", lambda: b"begins again" in here.log.read_bytes())
        assert here.local_tags() == {"global_step1", "global_step2"}
        umount(state)
        mount("-o", "loop", tmp_path / "image", state)
        here.wait_committed("global_step2~g1")
        here.wait("the prune", lambda: here.local_tags() == {"global_step2"})
        here.wait("the end of it", lambda: not here.problems() - PACE)
        here.stop()


@as_root
@pytest.mark.parametrize("number", ["free", "other"])
def test_another_file_system_in_the_place_of_save_dir(tmp_path: Path, number: str) -> None:
    """The NVMe is not mounted after a restart: nothing of what lies there goes; mounted, all is as before.

    Also under another device number.
    """
    nvme, other = tmp_path / "nvme", tmp_path / "other"
    other.write_bytes(bytes(1 << 20))
    with disk_at(nvme, tmp_path / "image"), node(tmp_path, local=ONE, remote=ZERO) as here:
        here.environment = {"STATE_DIRECTORY": str(tmp_path / "state")}
        here.state = tmp_path / "state" / "run"
        before, taken = os.stat(nvme).st_dev, loop_of(nvme)
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        umount_lazily(nvme)
        here.save_dir.mkdir(parents=True)
        here.save(2)
        here.save(3)
        here.wait("the problem", lambda: "device-changed" in here.problems())
        here.wait_committed("global_step3~g1")
        assert here.local_tags() == {"global_step2", "global_step3"}
        if number == "other":
            here.wait("the disk is free", lambda: is_free(taken))
            losetup(taken, other)
        try:
            mount("-o", "loop", tmp_path / "image", nvme)
            assert number == "free" or os.stat(nvme).st_dev != before
            here.wait("its end", lambda: here.status() and "device-changed" not in here.problems())
            here.save(4)
            here.wait("the prune", lambda: here.local_tags() == {"global_step4"})
            here.stop()
        finally:
            if number == "other":
                losetup("-d", taken)


@as_root
def test_a_boot_gives_the_disk_another_number(tmp_path: Path) -> None:
    """The device number of save_dir's disk is another one: its saves are known, none is sent again."""
    nvme, image, other = tmp_path / "nvme", tmp_path / "image", tmp_path / "other"
    other.write_bytes(bytes(1 << 20))
    with disk_at(nvme, image), node(tmp_path, local=ONE, remote=ZERO) as here:
        before, taken = os.stat(nvme).st_dev, loop_of(nvme)
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.stop()
        umount(nvme)
        losetup(taken, other)
        try:
            mount("-o", "loop", image, nvme)
            assert os.stat(nvme).st_dev != before
            here.start()
            here.save(2)
            here.wait("the deletion", lambda: here.local_tags() == {"global_step2"})
        finally:
            losetup("-d", taken)
        assert set(here.commits()) == {"global_step1~g1", "global_step2~g1"}
        assert "device-changed" not in here.problems()
        here.stop()


def test_a_lock_that_is_given_back(tmp_path: Path) -> None:
    """Two jobs; the other one's directory is owned by another daemon, and watched once that has ended."""
    other = tmp_path / "nvme" / "other"
    other.mkdir(parents=True)
    with node(tmp_path, local=ONE, remote=ZERO) as here:
        here.environment = {"STATE_DIRECTORY": str(tmp_path / "state")}
        here.state = tmp_path / "state" / "run"
        job = tmp_path / "other.toml"
        (tmp_path / "nas" / "other").mkdir()
        text = here.job_file.read_text().replace(str(here.save_dir), str(other))
        job.write_text(text.replace(str(here.nas), str(tmp_path / "nas" / "other")))
        fd = os.open(other, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        here.start("--job", str(job))
        document = here.state / "status.json"
        here.wait("the other job", lambda: document.exists() and b'"lock-held"' in document.read_bytes())
        os.close(fd)
        here.wait("its begin", lambda: f"watching {other}".encode() in here.log.read_bytes())
        here.wait("the end of it", lambda: b'"lock-held"' not in document.read_bytes())


@pytest.mark.full
def test_a_place_that_may_not_be_opened_at_the_start(tmp_path: Path) -> None:
    """Two jobs; the directory of the other one may not be read at the start, and is watched once it may."""
    other = tmp_path / "nvme" / "other"
    other.mkdir(parents=True, mode=0o300)
    with node(tmp_path, local=ONE, remote=ZERO) as here:
        if os.geteuid() == 0:
            here.under = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
        here.environment = {"STATE_DIRECTORY": str(tmp_path / "state")}
        here.state = tmp_path / "state" / "run"
        job = tmp_path / "other.toml"
        (tmp_path / "nas" / "other").mkdir()
        text = here.job_file.read_text().replace(str(here.save_dir), str(other))
        job.write_text(text.replace(str(here.nas), str(tmp_path / "nas" / "other")))
        here.start("--job", str(job))
        document = here.state / "status.json"
        here.wait("the word", lambda: document.exists() and b"Permission denied" in document.read_bytes())
        other.chmod(0o755)
        here.wait("its begin", lambda: f"watching {other}".encode() in here.log.read_bytes())
        here.wait("the end of it", lambda: b"Permission denied" not in document.read_bytes())
        assert here.log.read_bytes().count(b"does not run") == 1


def umount_lazily(place: Path) -> None:
    """Though somebody has it open."""
    subprocess.run(["umount", "-l", str(place)], check=True)
