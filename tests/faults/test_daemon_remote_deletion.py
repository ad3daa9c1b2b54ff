"""Remote retention cut short by SIGKILL: the next daemon finishes it, and nothing else goes (P7)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, node
from tests.support.real import prepare

pytestmark = [pytest.mark.real, pytest.mark.faults]


def test_a_retirement_cut_short_is_finished(tmp_path: Path) -> None:
    """A tombstone whose COMMIT and objects are still there (the crash came between) is carried out."""
    prepare([RUN])
    with node(tmp_path, local="save_total_limit = 1", remote='keep_last = 2\nforms = ["zero"]') as here:
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        commit = here.nas / "_ckptd" / "commits" / "global_step1~g1~zero.json"
        kept = {
            p: p.read_bytes()
            for p in [commit, *(here.nas / "_ckptd" / "nodes" / "global_step1~g1~zero").iterdir()]
        }
        shards = {p: p.read_bytes() for p in (here.nas / "global_step1").glob("*.pt")}
        here.save(3)
        here.wait_committed("global_step3~g1")
        here.wait("retired", lambda: "global_step1~g1" not in here.commits())
        here.wait("its objects gone", lambda: not list((here.nas / "global_step1").glob("*.pt")))
        here.kill()
        for path, data in {**kept, **shards}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        here.start()
        here.wait("finished", lambda: not commit.exists() and not any(p.exists() for p in shards))

        assert set(here.commits()) == {"global_step2~g1", "global_step3~g1"}
        assert (here.nas / "latest").read_text() == "global_step3"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_removal_that_cannot_be_finished_holds_no_upload_up(tmp_path: Path) -> None:
    """What the remote does not let go is said with the next step; every later save is committed."""
    prepare([RUN])
    with node(tmp_path, local="save_total_limit = 9", remote='keep_last = 2\nforms = ["zero"]') as here:
        here.start()
        for step in (1, 2):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        stuck = here.nas / "global_step1"
        subprocess.run(["mount", "--bind", stuck, stuck], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", stuck], check=True)
            shutil.rmtree(here.save_dir / "global_step1")
            here.save(3)
            here.wait("the refusal", lambda: "retire-blocked" in here.problems())
            for step in (4, 5, 6, 7):
                here.save(step)
                here.wait_committed(f"global_step{step}~g1")
            assert not {"remote-unreachable", "remote-denied"} & here.problems()
            text = next(p["text"] for p in here.status()["problems"] if p["code"] == "retire-blocked")
            assert "global_step1 (zero) of nas stays" in text
        finally:
            subprocess.run(["umount", "-l", stuck], check=False)
        here.kill()
        here.start()
        here.wait("finished", lambda: not stuck.exists() and "retire-blocked" not in here.problems())
