"""A daemon that waits for its first checkpoint is seen: by status and by a probe."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from ckptd.storage.local.state_dir import private_place
from tests.e2e.harness import RUN, made_before, node

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults]


real_saves = made_before(RUN)


def test_before_the_first_checkpoint_status_says_that_it_waits(tmp_path: Path) -> None:
    """Nothing in save_dir (P11), a probe is content, and the place is left clean."""
    with node(tmp_path) as here:
        place = private_place(here.save_dir)
        here.start()
        here.wait("published", (place / "status.json").exists)
        done = here.ckptd("status", here.save_dir)
        assert (done.returncode, "● WAITING  no checkpoint yet" in done.stdout) == (3, True), done.stdout
        assert here.ckptd("status", here.save_dir, "--live").returncode == 0
        done = here.ckptd("drain", here.job_file, "--deadline", "60s")
        assert (done.returncode, "nothing is complete here yet" in done.stdout) == (0, True), done.stderr
        assert list(here.save_dir.iterdir()) == []
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.wait("its own place", lambda: here.status().get("safe"))
        assert not place.exists()
        assert "● SAFE  step 1" in here.ckptd("status", here.save_dir).stdout
        here.kill()
        done = here.ckptd("status", here.save_dir)
        assert (done.returncode, "● NOT WATCHED  the daemon (process" in done.stdout) == (1, True)
        assert here.ckptd("status", here.save_dir, "--live").returncode == 1


def test_a_daemon_that_never_saw_a_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        process = here.start()
        here.wait("published", (private_place(here.save_dir) / "status.json").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
        assert not private_place(here.save_dir).exists()
