"""Two runs of one name and URL: real daemons over two directories of one host; a directory begun anew."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import OTHER_RUN, RUN, Node, made_before

pytestmark = [pytest.mark.real, pytest.mark.faults]

real_saves = made_before(RUN, OTHER_RUN)


def two(stack: ExitStack, tmp_path: Path) -> tuple[Node, Node]:
    """Both save to `…/run`, so both jobs are `run`; one directory remote that keeps one checkpoint."""
    nas = tmp_path / "nas"
    nas.mkdir()
    remote = 'same_filesystem = true\nforms = ["zero"]\nkeep_last = 1'
    both = [
        Node(tmp_path / name, local="save_total_limit = 1\nforms = []", remote=remote, url=str(nas))
        for name in ("x", "y")
    ]
    for one in both:
        one.nas = nas
        stack.callback(one.end)
    return both[0], both[1]


def commits(here: Node) -> dict[str, dict[str, Any]]:
    """Stem → COMMIT."""
    found = (here.nas / "_ckptd" / "commits").glob("*.json")
    return {path.stem: json.loads(path.read_text()) for path in found}


def shared(here: Node) -> dict[str, Any]:
    """The problem of that code, or nothing."""
    return next((p for p in here.status().get("problems", ()) if p["code"] == "run-shared"), {})


def test_the_second_run_of_a_name_deletes_nothing_and_is_not_safe(tmp_path: Path) -> None:
    """The first one's only checkpoint was removed by the limit of the second, and both were called SAFE."""
    with ExitStack() as stack:
        x, y = two(stack, tmp_path)
        x.save(1)
        x.start()
        x.wait_committed("global_step1~g1")
        before = commits(x)
        y.save(3, OTHER_RUN)
        y.save(4, OTHER_RUN)
        y.start()
        y.wait("that another run is saved there", lambda: shared(y), 90)
        problem = shared(y)
        assert problem["severity"] == "attention"
        assert f":{x.save_dir} saves another run to nas" in problem["text"]
        assert "url of its own" in problem["next_step"]
        assert commits(x) == before
        assert {"global_step3", "global_step4"} <= y.local_tags()
        first_line = y.ckptd("status", str(y.job_file)).stdout.splitlines()[0]
        assert "NOT SAFE" in first_line
        x.save(2)
        x.wait_committed("global_step2~g1")
        x.wait("the first one is told of the second", lambda: shared(x), 90)
        assert f":{y.save_dir} saves another run" in shared(x)["text"]
        assert "global_step2" in (x.nas / "latest").read_text()
        assert {one["run_id"] for one in commits(x).values()} == {before["global_step1~g1~zero"]["job_id"]}


def test_a_run_that_begins_once_the_first_has_ended_leaves_it_alone(tmp_path: Path) -> None:
    """Its checkpoints stay beyond any limit; the pointers follow the new one; step 1 of both is there."""
    with ExitStack() as stack:
        x, y = two(stack, tmp_path)
        x.save(1)
        x.start()
        x.wait_committed("global_step1~g1")
        assert x.stop() == 0
        y.start()
        y.save(1, OTHER_RUN)
        y.wait_committed("global_step1~g2")
        y.save(2, OTHER_RUN)
        y.wait_committed("global_step2~g1")
        y.wait("its limit", lambda: "global_step1~g2~zero" not in commits(y))
        found = commits(y)
        assert {stem: one["branch"] for stem, one in found.items()} == {
            "global_step1~g1~zero": 1,
            "global_step2~g1~zero": 1,
        }
        assert found["global_step1~g1~zero"]["run_id"] != found["global_step2~g1~zero"]["run_id"]
        assert (y.nas / "latest").read_text() == "global_step2"
        left = [p["text"] for p in y.status()["problems"] if p["code"] == "run-left"]
        assert left
        assert left[0].startswith("nas holds 1 commits")


