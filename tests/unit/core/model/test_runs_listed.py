"""`list`, `restore`, `verify` and `gc --run` where one remote holds the checkpoints of two runs."""

from __future__ import annotations

import json
from typing import Any

from ckptd.core.model.decision import Decision
from ckptd.core.model.runs import short
from tests.support.observing import record
from tests.support.run_scene import Pair, Run, X, Y, pair
from tests.unit.recover.test_recover_commands import ckptd

__all__ = ["pair"]


def listed(pair: Pair, *more: str) -> dict[str, Any]:
    """The one remote of `list --json`."""
    done = ckptd("list", pair.x.nas, "--json", *more)
    assert done.returncode == 0, done.stderr
    (remote,) = json.loads(done.stdout)["remotes"]
    found: dict[str, Any] = remote
    return found


def test_list_says_whose_each_checkpoint_is(pair: Pair) -> None:
    found = listed(pair)
    runs = {row["tag"]: row["run_id"] for row in found["checkpoints"]}
    assert runs == {"global_step4": Y, "global_step6": Y, "global_step10": X, "global_step20": X}
    rows = [
        (r["run_id"], r["is_newest"], r["checkpoints"], r["first_step"], r["last_step"])
        for r in found["runs"]
    ]
    assert rows == [(Y, True, 2, 4, 6), (X, False, 2, 10, 20)]
    assert [row["save_dir"] for row in found["runs"]] == [str(pair.y.save_dir), str(pair.x.save_dir)]
    assert found["latest"] == "global_step6", "of the newest run"
    table = ckptd("list", pair.x.nas, COLUMNS="200").stdout
    assert f"{pair.x.place['user']}@{pair.x.place['host']}:{pair.x.save_dir}" in table
    assert short(X) in table
    assert {row["tag"] for row in listed(pair, "--run", "aaaa")["checkpoints"]} == {
        "global_step10",
        "global_step20",
    }
    assert ckptd("list", pair.x.nas, "--run", "ffff").returncode == 66


def test_a_remote_with_one_run_is_listed_as_ever(tmp_path: Any) -> None:
    x = Run(tmp_path)
    x.claim(X)
    x.commit(x.save(5), 5)
    shown = ckptd("list", x.nas, COLUMNS="200").stdout
    assert "global_step5" in shown
    assert "runs" not in shown.splitlines()
    assert X not in shown


def test_restore_takes_the_newest_run_or_the_jobs_own(pair: Pair) -> None:
    done = ckptd("restore", pair.x.nas, "--to", pair.x.root / "a")
    assert (done.returncode, done.stdout) == (0, f"{pair.x.root}/a/global_step6\n"), done.stderr
    assert f"run {short(X)} of " in done.stderr
    done = ckptd("restore", pair.x.save_dir, "--to", pair.x.root / "b", CKPTD_URL=str(pair.x.nas))
    assert (done.returncode, done.stdout) == (0, f"{pair.x.root}/b/global_step20\n"), done.stderr
    done = ckptd("restore", pair.x.nas, "--run", short(X), "--to", pair.x.root / "c")
    assert (done.returncode, done.stdout) == (0, f"{pair.x.root}/c/global_step20\n"), done.stderr


def test_restore_of_a_tag_that_another_run_has(pair: Pair) -> None:
    done = ckptd("restore", pair.x.nas, "global_step20", "--to", pair.x.root / "a")
    assert done.returncode == 66
    assert f":{pair.x.save_dir} has one: --run {short(X)}" in done.stderr
    pair.y.commit(pair.y.save(20), 20, generation=2)
    done = ckptd("restore", pair.x.nas, "global_step20", "--to", pair.x.root / "a")
    assert done.returncode == 0, done.stderr
    got = {p.name: p.read_bytes() for p in (pair.x.root / "a" / "global_step20").iterdir()}
    assert got == pair.y.shards("global_step20")
    done = ckptd("restore", pair.x.nas, "global_step20", "--to", pair.x.root / "b", "--run", X)
    assert done.returncode == 0, done.stderr
    got = {p.name: p.read_bytes() for p in (pair.x.root / "b" / "global_step20").iterdir()}
    assert got == pair.x.shards("global_step20")


