"""What a look at save_dir makes of folders that are another user's and closed to us."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptd.base import files
from ckptd.core.model.listing import SaveDirListing
from ckptd.daemon.intake.sealer import IN_FLIGHT_SECONDS, Sealer
from ckptd.daemon.state.local_saves import Quiet
from ckptd.storage.local.scan import WALK_WAIT_SECONDS, OpenWriters, scan
from tests.support.recover_scene import Scene, known_save

NOBODY = 65534


def looked(save_dir: Path, before: SaveDirListing | None = None) -> SaveDirListing:
    """A look as somebody who is not root."""
    for folder in (save_dir, *save_dir.parents)[:-1]:
        if folder.stat().st_uid == 0 and "pytest" in str(folder):
            folder.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        with files.opened_dir(save_dir) as fd:
            return scan(fd, before=before)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_closed_folder_is_left_alone_and_a_checkpoint_is_waited_for(tmp_path: Path) -> None:
    """`lost+found`, where save_dir is a file system of its own, stopped the whole job."""
    scene = Scene(tmp_path)
    scene.save(5)
    (scene.save_dir / "lost+found").mkdir(mode=0o700)
    listing = looked(scene.save_dir)
    assert [folder.tag for folder in listing.folders] == ["global_step5"]
    assert "lost+found" in listing.foreign
    assert listing.closed == ()
    (scene.save_dir / "global_step6").mkdir(mode=0o700)
    assert looked(scene.save_dir, listing).closed == ("global_step6",), "perhaps a checkpoint: status says so"
    (scene.save_dir / "global_step5").chmod(0o700)
    with pytest.raises(PermissionError):
        looked(scene.save_dir, listing)
    (scene.save_dir / "global_step5").chmod(0o755)
    os.chown(scene.save_dir / "lost+found", NOBODY, NOBODY)
    (scene.save_dir / "lost+found").chmod(0)
    with pytest.raises(PermissionError):
        looked(scene.save_dir, listing)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_checkpoint_of_ours_that_was_closed_meanwhile_has_not_vanished(tmp_path: Path) -> None:
    """P5: the first look of a daemon that was started after rights were lost knows of no look before."""
    scene = Scene(tmp_path)
    _, state = known_save(scene, tmp_path / "journal.db")
    sealer = Sealer(scene.job(), state, SimpleNamespace(), SimpleNamespace(), lambda: None, lambda _tag: None)  # type: ignore[arg-type]
    (scene.save_dir / "global_step5").chmod(0o700)
    listing = looked(scene.save_dir)
    with files.opened_dir(scene.save_dir) as fd, pytest.raises(PermissionError, match="global_step5"):
        sealer.judge_and_seal(listing, fd, 0.0)
    state.journal.close()


def test_a_folder_that_somebody_writes_to_is_in_flight_however_long_it_rests(tmp_path: Path) -> None:
    """A rank that hangs in its save for ten minutes: nothing changes, and it is no leftover (H32)."""
    scene = Scene(tmp_path)
    _, state = known_save(scene, tmp_path / "journal.db")
    sealer = Sealer(scene.job(), state, SimpleNamespace(), SimpleNamespace(), lambda: None, lambda _tag: None)  # type: ignore[arg-type]
    with files.opened_dir(scene.save_dir) as fd:
        (folder,) = scan(fd).folders
    state.folders.quiet[folder.tag] = Quiet(digest=folder.digest, since_seconds=0.0, first_seen_unix=0.0)

    def is_recent(now_seconds: float) -> bool:
        sealer._writers = OpenWriters(str(scene.save_dir))  # an answer is used for a while
        return sealer._recently_changed(folder, now_seconds)

    shard = scene.save_dir / folder.tag / folder.files[0].path
    assert is_recent(IN_FLIGHT_SECONDS - 1)
    assert not is_recent(IN_FLIGHT_SECONDS + 1)
    with shard.open("rb"):
        assert not is_recent(IN_FLIGHT_SECONDS + 1), "a reader is no writer"
    with shard.open("r+b"):
        assert is_recent(IN_FLIGHT_SECONDS + 1)
    assert not is_recent(IN_FLIGHT_SECONDS + 1)
    state.journal.close()


def settled(writers: OpenWriters, tag: str, rested_seconds: float = 100.0) -> bool:
    """What is answered once the walk has come to its end."""
    found = writers.has(tag, rested_seconds)
    if writers._walking is not None and writers._walking.is_alive():
        writers._walking.join(60)
        found = writers.has(tag, 100.0)
    return found


def test_who_opened_a_file_before_the_folder_came_to_rest_is_seen(tmp_path: Path) -> None:
    """An answer of before says nothing of that; afterwards one walk answers for every folder."""
    writers = OpenWriters(str(tmp_path))
    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag).mkdir()
    assert not settled(writers, "global_step1")
    with (tmp_path / "global_step1" / "README.md").open("w"):
        assert settled(writers, "global_step1", rested_seconds=0.0)
        assert not settled(writers, "global_step2")
    walked_at = writers._walked_at_seconds
    for number in range(1000):
        writers.has(f"global_step{number}", 60.0)
    assert writers._walked_at_seconds == walked_at, "one walk for all"


def test_many_processes_hold_up_no_turn(tmp_path: Path) -> None:
    """Of 300 processes with 200 descriptors each; "somebody may write there" until it is known."""
    held = (
        "import os, signal\nfor _ in range(200): os.dup(1)\n"
        "children = [os.fork() or signal.pause() for _ in range(300)]\n"
        "print(len(children), flush=True)\n"
        "input()\nfor child in children: os.kill(child, signal.SIGKILL)"
    )
    command = [sys.executable, "-c", held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"300\n"
        writers = OpenWriters(str(tmp_path))
        begun = time.thread_time()
        answers = [writers.has(f"global_step{number}") for number in range(100)]
        assert time.thread_time() - begun < WALK_WAIT_SECONDS
        assert len(set(answers)) == 1
        assert not settled(writers, "global_step1")
        assert writers._good_for_seconds >= 10.0
        process.communicate(b"\n")
    assert "open-writers" not in {thread.name for thread in threading.enumerate()}


def test_two_scans_at_once_each_see_everything(tmp_path: Path) -> None:
    """The deciding thread scans while a worker looks whether a save began: one descriptor, duplicated."""
    scene = Scene(tmp_path)
    for step in (5, 6):
        scene.save(step)
    with files.opened_dir(scene.save_dir) as fd, os.scandir(fd) as other:
        next(other)
        assert [folder.tag for folder in scan(fd).folders] == ["global_step5", "global_step6"]
