"""Repair and the daemon: what is put back is no new save, and beside a running one remotes are put right."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, Node, made_before, node, shards_in_order

pytestmark = [pytest.mark.real, pytest.mark.faults]
TAG = "global_step1"
LONG_AGO_NS = 10**18


real_saves = made_before(RUN)


def old(here: Node, step: int) -> None:
    """A save of long ago."""
    folder = here.save_dir / here.save(step)
    for path in [*folder.iterdir(), folder]:
        os.utime(path, ns=(LONG_AGO_NS + step, LONG_AGO_NS + step))


def flip(path: Path) -> bytes:
    """One bit turns, nobody was there; the good bytes."""
    good, status, folder = path.read_bytes(), path.stat(), path.parent.stat()
    data = bytearray(good)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(path.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))
    return good


if os.environ.get("CKPTD_FULL"):  # minutes: rest, repair, rest again

    def test_what_is_put_back_is_the_same_save(tmp_path: Path) -> None:
        """No new generation, no torn save; later it is rotated under its old COMMIT."""
        with node(tmp_path, job='existing = "all"') as here:
            old(here, 1)
            assert here.once() == 0
            commits = here.commits()
            shard = shards_in_order(here.save_dir / TAG)[1]
            good = flip(shard)
            done = here.ckptd("verify", here.job_file, "--repair", "--dry-run")
            assert done.returncode == 65, done.stderr
            assert f"planned   here: {TAG}/{shard.name}" in done.stdout
            done = here.ckptd("verify", here.job_file, "--repair")
            assert done.returncode == 0, done.stderr
            assert f"repaired  here: {TAG}/{shard.name}" in done.stdout
            assert shard.read_bytes() == good
            assert [line["tag"] for line in here.audit("repair")] == [TAG]

            here.start()
            here.wait(
                "a turn", lambda: here.checkpoint(TAG)["state"] == "committed" and here.status()["as_of"]
            )
            time.sleep(1.5)  # the settle time and the look after it
            in_remote = flip(here.nas / TAG / shard.name)
            done = here.ckptd("verify", here.job_file, "--repair", "--read-data")
            assert done.returncode == 0, done.stderr
            assert (here.nas / TAG / shard.name).read_bytes() == in_remote
            for step in (2, 3):
                here.save(step)
                here.wait_committed(f"global_step{step}~g1")
            here.wait("the limit", lambda: here.local_tags() == {"global_step2", "global_step3"})
            assert set(here.commits()) == {f"global_step{step}~g1" for step in (1, 2, 3)}
            assert here.commits()[f"{TAG}~g1"] == commits[f"{TAG}~g1"]
            assert not here.problems() & {"torn-save", "prune-blocked", "incomplete-save"}
            assert here.ckptd("verify", here.job_file, "--read-data").returncode == 0

    @pytest.mark.timeout(290)
    def test_the_scrub_of_a_real_daemon(tmp_path: Path) -> None:
        """A bit that turned is a problem with its command; repaired beside the daemon, it clears."""
        with node(tmp_path, job='existing = "all"') as here:
            old(here, 1)
            assert here.once() == 0
            shard = shards_in_order(here.nas / TAG)[1]
            good = flip(shard)
            here.write_job(remote='scrub = "20TB/day"')
            here.start()
            here.wait("said", lambda: "remote-object-damaged" in here.problems(), 60)
            (problem,) = [p for p in here.status()["problems"] if p["code"] == "remote-object-damaged"]
            words = problem["next_step"].split()
            assert words[:2] == ["ckptd", "verify"]
            assert words[2:] == [str(here.job_file), TAG, "--repair", "--read-data"]
            assert shard.name in problem["text"]
            for step in (2, 3, 4):
                here.save(step)
                here.wait_committed(f"global_step{step}~g1")
            kept = {TAG, "global_step3", "global_step4"}
            here.wait("the limit", lambda: here.local_tags() == kept, 60)
            done = here.ckptd("verify", here.job_file, *words[3:])
            assert done.returncode == 0, done.stderr
            assert shard.read_bytes() == good
            here.wait("cleared", lambda: "remote-object-damaged" not in here.problems(), 150)
            here.wait("let go", lambda: TAG not in here.local_tags(), 60)