def test_a_lost_journal_goes_on_with_the_run_and_an_emptied_directory_does_not(tmp_path: Path) -> None:
    with ExitStack() as stack:
        x, _ = two(stack, tmp_path)
        x.save(1)
        x.start()
        x.wait_committed("global_step1~g1")
        x.stop()
        shutil.rmtree(x.save_dir / "_ckptd")
        x.save(2)
        x.start()
        x.wait_committed("global_step2~g1")
        runs = {one["run_id"] for one in commits(x).values()}
        assert len(runs) == 1, "recognised by the bytes of step 1"
        x.stop()
        for tag in ("global_step1", "global_step2"):
            shutil.rmtree(x.save_dir / tag)
        x.save(1, OTHER_RUN)
        x.start()
        x.wait_committed("global_step1~g2")
        assert commits(x)["global_step1~g2~zero"]["run_id"] not in runs


def test_a_copy_of_another_runs_checkpoint_in_an_emptied_directory_begins_a_run(tmp_path: Path) -> None:
    """Life 6000006: it went on with that run, and its limit would have deleted what the other committed."""
    with ExitStack() as stack:
        x, y = two(stack, tmp_path)
        x.save(3)
        x.start()
        x.wait_committed("global_step3~g1")
        assert x.stop() == 0
        y.start()
        y.save(2, OTHER_RUN)
        y.wait_committed("global_step2~g1")
        assert y.stop() == 0
        before = commits(x)
        shutil.rmtree(x.save_dir / "global_step3")
        shutil.copytree(y.save_dir / "global_step2", x.save_dir / "global_step2")
        (x.save_dir / "latest").write_text("global_step2")
        x.start()
        x.wait_committed("global_step2~g2")
        after = commits(x)
        assert after["global_step2~g2~zero"]["run_id"] not in {one["run_id"] for one in before.values()}
        assert {stem: after[stem] for stem in before} == before


def test_a_copied_directory_is_another_place(tmp_path: Path) -> None:
    """`cp -a` brings the node id along: both were one place, let into one remote, and both called safe."""
    with ExitStack() as stack:
        x, y = two(stack, tmp_path)
        x.save(1)
        x.start()
        x.wait_committed("global_step1~g1")
        y.save_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(x.save_dir, y.save_dir, symlinks=True, dirs_exist_ok=True)
        before = commits(x)
        y.save(2, OTHER_RUN)
        y.start()
        end = time.monotonic() + 30
        while len({(one.state / "node_id").read_text() for one in (x, y)}) == 1:
            assert time.monotonic() < end, "one id for two places"
            time.sleep(0.1)
        y.wait("that the original is saved there", lambda: shared(y), 60)
        assert shared(y)["severity"] == "attention"
        assert f":{x.save_dir} saves another run to nas" in shared(y)["text"]
        assert commits(x) == before
        copied = [p["text"] for p in y.status()["problems"] if p["code"] == "run-copied"]
        assert copied, "its first run says so"
        assert "was copied or moved from where run" in copied[0]


def test_a_copy_in_which_another_training_began_is_no_run_of_the_original(tmp_path: Path) -> None:
    """By the journal that came along it went on with that run, and its limit took the original's newest."""
    with ExitStack() as stack:
        x, y = two(stack, tmp_path)
        x.start()
        x.save(2)
        x.wait_committed("global_step2~g1")
        assert x.stop() == 0
        shutil.copytree(x.save_dir, y.save_dir, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(y.save_dir / "global_step2")
        before = commits(x)
        y.save(2, OTHER_RUN)
        y.start()
        y.wait_committed("global_step2~g2")
        y.save(3, OTHER_RUN)
        y.wait_committed("global_step3~g1")
        y.wait("its limit", lambda: "global_step2~g2~zero" not in commits(y))
        found = commits(y)
        assert {stem: found.get(stem) for stem in before} == before
        runs = {one["run_id"] for stem, one in found.items() if stem not in before}
        assert len(runs) == 1
        assert not runs & {one["run_id"] for one in before.values()}
        assert list(y.state.glob("journal.db.aside-*")), "it says what lies where it came from"
