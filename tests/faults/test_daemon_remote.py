"""Remotes that go away, fill up, refuse, or are somebody else's: said, survived, healed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, made_before, node, same_bytes
from tests.faults.test_daemon_ground import mount
from tests.support.real import save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.faults]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


real_saves = made_before(RUN)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A 6 MB tmpfs as the NAS's mount point."""
    point = tmp_path / "nas"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False)


@needs_root
@pytest.mark.root
def test_unmounted_under_way(tmp_path: Path, mounted: Path) -> None:
    """An unmounted NAS is "not mounted", its empty mount point stays empty, and it heals by itself."""
    with node(tmp_path, local="save_total_limit = 1", remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        aside = tmp_path / "elsewhere"
        aside.mkdir()
        subprocess.run(["mount", "--move", str(mounted), str(aside)], check=False)
        if os.path.ismount(mounted):
            subprocess.run(["mount", "--bind", str(mounted), str(aside)], check=True)
            subprocess.run(["umount", "-l", str(mounted)], check=True)
        here.save(2)
        away = {"remote-not-ours", "remote-unreachable"}
        here.wait("said", lambda: here.problems() & away, 40)
        here.save(3)
        time.sleep(3)
        assert not list(mounted.iterdir())
        assert here.local_tags() == {"global_step1", "global_step2", "global_step3"}

        subprocess.run(["mount", "--bind", str(aside), str(mounted)], check=True)
        here.wait_committed("global_step3~g1", 90)
        here.wait("healed", lambda: not here.problems() & away)
        here.wait("the limit", lambda: here.local_tags() == {"global_step3"})
        here.end()
        subprocess.run(["umount", "-l", str(mounted)], check=False)
        subprocess.run(["umount", "-l", str(aside)], check=False)


@needs_root
@pytest.mark.root
def test_a_full_remote(tmp_path: Path, mounted: Path) -> None:
    """A full NAS is said, nothing local is deleted, and when there is room the rest is committed."""
    filler = mounted / "filler"
    filler.write_bytes(b"x" * (3 << 20))
    with node(tmp_path, local="save_total_limit = 1", remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.save(2)
        here.wait("said", lambda: "remote-full" in here.problems(), 40)
        assert here.local_tags() == {"global_step1", "global_step2"}
        assert not list(mounted.rglob("*.tmp"))
        filler.unlink()
        here.wait_committed("global_step2~g1", 40)
        assert same_bytes(here, "global_step2", RUN, 2)


@needs_root
@pytest.mark.root
def test_a_full_remote_is_emptied_by_a_lower_keep_last(tmp_path: Path, mounted: Path) -> None:
    """No half object keeps the room that a tombstone needs, and what the new policy lets go makes more."""
    size = sum(path.stat().st_size for path in (save_dir_of(RUN) / "global_step1").iterdir())
    filler = mounted / "filler"
    filler.write_bytes(b"x" * ((6 << 20) - int(2.7 * size)))
    with node(tmp_path, local="save_total_limit = 1", remote='forms = ["zero"]\nkeep_last = 9') as here:
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.save(3)
        here.wait("said", lambda: "remote-full" in here.problems(), 40)
        (told,) = (p for p in here.status()["problems"] if p["code"] == "remote-full")
        assert "keep_last" in told["next_step"]
        assert not list(mounted.rglob(".ckptd-part-*"))
        here.write_job(remote='forms = ["zero"]\nkeep_last = 1')
        here.processes[-1].send_signal(signal.SIGHUP)
        here.wait_committed("global_step3~g1", 60)
        here.wait("the rest to go", lambda: set(here.commits()) == {"global_step3~g1"}, 60)
        here.wait("its end", lambda: "remote-full" not in here.problems(), 60)
        assert same_bytes(here, "global_step3", RUN, 3)


@needs_root
@pytest.mark.root
def test_a_read_only_remote(tmp_path: Path, mounted: Path) -> None:
    """A read-only NAS is said with what to do, and heals."""
    with node(tmp_path) as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.wait("idle", lambda: "global_step1~g1" in here.commits("universal"))
        mount("-o", "remount,ro", mounted)
        here.save(2)
        here.wait("said", lambda: "remote-denied" in here.problems(), 40)
        mount("-o", "remount,rw", mounted)
        here.wait_committed("global_step2~g1", 90)


def test_a_remote_of_another_job_and_one_on_the_same_disk(tmp_path: Path) -> None:
    """Another job's remote is refused by name; save_dir's own disk is no NAS unless the job file says so."""
    with node(tmp_path) as here:
        here.save(1)
        assert here.once() == 0
        other = tmp_path / "other"
        other.mkdir()
        shutil.copytree(here.save_dir / "global_step1", other / "global_step1")
        job = tmp_path / "other.toml"
        job.write_text(here.job_file.read_text().replace(str(here.save_dir), str(other)))
        done = here.ckptd("run", "--job", job, "--once")
        assert done.returncode != 0
        assert "run" in done.stderr
        assert set(here.commits()) == {"global_step1~g1"}

        third = tmp_path / "third.toml"
        third.write_text(
            here.job_file.read_text()
            .replace("same_filesystem = true", "")
            .replace(str(here.nas), str(tmp_path / "nas" / "third"))
        )
        shutil.rmtree(here.state)
        done = here.ckptd("run", "--job", third, "--once")
        assert done.returncode != 0
        assert "file system" in done.stderr
        assert not (tmp_path / "nas" / "third" / "_ckptd").exists()


def test_a_commit_that_vanishes_before_the_prune(tmp_path: Path) -> None:
    """A COMMIT deleted behind our back: the permit's fresh read refuses, the save is uploaded again first."""
    with node(tmp_path, local="save_total_limit = 2") as here:
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        (here.nas / "_ckptd" / "commits" / "global_step1~g1~zero.json").unlink()
        here.save(3)
        here.wait("1 gone", lambda: "global_step1" not in here.local_tags(), 60)
        assert "global_step1~g1" in here.commits() or "global_step1~g2" in here.commits()
        line = here.audit()[0]
        assert line["tag"] == "global_step1"


def test_a_remote_that_is_away_at_the_start(tmp_path: Path) -> None:
    """A missing NAS never stops watching: when it appears everything is committed."""
    with node(tmp_path) as here:
        shutil.rmtree(here.nas.parent)
        here.start()
        here.save(1)
        here.wait("said", lambda: here.problems() & {"remote-unreachable", "remote-not-ours"})
        step = next(p["next_step"] for p in here.status()["problems"] if p["code"].startswith("remote-"))
        typed = shlex.split(step.split("`")[1])
        assert typed == ["mkdir", "-p", str(here.nas.parent)], step
        assert here.ckptd("check", str(here.job_file)).returncode == 69
        here.wait("state", lambda: here.status()["state"] in ("behind", "attention"))
        here.nas.mkdir(parents=True)
        here.wait_committed("global_step1~g1", 90)


def test_a_commit_whose_time_is_none_costs_its_age_alone(tmp_path: Path) -> None:
    """It ended the daemon, with all its jobs, and each start after it."""
    with node(tmp_path, remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.stop()
        commit = here.nas / "_ckptd" / "commits" / "global_step1~g1~zero.json"
        document = json.loads(commit.read_bytes())
        commit.write_text(json.dumps(document | {"committed_at": "yesterday"}))
        for path in here.state.glob("journal.db*"):
            path.unlink()
        daemon = here.start()
        here.wait("told", lambda: (here.status()["safe"] or {}).get("committed_at") == "")
        assert here.status()["safe"]["step"] == 1
        assert "on nas, at an unknown time" in here.ckptd("status", here.job_file).stdout
        here.save(2)
        here.wait_committed("global_step2~g1")
        assert daemon.poll() is None
