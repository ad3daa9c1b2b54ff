"""`ckptd resume` before anything was ever uploaded: start fresh only where that is known; what is away is
said once (P2, H5).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.errors import RemoteUnreachable
from ckptd.recover.execute import one_at_a_time
from ckptd.storage.local.fs import STAGING
from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


@pytest.fixture
def apart() -> Iterator[Path]:
    """A folder on a file system that is neither the root's nor that of the tests' save_dir."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    assert place.stat().st_dev not in (os.stat("/").st_dev, os.stat(tempfile.gettempdir()).st_dev)
    yield place
    shutil.rmtree(place)


def resume(scene: Scene, *words: object, **environ: str) -> tuple[int, str]:
    """Exit code and what is printed for people."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "resume", str(scene.save_dir), *map(str, words)],
        env={**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_an_empty_place_that_was_reached_means_start_fresh(scene: Scene, apart: Path, is_there: bool) -> None:
    url = apart / "llama-7b"
    if is_there:
        url.mkdir()
    code, said = resume(scene, url)
    assert (code, f"({url}: empty, nothing was ever uploaded there)" in said) == (4, True), said
    assert list(apart.rglob("*")) == [url] * is_there, "nothing is written there"
    assert list(scene.save_dir.iterdir()) == []


def test_a_save_here_is_the_newest_where_nothing_was_ever_uploaded(scene: Scene, apart: Path) -> None:
    scene.save(5)
    code, said = resume(scene, apart / "llama-7b")
    assert code == 0, said


@pytest.mark.parametrize("what", ["a file", "another job", "its own remote"])
def test_a_place_that_holds_anything_is_not_new(scene: Scene, apart: Path, what: str) -> None:
    """Files beside it may be a share's own; what was this job's remote is mounted no more, or emptied."""
    url = apart / "run"
    url.mkdir()
    environ = {}
    if what == "a file":
        (url / "checkpoint.txt").write_text("")
    elif what == "another job":
        (url / "_ckptd").mkdir()
        (url / "_ckptd" / "remote.json").write_text(
            '{"remote_id": "a", "job_id": "b", "job": "other", "created": "2026-01-01T00:00:00+00:00"}'
        )
    else:
        scene.save(5)
        start = [sys.executable, "-m", "ckptd", "run", str(scene.save_dir), str(url), "--once"]
        environ = {"CKPTD_SETTLE": "0.2s"}
        subprocess.run(start, env={**os.environ, **environ}, check=True, timeout=120)
        shutil.rmtree(scene.save_dir / "global_step5")
        (scene.save_dir / "latest").unlink()
        shutil.rmtree(url)
    code, said = resume(scene, url, **environ)
    assert code == 69, said


def test_a_folder_on_the_root_disk_may_be_a_share_that_is_not_mounted(scene: Scene) -> None:
    """Whatever is said of same_filesystem."""
    url = scene.root / "mnt" / "run"
    url.parent.mkdir()
    for environ in ({}, {"CKPTD_REMOTE_SAME_FILESYSTEM": "true"}):
        code, said = resume(scene, url, **environ)
        assert (code, said.count(f"{url} is not there")) == (69, 1), said
        assert "start training from scratch" not in said


def test_a_place_whose_parent_is_missing_was_not_reached(scene: Scene, apart: Path) -> None:
    code, said = resume(scene, apart / "none" / "run")
    assert (code, said.count("is not there")) == (69, 1), said
    assert list(scene.save_dir.iterdir()) == [], "nothing of ours lies there before the first checkpoint"


def test_a_remote_that_is_away_beside_a_new_one(scene: Scene, apart: Path, tmp_path: Path) -> None:
    """The one that is away may hold the newest: 69, and the reason stands there once."""
    job = tmp_path / "job.toml"
    job.write_text(
        f'save_dir = "{scene.save_dir}"\n'
        f'[[remote]]\nname = "new"\nurl = "{apart}/run"\n'
        f'[[remote]]\nname = "away"\nurl = "{apart}/none/run"\n'
    )
    scene.save(5)
    for tag in ("global_step5", ""):
        code, said = resume_job(job)
        assert (code, said.count(f"{apart}/none/run is not there")) == (69, 1), (tag, said)
        shutil.rmtree(scene.save_dir / "global_step5", ignore_errors=True)


def test_what_is_done_without_a_remote_is_said_once(scene: Scene, apart: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "run"\nsave_dir = "{scene.save_dir}"\n'
        f'[[remote]]\nname = "away"\nurl = "{apart}/none/run"\n'
        f'[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
    )
    scene.commit(scene.save(8), 8)
    scene.lose_node()
    code, said = resume_job(job)
    assert (code, said.count("remote away: ")) == (0, 1), said
    code, said = resume_job(job, "--nnodes", "2", "--world-size", "2")
    assert (code, said.count("is not there")) == (69, 1), said
    assert "another of the 2 nodes may resume from there" in said


def resume_job(job: Path, *words: str) -> tuple[int, str]:
    """The same of a job file."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "resume", str(job), *words],
        env={**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stderr


def test_who_waited_for_one_that_failed_holds_a_lock_that_others_see(tmp_path: Path) -> None:
    """The one that failed has removed what it had locked."""
    held: list[bool] = []
    with files.opened_dir(tmp_path) as fd:

        def wait() -> None:
            with one_at_a_time(fd):
                again = os.open(tmp_path / STAGING, os.O_RDONLY)
                with pytest.raises(BlockingIOError):
                    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(again)
                held.append(True)

        waiting = threading.Thread(target=wait)
        with pytest.raises(RemoteUnreachable), one_at_a_time(fd):
            waiting.start()
            lock = f":{os.stat(tmp_path / STAGING).st_ino} "
            while not any(
                " -> " in row and lock in row for row in Path("/proc/locks").read_text().split("\n")
            ):
                time.sleep(0.02)
            raise RemoteUnreachable("away")
        waiting.join(60)
    assert held
