"""`status URL`, `check` and `takeover` say whose run a remote holds, and who else writes there (P17)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.model.runs import short
from tests.support.run_scene import Pair, Run, X, Y, pair
from tests.unit.recover.test_recover_commands import ckptd

__all__ = ["pair"]

NEWEST = {"tag": "global_step6", "branch": 1, "step": 6, "written_seconds_ago": 1.0}


def status(pair: Pair) -> tuple[int, dict[str, Any]]:
    done = ckptd("status", pair.x.nas, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_status_of_a_url_is_of_the_newest_run(pair: Pair) -> None:
    """X's step 20 is the highest, and another run's: the job is safe by Y's step 6."""
    pair.x.save(30)
    pair.y.beat(newest=NEWEST)
    code, found = status(pair)
    assert (code, found["verdict"], found["safe"]["step"], found["run_id"]) == (0, "safe", 6, Y)
    assert [(run["run_id"], run["checkpoints"]) for run in found["runs"]] == [(Y, 2), (X, 2)]
    words = ckptd("status", pair.x.nas, COLUMNS="250").stdout
    assert f"earlier run {short(X)} of " in words
    assert f"`ckptd gc JOB --run {short(X)}`" in words


def test_a_second_run_that_lives_is_a_problem(pair: Pair) -> None:
    """Both on one node of one name: each has a heartbeat of its own."""
    pair.y.beat(newest=NEWEST)
    pair.x.beat(newest=NEWEST)
    code, found = status(pair)
    assert code == 1
    assert [node["node"] for node in found["nodes"]] == ["n0"]
    (text,) = found["problems"]
    assert f":{pair.x.save_dir} saves another run ({short(X)}) under this name" in text
    pair.x.beat(ended=True, newest=NEWEST)
    assert status(pair)[0] == 0


def checked(run: Run) -> tuple[int, str]:
    file = run.root / f"{run.name}.toml"
    file.write_text(
        f'name = "run"\nsave_dir = "{run.save_dir}"\n[local]\nmin_free = "0%"\n'
        f'[[remote]]\nname = "nas"\nurl = "{run.nas}"\nsame_filesystem = true\n'
    )
    done = ckptd("check", file, COLUMNS="400")
    return done.returncode, "".join(done.stdout.split())


def test_check_says_who_else_writes_there(pair: Pair, tmp_path: Path) -> None:
    new = Run(tmp_path, name="z")
    pair.y.beat(seconds_ago=30)
    code, said = checked(new)
    assert code == 75, said
    # without blanks: a long path is folded
    assert f"@{pair.y.place['host']}:{pair.y.save_dir}savesrun{short(Y)}to{new.nas}" in said
    assert "aurlofitsown" in said
    assert checked(pair.x)[0] == 75, "it held its own run before"
    assert checked(pair.y)[0] == 0, "that one itself"
    pair.y.beat(seconds_ago=400)
    assert checked(new)[0] == 0


@pytest.mark.parametrize("is_whole", [False, True])
def test_another_node_of_one_job_is_no_second_run(pair: Pair, tmp_path: Path, is_whole: bool) -> None:
    """A node that has not begun: it may be of that run where that saves parts."""
    pair.y.claim(Y, is_whole=is_whole, shards=[(0, 0)], grid=(2, 1, 2))
    pair.y.beat()
    code, said = checked(Run(tmp_path, name="z", node="n1"))
    assert code == (75 if is_whole else 0), said


def test_takeover_goes_on_with_the_newest_run(pair: Pair, tmp_path: Path) -> None:
    new = Run(tmp_path, name="z")
    done = ckptd("takeover", new.save_dir, CKPTD_URL=str(new.nas))
    assert done.returncode == 0, done.stderr
    held = new.held()
    assert held is not None
    assert (held.run_id, held.how, held.known[0][1]) == (Y, "resumed", 2)
    assert f"run {short(Y)} of " in done.stdout
    done = ckptd("takeover", pair.x.save_dir, CKPTD_URL=str(new.nas))
    assert done.returncode == 0, done.stderr
    held = pair.x.held()
    assert held is not None
    assert held.run_id == X, "what lies there is of another run"
    assert f"--run {short(Y)}` brings that one" in done.stdout
