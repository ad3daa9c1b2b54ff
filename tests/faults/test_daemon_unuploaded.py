"""`unuploaded` through the real daemon: what goes before its COMMIT, and what audit.jsonl says of it (P1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import RUN, made_before, node

pytestmark = [pytest.mark.real, pytest.mark.faults]
ZERO_ONLY = 'forms = ["zero"]'


real_saves = made_before(RUN)


def test_thin_removes_older_ones_once_a_newer_one_is_committed(tmp_path: Path) -> None:
    """Four wait; the newest goes up first, and those before it are let go unsent."""
    job = 'unuploaded = "thin"\nexisting = "all"'
    with node(tmp_path, job=job, local="save_total_limit = 1\nforms = []", remote=ZERO_ONLY) as here:
        for step in (1, 2, 3, 4):
            here.save(step)
        here.start()
        here.wait("the older ones to go", lambda: here.local_tags() == {"global_step4"}, 60)
        assert set(here.commits()) == {"global_step4~g1"}
        audit = {line["tag"]: line for line in here.audit("prune-unuploaded")}
        assert set(audit) == {"global_step1", "global_step2", "global_step3"}
        for line in audit.values():
            assert line["commits"][0][0] == "_ckptd/commits/global_step4~g1~zero.json"
            assert line["reason"].startswith('unuploaded = "thin"')
            assert line["files"]
        assert not here.audit("prune")
        assert here.status()["opt_outs"][0].startswith('unuploaded = "thin"')
        here.wait("the job to be well", lambda: here.status()["state"] == "ok", 60)


def test_delete_removes_by_the_limit_while_the_remote_is_away(tmp_path: Path) -> None:
    """A NAS that is gone: the newest two stay, nothing is committed, and nothing else is claimed."""
    with node(tmp_path, job='unuploaded = "delete"', local="save_total_limit = 2\nforms = []") as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1", 60)
        here.nas.rename(here.root / "elsewhere")
        for step in (2, 3, 4):
            here.save(step)
        here.wait("the limit", lambda: here.local_tags() == {"global_step3", "global_step4"}, 30)
        audit = {line["tag"]: line for line in here.audit("prune-unuploaded")}
        assert set(audit) == {"global_step1", "global_step2"}
        assert all(line["commits"] == [] for line in audit.values())
        here.wait("to be behind", lambda: here.status()["state"] != "ok", 60)
        here.wait("2 as gone", lambda: here.checkpoint("global_step2").get("state") == "pruned")
        gone = here.checkpoint("global_step2")
        assert gone["reason"] == audit["global_step2"]["reason"]
        assert {form["state"] for form in gone["remotes"]["nas"].values()} == {"none"}, (
            "nothing is to be sent"
        )
