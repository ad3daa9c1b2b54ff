"""What a person decided outlives everything on the node; what a remote refuses to let go holds nothing up."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.harness import PACE, RUN, Node, made_before, node

pytestmark = [pytest.mark.real, pytest.mark.faults]
RANK1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


real_saves = made_before(RUN)


def decide(here: Node, *words: str) -> None:
    """A verb, done."""
    done = here.ckptd(words[0], here.job_file, *words[1:])
    assert done.returncode == 0, done.stderr


def test_all_four_outlive_the_state_directory(tmp_path: Path) -> None:
    """pin and both kinds of accept with the daemon down, then everything of ckptd's on the node is lost."""
    with node(tmp_path, local="forms = []\nsave_total_limit = 1", remote='forms = ["zero"]') as here:
        for step in (1, 2, 3, 4):
            here.save(step)
        then = time.time() - 3600
        os.utime(here.save_dir / "global_step1" / RANK1, (then, then))
        here.start()
        here.wait_committed("global_step4~g1")
        here.wait("suspect", lambda: "suspect-save" in here.problems())
        assert set(here.commits()) == {"global_step4~g1"}
        here.stop()
        decide(here, "accept", "global_step1")
        decide(here, "accept", "--existing", "global_step1", "global_step2")
        decide(here, "pin", "global_step2")
        shutil.rmtree(here.save_dir / "_ckptd")
        here.start()
        # accepted and adopted: uploaded, then let go; adopted and pinned: uploaded and kept; 3: nobody's word
        for step in (1, 2):
            here.wait_committed(f"global_step{step}~g1", 40)
        kept = {"global_step2", "global_step3", "global_step4"}
        here.wait("the limit", lambda: here.local_tags() == kept, 40)
        here.wait("the pin", lambda: "pinned" in here.checkpoint("global_step2")["keep"])
        why = ["not committed on every required remote", "there before ckptd (ckptd accept --existing)"]
        here.wait("the reasons", lambda: here.checkpoint("global_step3")["keep"] == why)
        left = here.checkpoint("global_step3")
        assert {form["state"] for forms in left["remotes"].values() for form in forms.values()} == {"none"}
        adopts = f"`ckptd accept {here.job_file} --existing` uploads and rotates it"
        assert left["reason"] == f"there before ckptd: not uploaded; {adopts}"
        assert left["next_step"] is None, "it is whole: nothing to remove"
        here.stop()
        decide(here, "pin", "--remove", "global_step2")
        shutil.rmtree(here.save_dir / "_ckptd")
        here.start()
        here.wait("the pin's end", lambda: here.local_tags() == {"global_step3", "global_step4"}, 40)


def test_what_a_remote_refuses_holds_nothing_up(tmp_path: Path) -> None:
    """A rung's form lost an object: that checkpoint stays whole and says why, the next one steps down."""
    rungs = 'keep_last = 1\nladder = [{ after = 1, form = "universal" }]'
    with node(tmp_path, local="save_total_limit = 1", remote=rungs) as here:
        here.start()
        here.save(1)
        here.wait("a universal form", lambda: "global_step1~g1" in here.commits("universal"))
        next((here.nas / "global_step1_universal" / "zero").rglob("fp32.pt")).unlink()
        here.save(2)
        here.wait("the refusal", lambda: "retire-blocked" in here.problems(), 40)
        text = next(p["text"] for p in here.status()["problems"] if p["code"] == "retire-blocked")
        assert "global_step1 (zero) of nas stays" in text
        assert "fp32.pt" in text
        here.wait("another", lambda: "global_step2~g1" in here.commits("universal"))
        here.save(3)
        here.wait_committed("global_step3~g1")
        here.wait("the next to step down", lambda: "global_step2~g1" not in here.commits(), 40)
        assert set(here.commits()) == {"global_step1~g1", "global_step3~g1"}
        assert (here.nas / "global_step1" / RANK1).exists()
        assert here.problems() - PACE == {"retire-blocked"}
