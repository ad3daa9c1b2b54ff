"""A trainer that rotates by itself: what it removes is its right; an alarm only where something is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, Node, node
from tests.real import prepare

pytestmark = [pytest.mark.real, pytest.mark.faults]
RANK1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module", autouse=True)
def real_saves() -> None:
    """The training, once."""
    prepare([RUN])


def lost(here: Node) -> set[str]:
    """Tags that status says were removed too early."""
    found = here.status().get("problems", ())
    return {p["text"].split()[0] for p in found if p["code"] == "vanished-uncommitted"}


def test_half_removed_after_its_commit(tmp_path: Path) -> None:
    """Neither torn nor damaged nor a new generation, however long the removal takes."""
    with node(tmp_path, local="") as here:
        here.start()
        here.save(1)
        here.save(2)
        here.wait_committed("global_step1~g1")
        here.wait_committed("global_step2~g1")
        (here.save_dir / "global_step1" / RANK1).unlink()
        here.wait("leftover", lambda: here.checkpoint("global_step1")["state"] == "leftover", 15)
        assert not here.problems()
        shutil.rmtree(here.save_dir / "global_step1")
        here.wait("vanished", lambda: here.checkpoint("global_step1")["state"] == "vanished", 15)
        here.save(3)
        here.wait_committed("global_step3~g1")
        assert not here.problems()
        assert set(here.commits()) == {f"global_step{step}~g1" for step in (1, 2, 3)}


def test_lost_until_a_newer_one_is_safe(tmp_path: Path) -> None:
    """An alarm while nothing newer is safe; for a pinned one it stays."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]\nbandwidth = "250kB/s"') as here:
        here.start()
        here.save(1)
        here.wait("uploading", lambda: here.checkpoint("global_step1")["state"] == "uploading")
        here.save(2)
        here.wait("complete", lambda: here.checkpoint("global_step2")["state"] == "complete")
        done = here.ckptd("pin", here.job_file, "global_step2")
        assert done.returncode == 0, done.stderr
        for step in (1, 2):
            shutil.rmtree(here.save_dir / f"global_step{step}")
        here.wait("the alarms", lambda: lost(here) == {"global_step1", "global_step2"}, 40)
        here.save(3)
        here.wait_committed("global_step3~g1", 60)
        here.wait("one to go", lambda: lost(here) == {"global_step2"}, 20)
        assert here.status()["state"] == "attention"
