"""`ckptd resume` with two runs of one name in one remote: each resumes from its own (P6, P9)."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from ckptd.core.model.runs import short
from ckptd.errors import LockHeld, NotFoundError, NothingCommitted, RefusedError, UsageError
from ckptd.recover.select.copies import Nodes
from tests.support.recover_scene import Scene
from tests.support.run_scene import Pair, Run, X, Y, pair
from tests.unit.recover.test_recover_commands import ckptd

__all__ = ["pair"]


def emptied(run: Run) -> None:
    """All that lay in save_dir is gone, but not the directory."""
    for path in run.save_dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_each_resumes_from_its_own(pair: Pair) -> None:
    """X's newest step is the higher one in neither order: Y's row is newer, its steps are lower."""
    assert pair.x.resume().path.name == "global_step20"
    assert pair.y.resume().path.name == "global_step6"
    assert not pair.x.said
    assert not pair.y.said
    pair.x.save(30)
    assert pair.x.resume().path.name == "global_step30", "its own, which is not committed yet"


def test_what_its_trainer_rotated_away_comes_back_from_its_own_run(pair: Pair) -> None:
    before = pair.x.shards("global_step20")
    for tag in ("global_step10", "global_step20"):
        shutil.rmtree(pair.x.save_dir / tag)
    assert pair.x.resume().path.name == "global_step20"
    assert pair.x.shards("global_step20") == before
    held = pair.x.held()
    assert held is not None
    assert (held.run_id, held.how, [number for _, number in held.known]) == (X, "resumed", [2])


def test_an_empty_place_takes_the_newest_run_and_says_whose_it_is(pair: Pair, tmp_path: Path) -> None:
    """A wiped node: nothing here says which run it had."""
    emptied(pair.y)
    shards = {p.name: p.read_bytes() for p in (pair.y.nas / "global_step6").iterdir() if p.suffix == ".pt"}
    assert pair.y.resume().path.name == "global_step6"
    assert pair.y.shards("global_step6") == shards
    new = Run(tmp_path, name="moved")
    assert new.resume().path.name == "global_step6"
    assert f"run {short(Y)} of {pair.y.held() and pair.y.place['user']}" in new.said[0]
    assert str(pair.y.save_dir) in new.said[0]
    held = new.held()
    assert held is not None
    assert (held.run_id, held.how) == (Y, "resumed")
    assert new.resume().path.name == "global_step6", "from now on it is its own"


def test_what_lies_here_without_a_word_is_recognised_by_its_bytes(pair: Pair) -> None:
    """`cp -a` to another node, or a release that wrote no run.json."""
    copy = Run(pair.x.root, name="copy")
    shutil.rmtree(copy.save_dir)
    shutil.copytree(pair.x.save_dir, copy.save_dir)
    shutil.rmtree(copy.save_dir / "global_step20")
    assert copy.held() is None, "run.json is of the directory that was copied"
    assert copy.resume().path.name == "global_step20"
    held = copy.held()
    assert held is not None
    assert held.run_id == X


def test_what_no_run_committed_is_a_run_of_its_own(pair: Pair, tmp_path: Path) -> None:
    """A third training that nobody watched: the newer checkpoints of the others are not put over its own."""
    new = Run(tmp_path, name="z")
    new.save(3)
    assert new.resume().path.name == "global_step3"
    assert "is of no run in the remotes" in new.said[0]
    assert f"--run {short(X)}" in new.said[0]
    assert new.held() is None


def test_an_own_run_without_a_commit_starts_fresh_and_says_what_others_hold(
    pair: Pair, tmp_path: Path
) -> None:
    new = Run(tmp_path, name="z")
    new.hold("cccc" * 8)
    done = ckptd("resume", new.save_dir, new.nas, CKPTD_MIN_FREE="0%")
    assert (done.returncode, done.stdout) == (4, "")
    assert f"run {short(X)} of " in done.stderr
    assert f":{pair.x.save_dir} holds 2 checkpoints there (--run {short(X)})" in done.stderr
    with pytest.raises(NothingCommitted, match=f"run {short('cccc' * 8)}"):
        new.resume()


def test_another_run_is_taken_by_name_and_what_lay_here_goes_aside(pair: Pair) -> None:
    done = ckptd("resume", pair.x.save_dir, pair.x.nas, "--run", short(Y), CKPTD_MIN_FREE="0%")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{pair.x.save_dir}/global_step6\n"
    assert pair.x.aside() == ["global_step10.1", "global_step20.1"]
    assert pair.x.shards("global_step6") == pair.y.shards("global_step6")
    held = pair.x.held()
    assert held is not None
    assert (held.run_id, held.how) == (Y, "resumed")
    assert pair.x.resume().path.name == "global_step6"


def test_the_same_tag_of_another_run_is_another_checkpoint(pair: Pair) -> None:
    pair.y.commit(pair.y.save(20), 20, generation=2)
    assert pair.x.resume(run=Y).path.name == "global_step20"
    assert pair.x.shards("global_step20") == pair.y.shards("global_step20")
    assert "global_step20.1" in pair.x.aside()


def test_a_run_is_named_by_the_beginning_of_its_id(pair: Pair, tmp_path: Path) -> None:
    new = Run(tmp_path, name="z")
    assert new.resume(run="aaaa", dry_run=True).path.name == "global_step20"
    with pytest.raises(NotFoundError, match="no run 'ffff'"):
        new.resume(run="ffff")
    pair.x.claim("aaaa3333" * 4)
    with pytest.raises(UsageError, match="2 runs begin so"):
        new.resume(run="aaaa")
    assert new.resume(run=X, dry_run=True).path.name == "global_step20"


def test_another_world_size_is_the_same_run(pair: Pair) -> None:
    done = pair.x.resume(world_size=4)
    assert str(done.path).endswith("derived/universal/global_step20")
    held = pair.x.held()
    assert held is not None
    assert held.run_id == X


def test_a_remote_of_an_older_release_is_one_run(tmp_path: Path) -> None:
    """No rows and no ids: what was committed is the save_dir's, and what lies here is newer than it."""
    old = Scene(tmp_path)
    old.commit(old.save(5), 5)
    old.save(8)
    shutil.rmtree(old.save_dir / "global_step5")
    assert old.resume().path.name == "global_step8"
    old.lose_node()
    assert old.resume().path.name == "global_step5"
    assert not any("run" in line.split() for line in old.said)