def test_verify_is_of_all_runs_or_of_one(pair: Pair) -> None:
    for path in (pair.x.nas / "global_step10").glob("*optim*"):
        path.write_bytes(b"rot")
    assert ckptd("verify", pair.x.nas).returncode == 65
    assert ckptd("verify", pair.x.nas, "--run", short(Y)).returncode == 0
    done = ckptd("verify", pair.x.nas, "--run", short(X), "--json")
    assert done.returncode == 65
    (remote,) = json.loads(done.stdout)["remotes"]
    assert [(row["tag"], row["run_id"], row["verdict"]) for row in remote["commits"]] == [
        ("global_step10", X, "damaged"),
        ("global_step20", X, "good"),
    ]
    assert ckptd("verify", pair.x.nas, "--run", "ffff").returncode == 66
    assert ckptd("verify", pair.x.save_dir, "--run", X, "--repair").returncode == 2


def test_an_earlier_run_is_removed_by_name(pair: Pair) -> None:
    """Its newest goes too; the other run keeps every byte, and what is pinned stays."""
    ours = {p: p.read_bytes() for tag in (4, 6) for p in (pair.x.nas / f"global_step{tag}").rglob("*.*")}
    done = ckptd("gc", pair.y.save_dir, "--run", "aaaa", "--dry-run", CKPTD_URL=str(pair.y.nas))
    assert done.returncode == 0, done.stderr
    assert "would remove" in done.stdout
    assert listed(pair)["runs"][1]["checkpoints"] == 2
    record(pair.y.ground().store, Decision(kind="pin", tag="global_step10"))
    done = ckptd("gc", pair.y.save_dir, "--run", "aaaa", CKPTD_URL=str(pair.y.nas))
    assert done.returncode == 0, done.stderr
    assert "global_step10 is pinned" in done.stderr
    found = listed(pair)
    assert {row["tag"] for row in found["checkpoints"]} == {"global_step4", "global_step6", "global_step10"}
    assert not (pair.x.nas / "global_step20").exists() or not any((pair.x.nas / "global_step20").iterdir())
    assert found["latest"] == "global_step6"
    assert ours == {p: p.read_bytes() for p in ours}
    assert ckptd("verify", pair.y.nas, "--read-data").returncode == 0
    audit = (pair.y.save_dir / "_ckptd" / "state" / "audit.jsonl").read_text()
    assert "its run was removed by a person" in audit
    assert "global_step20" in audit


def test_a_run_that_goes_on_is_not_removed(pair: Pair) -> None:
    """The newest of the remote, the one that save_dir holds, and one whose daemon was heard of."""
    before = {row["tag"] for row in listed(pair)["checkpoints"]}
    url = {"CKPTD_URL": str(pair.x.nas)}
    done = ckptd("gc", pair.x.nas, "--run", short(Y))
    assert done.returncode == 65
    assert "is the newest in" in done.stderr
    done = ckptd("gc", pair.x.save_dir, "--run", short(X), **url)
    assert done.returncode == 65
    assert f"{pair.x.save_dir} holds run {short(X)}" in done.stderr
    pair.x.beat(seconds_ago=200)
    done = ckptd("gc", pair.x.nas, "--run", short(X))
    assert done.returncode == 75
    assert "is saved now, by node n0" in done.stderr
    pair.x.beat(ended=True)
    assert {row["tag"] for row in listed(pair)["checkpoints"]} == before
    assert ckptd("gc", pair.x.nas, "--run", short(X)).returncode == 0
    assert {row["run_id"] for row in listed(pair)["checkpoints"]} == {Y}
