"""A trainer that rotates by itself: what it removes is its right; an alarm only where something is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import RUN, Node, made_before, node
from tests.support.real import save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.faults]
RANK1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


real_saves = made_before(RUN)


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
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]\nbandwidth = "60kB/s"') as here:
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


def test_a_save_dir_that_was_emptied_is_told_of(tmp_path: Path) -> None:
    """By a job that starts anew over it, and by a daemon that does: they wait for no first checkpoint."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        shutil.rmtree(here.save_dir / "global_step1")
        here.wait("vanished", lambda: here.checkpoint("global_step1")["state"] == "vanished")
        here.write_job(local="forms = []", remote='forms = ["zero"]\nbandwidth = "1MB/s"')
        done = here.ckptd("reload", here.job_file)
        assert done.returncode == 0, done.stderr
        here.kill()
        pid = here.start().pid

        def told() -> dict[str, Any]:
            document: dict[str, Any] = json.loads(here.ckptd("status", here.job_file, "--json").stdout)
            return document

        here.wait("the new one", lambda: told()["daemon"]["pid"] == pid)
        here.wait("what is safe", lambda: (told()["jobs"][0]["safe"] or {}).get("step") == 1)
        here.save(2)
        here.wait_committed("global_step2~g1")


def gone_but_safe(here: Node) -> set[str]:
    """Tags that status says were wanted here and are in the remote alone."""
    found = here.status().get("problems", ())
    return {p["text"].split()[0] for p in found if p["code"] == "vanished-kept"}


def test_what_was_wanted_here_is_said_though_the_remote_has_it(tmp_path: Path) -> None:
    """The newest safe one until a newer is safe; a pinned one for longer."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1", 60)
        done = here.ckptd("pin", here.job_file, "global_step1")
        assert done.returncode == 0, done.stderr
        here.save(2)
        here.wait_committed("global_step2~g1", 60)
        here.wait("the pin", lambda: here.checkpoint("global_step1")["pinned"])
        for step in (1, 2):
            shutil.rmtree(here.save_dir / f"global_step{step}")
        here.wait("the alarms", lambda: gone_but_safe(here) == {"global_step1", "global_step2"}, 60)
        assert "here it was kept: " in here.log.read_text()
        here.save(3)
        here.wait_committed("global_step3~g1", 60)
        here.wait("one to stay", lambda: gone_but_safe(here) == {"global_step1"}, 60)
        assert not lost(here)
        here.wait("an alarm, for a pin", lambda: here.status()["state"] == "attention", 90)
        assert here.ckptd("pin", here.job_file, "global_step1", "--remove").returncode == 0
        here.wait("the job to be well: nothing is lost", lambda: here.status()["state"] == "ok", 60)


def test_a_pinned_one_that_is_here_again_is_not_missed(tmp_path: Path) -> None:
    """It was removed and is put back, pinned all the while: that ends what was said of it."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]') as here:
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1", 60)
        done = here.ckptd("pin", here.job_file, "global_step1")
        assert done.returncode == 0, done.stderr
        here.wait("the pin", lambda: here.checkpoint("global_step1")["pinned"])
        folder, aside = here.save_dir / "global_step1", here.root / "aside"
        shutil.copytree(folder, aside)
        shutil.rmtree(folder)
        here.wait("the alarm", lambda: gone_but_safe(here) == {"global_step1"}, 60)
        shutil.copytree(aside, folder)
        here.wait("its end", lambda: not gone_but_safe(here), 60)
        back = here.checkpoint("global_step1")
        assert back["pinned"] and back["local"]["present"]


def test_one_that_vanishes_while_it_is_sent_ends_with_the_file_under_way(tmp_path: Path) -> None:
    """No time is spent on the rest of what can never be whole: the next save goes up at once."""
    with node(tmp_path, local="forms = []", remote='forms = ["zero"]\nbandwidth = "500kB/s"') as here:
        here.start()
        here.save(1)
        here.wait("bytes", lambda: here.checkpoint("global_step1")["remotes"]["nas"]["zero"]["bytes_done"])
        shutil.rmtree(here.save_dir / "global_step1")
        here.wait("the attempt to end", lambda: here.checkpoint("global_step1")["state"] == "vanished", 40)
        sent = sum(p.stat().st_size for p in (here.nas / "global_step1").rglob("*") if p.is_file())
        whole = sum(p.stat().st_size for p in (save_dir_of(RUN) / "global_step1").iterdir())
        assert sent < whole
        assert not here.commits()
        here.save(2)
        here.wait_committed("global_step2~g1", 60)
        assert set(here.commits()) == {"global_step2~g1"}