# --- another place that lives ----------------------------------------------------------------------------


def test_a_live_place_is_not_resumed_beside(pair: Pair, tmp_path: Path) -> None:
    """Y's daemon beats: its newest checkpoint is no start for a run elsewhere."""
    new = Run(tmp_path, name="z")
    pair.y.beat(seconds_ago=30)
    ends = time.monotonic() + 60

    def beat() -> None:
        time.sleep(4)
        pair.y.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(LockHeld, match="heard of just now") as refused:
        new.resume()
    thread.join()
    assert time.monotonic() < ends
    assert f"--run {short(Y)}` insists" in refused.value.hint
    assert "waiting up to" in new.said[0]
    assert str(pair.y.save_dir) in new.said[0]
    assert new.resume(run=Y).path.name == "global_step6"


def test_a_place_that_falls_silent_is_taken_over(pair: Pair, tmp_path: Path) -> None:
    """What it committed while it was waited for counts."""
    new = Run(tmp_path, name="z")
    pair.y.beat(seconds_ago=175)
    pair.y.save(8)

    def commit() -> None:
        time.sleep(1)
        pair.y.commit("global_step8", 8)

    thread = threading.Thread(target=commit)
    thread.start()
    began = time.monotonic()
    done = new.resume()
    thread.join()
    assert done.path.name == "global_step8"
    assert 4 < time.monotonic() - began < 60


@pytest.mark.parametrize("state", ["ended", "silent", "its own"])
def test_nothing_is_waited_for(pair: Pair, tmp_path: Path, state: str) -> None:
    new = pair.y if state == "its own" else Run(tmp_path, name="z")
    pair.y.beat(seconds_ago=200 if state == "silent" else 10, ended=state == "ended")
    began = time.monotonic()
    assert new.resume().path.name == "global_step6"
    assert time.monotonic() - began < 10
    assert not any("waiting" in line for line in new.said)


def test_the_same_path_on_another_host_is_a_job_that_moved(pair: Pair, tmp_path: Path) -> None:
    new = Run(tmp_path, name="z")
    pair.y.claim(Y, host="far", save_dir=str(new.save_dir))
    pair.y.beat(host="far", save_dir=str(new.save_dir))
    assert new.resume().path.name == "global_step6"
    assert "@far:" in new.said[0]


# --- several nodes ---------------------------------------------------------------------------------------


def test_several_nodes_take_one_run_or_none(pair: Pair, tmp_path: Path) -> None:
    """A node that holds X and an emptied one would load shards of two models together."""
    nodes = Nodes(count=2, rank=0)
    assert Run(tmp_path, name="z").resume(nodes=nodes).path.name == "global_step6"
    with pytest.raises(RefusedError, match=f"this node holds run {short(X)}") as refused:
        pair.x.resume(nodes=nodes)
    assert f"--run {short(X)}" in refused.value.hint
    assert pair.x.resume(nodes=nodes, run=X).path.name == "global_step20"


def test_parts_that_live_are_no_other_place(pair: Pair, tmp_path: Path) -> None:
    """The other node of the job goes on beating while this one, emptied, is resumed."""
    part = {"is_whole": False, "shards": [(0, 0)], "grid": (2, 1, 2)}
    pair.y.claim(Y, **part)
    pair.y.beat()
    new = Run(tmp_path, name="z")
    assert new.resume(nodes=Nodes(count=2, rank=1)).path.name == "global_step6"
    assert os.listdir(new.save_dir / "_ckptd")
