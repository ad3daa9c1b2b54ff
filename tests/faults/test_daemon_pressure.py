"""A disk that fills under the real daemon: what is ours makes room for the trainer, in time (P13)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, made_before, node
from tests.support.real import save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.faults]


real_saves = made_before(RUN)


def size_of_a_save() -> int:
    """Bytes on a disk of 4 KiB blocks."""
    folder = save_dir_of(RUN) / "global_step1"
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A save_dir on a tmpfs that holds nearly six saves, without clones; the journal lies elsewhere."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "nvme"
    place.mkdir()
    size = f"size={int(5.9 * size_of_a_save())}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_the_universal_form_makes_room_before_the_next_save_needs_it(small_disk: Path) -> None:
    """Four saves and a form fill the disk but for most of a save: the form goes, and the fifth save fits."""
    with node(small_disk.parent, local='min_free = "2%"') as here:
        # a journal of such small saves would be as large as they are, and its size is the machine's pace
        here.environment["STATE_DIRECTORY"] = str(here.root / "state")
        here.state = here.root / "state" / "run"
        here.start()
        here.save(1)
        forms = here.save_dir / "_ckptd" / "derived" / "universal"
        here.wait("its pointer", (here.save_dir / "latest_universal").exists)
        here.save(2)
        # a third save beside a conversion would not fit: what it has written counts like the form it replaces
        here.wait("its form", lambda: here.checkpoint("global_step2")["local"]["universal"] == "ready", 60)
        here.save(3)
        here.wait_committed("global_step3~g1", 60)
        assert list(forms.iterdir()), "three saves and a form leave room for the next"
        here.save(4)
        here.wait("the form to go", lambda: not list(forms.iterdir()), 60)
        here.save(5)
        here.wait_committed("global_step5~g1", 60)
        assert not (here.save_dir / "latest_universal").exists()
        assert here.audit("drop-derived")[-1]["reason"] == "disk pressure"
        assert here.local_tags() == {f"global_step{step}" for step in (1, 2, 3, 4, 5)}, "all of them are kept"
        assert sum(path.stat().st_size for path in here.state.rglob("*") if path.is_file()) < 8 << 20
        here.wait("the alarm", lambda: "disk-low" in here.problems(), 60)


@pytest.mark.full
def test_a_shard_that_does_not_come_is_an_alarm_of_the_real_daemon(tmp_path: Path) -> None:
    """Rank 1 hangs in its save: named after ten seconds, and the node that wrote it last time."""
    with node(tmp_path, job='node_name = "node-7"', local="forms = []") as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1", 60)
        here.save(2, shards=2)
        here.wait("the alarm", lambda: "shard-missing" in here.problems(), 40)
        (problem,) = (p for p in here.status()["problems"] if p["code"] == "shard-missing")
        assert "optimizer shard of rank 1" in problem["text"]
        assert "in global_step1 node node-7 wrote it" in problem["text"]
        here.save(2)
        here.wait_committed("global_step2~g1", 60)
        here.wait("its end", lambda: "shard-missing" not in here.problems(), 60)


@pytest.fixture
def whole_disk(tmp_path: Path) -> Iterator[Path]:
    """A save_dir on a tmpfs of 24 MiB, its state in it as by default."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "nvme"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_with_the_journal_on_it_empties_itself(whole_disk: Path) -> None:
    """Not a byte is left when the second save is there: it is committed from the reserve, the first goes."""
    with node(whole_disk.parent, local="save_total_limit = 1\nforms = []", remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1", 60)
        reserve = here.state / "reserve"
        here.wait("the reserve", reserve.exists, 60)
        filler = whole_disk / "filler"
        here.save(2)
        with filler.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
            while True:
                stream.write(b"x" * 4096)
        here.wait_committed("global_step2~g1", 60)
        here.wait("the first to go", lambda: here.local_tags() == {"global_step2"}, 60)
        here.wait("its words", lambda: "disk-full" in here.problems(), 60)
        assert "works from its reserve" in here.ckptd("status", here.job_file).stdout
        assert not reserve.exists()
        assert "Traceback" not in here.log.read_text()
        filler.unlink()
        here.save(3)
        here.wait("another reserve", reserve.exists, 60)
        here.wait("the end of it", lambda: "disk-full" not in here.problems(), 60)


def test_a_daemon_that_starts_on_a_full_disk_is_seen(whole_disk: Path) -> None:
    """The reserve is gone as well: no document can be written there, and status tells what is still."""
    with node(whole_disk.parent, local="forms = []", remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1", 60)
        assert here.stop() == 0
        assert "was stopped" in here.ckptd("status", here.job_file).stdout
        (here.state / "reserve").unlink(missing_ok=True)
        with (
            (whole_disk / "filler").open("wb", buffering=0) as stream,
            pytest.raises(OSError, match="No sp"),
        ):
            while True:
                stream.write(b"x" * 4096)
        daemon = here.start()
        here.wait("the truth", lambda: "tries again" in here.ckptd("status", here.job_file).stdout, 60)
        said = here.ckptd("status", here.job_file).stdout
        assert "stopped" not in said
        assert "SAFE" not in said.splitlines()[0] or "NOT SAFE" in said.splitlines()[0]
        assert daemon.poll() is None
        assert "Traceback" not in here.log.read_text()
