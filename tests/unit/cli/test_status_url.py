"""`ckptd status URL`: the whole job from its remote, in words, in JSON and as an exit code (P17)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.core.model.heartbeat import Heartbeat, NewestSave, SafeSave, heartbeat_key
from ckptd.core.model.layouts import Grid
from ckptd.core.model.manifest import sha256_of, to_bytes
from ckptd.maintenance.status.fleet import FleetReader, FleetStatus
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.storage.stores.directory import DirectoryStore
from tests.stores.scene import Node, archive

if TYPE_CHECKING:
    from pathlib import Path

NODES = 4


def beat(node: int, *, step: int = 5, seconds_at_risk: float = 660, digest: str = "c") -> Heartbeat:
    name = f"n{node}"
    return Heartbeat(
        job_id="j" * 32,
        job="job",
        node=name,
        node_id=f"id-{name}",
        config_digest=digest,
        ckptd_version="1",
        as_of="2020-01-01T00:00:00Z",
        state="ok",
        ranks=(node,),
        newest=NewestSave(tag=f"global_step{step}", branch=0, step=step, written_seconds_ago=1),
        safe=SafeSave(tag="global_step5", branch=0, step=5, seconds_at_risk=seconds_at_risk),
    )


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    """A job of four nodes with one rank each: global_step5 is committed by all of them."""
    root = tmp_path / "nas"
    root.mkdir()
    store = DirectoryStore(str(root), owner="t")
    for number in range(NODES):
        upload(store, tmp_path, number)
        store.put(heartbeat_key(f"n{number}"), to_bytes(beat(number)))
    return root


def upload(
    store: DirectoryStore,
    tmp_path: Path,
    number: int,
    tag: str = "global_step5",
    step: int = 5,
    branch: int = 0,
    at_seconds: int = 0,
) -> None:
    """Node `number` ships its shard of a save of four ranks; node 0 the model states too."""
    node = Node(tmp_path / f"save{number}", name=f"n{number}", dp=NODES, tag=tag)
    node.write_all()
    for path in (node.save_dir / tag).iterdir():
        if f"rank_{number}_" not in path.name and not (number == 0 and path.name.startswith("mp_rank")):
            path.unlink()
    save = node.sealed(step=step, branch=branch, seconds=at_seconds)
    node.upload(node.attached(store), node.order(save))


def put(nas: Path, heartbeat: Heartbeat, seconds_ago: float = 0.0) -> None:
    """A heartbeat as the store has it since so long."""
    key = heartbeat_key(heartbeat.node)
    DirectoryStore(str(nas), owner="t").put(key, to_bytes(heartbeat))
    at = time.time() - seconds_ago
    os.utime(nas / key, (at, at))


def aged(nas: Path, seconds: float, below: str = "") -> None:
    """All documents but heartbeats, or those in a folder, lie there since so long."""
    at = time.time() - seconds
    for path in (nas / "_ckptd" / below).rglob("*.json"):
        if path.parent.name != "heartbeats":
            os.utime(path, (at, at))


def looked(nas: Path) -> FleetStatus:
    """What is printed, as data."""
    return FleetReader(read_remote_inventory("nas", str(nas), None)).read()


def status(nas: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptd", "status", str(nas), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"COLUMNS": "250"},
    )


def document(nas: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status(nas, "--json").stdout)
    return found


def test_a_safe_job_is_said_in_one_line(nas: Path) -> None:
    done = status(nas)
    first = done.stdout.splitlines()[0]
    assert done.returncode == 0, done.stdout + done.stderr
    assert first.startswith("job  ● SAFE  step 5 committed ")
    assert " · 4/4 nodes · 11 min of training at risk" in first
    assert all(f"n{number} " in done.stdout for number in range(NODES))


def test_ages_are_durations_whatever_the_nodes_clocks_say(nas: Path) -> None:
    """Heartbeats of nodes whose clocks stand years back (`as_of`): nobody is dead."""
    found = document(nas)
    assert all(not node["is_dead"] and node["heard_seconds_ago"] < 300 for node in found["nodes"])
    assert 660 <= found["seconds_at_risk"] < 960


def test_a_dead_node_is_named(nas: Path) -> None:
    put(nas, beat(3), seconds_ago=14 * 60)
    done = status(nas)
    assert done.returncode == 1
    assert "node n3 has not been heard of for 14 min" in done.stdout
    assert "3/4 nodes" in done.stdout.splitlines()[0]


def test_a_save_that_lacks_a_nodes_part_is_behind_and_says_whose(nas: Path, tmp_path: Path) -> None:
    store = DirectoryStore(str(nas), owner="t")
    for number in range(3):
        upload(store, tmp_path, number, tag="global_step9", step=9)
        put(nas, beat(number, step=9))
    found = document(nas)
    assert (found["verdict"], found["newest_step"]) == ("behind", 9)
    (row,) = found["uncommitted"]
    assert (row["tag"], row["missing"], row["nodes"]) == ("global_step9", 1, ["n0", "n1", "n2"])
    assert status(nas).returncode == 3
    put(nas, beat(3), seconds_ago=14 * 60)
    for path in (nas / "_ckptd" / "nodes").rglob("*.json"):
        os.utime(path, (time.time() - 600, time.time() - 600))
    done = status(nas)
    assert done.returncode == 1
    assert "global_step9 is not committed: missing rank 3 (last seen on n3, 14 min ago)" in done.stdout


@pytest.mark.parametrize("are_times_named", [True, False], ids=["named", "of an early release"])
def test_after_a_rewind_the_new_branch_is_told(nas: Path, tmp_path: Path, are_times_named: bool) -> None:
    """30, 40 and 50 never became whole; the run went back to 5 and saved 8, which lacks rank 3."""
    store = DirectoryStore(str(nas), owner="t")
    for at, (step, branch) in enumerate(((30, 0), (40, 0), (50, 0), (8, 1))):
        for number in range(3):
            # of a node that was replaced and knows of no rewind
            known = 0 if number == 2 else branch
            at_seconds = 100 * at if are_times_named else 0
            upload(store, tmp_path, number, f"global_step{step}", step, known, at_seconds)
    aged(nas, 600)
    if not are_times_named:
        # then the store's times tell what came last
        aged(nas, 500, "nodes/global_step8~g1~zero")
    for number in range(3):
        newest = NewestSave(tag="global_step8", branch=1, step=8, written_seconds_ago=1)
        put(nas, beat(number).model_copy(update={"newest": newest}))
    for seconds_ago in (14 * 60, 0):
        # dead, or alive with nothing but what it had before the rewind
        put(nas, beat(3, step=50), seconds_ago)
        found = looked(nas)
        assert "step 8 is not committed yet" in found.headline
        assert found.newest_step == 8
        assert [(row.tag, row.branch) for row in found.uncommitted] == [("global_step8", 1)]
        told = " ".join(found.problems)
        assert "global_step8 is not committed: missing rank 3 (last seen on n3, " in told
        assert not any(f"global_step{step}" in told for step in (30, 40, 50))


# --- the end ---------------------------------------------------------------------------------------------

DAYS = 3 * 86_400


def ended(number: int, **more: Any) -> Heartbeat:
    """A node's last heartbeat."""
    return beat(number, **more).model_copy(update={"ended": True})


def test_a_job_that_ended_in_order_stays_safe(nas: Path) -> None:
    aged(nas, DAYS + 60)
    for number in range(NODES):
        put(nas, ended(number), seconds_ago=DAYS + number)
    done = status(nas)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0].rstrip() == "job  ● SAFE  ended 3 d ago · newest step 5 committed"
    assert "dead?" not in done.stdout
    found = looked(nas)
    assert (found.problems, found.seconds_at_risk) == ((), 660)
    assert found.ended_seconds_ago == pytest.approx(DAYS, abs=200)
    assert {node.state for node in found.nodes} == {"ended"}


def test_the_end_of_a_job_whose_last_save_is_not_committed(nas: Path) -> None:
    aged(nas, DAYS + 60)
    for number in range(NODES):
        put(nas, ended(number, step=9 if number else 5), seconds_ago=DAYS)
    found = looked(nas)
    assert found.exit_code == 3
    assert found.headline == (
        "BEHIND: ended 3 d ago, step 9 is not committed, step 5 is, 11 min of training at risk"
    )


def test_a_part_of_a_node_that_has_ended_is_on_no_way(nas: Path, tmp_path: Path) -> None:
    store = DirectoryStore(str(nas), owner="t")
    for number in range(3):
        upload(store, tmp_path, number, tag="global_step9", step=9)
    aged(nas, 600)
    for number in range(NODES):
        put(nas, beat(number, step=9))
    assert looked(nas).exit_code == 3
    for number in range(NODES):
        put(nas, ended(number, step=9))
    found = looked(nas)
    assert found.exit_code == 1
    assert "global_step9 is not committed: missing rank 3 (last seen on n3" in found.problems[0]


def test_one_node_that_ended_or_died_is_not_the_job(nas: Path) -> None:
    put(nas, ended(3), seconds_ago=DAYS)
    found = looked(nas)
    assert (found.exit_code, found.ended_seconds_ago) == (0, None)
    assert found.headline.startswith("SAFE: step 5 committed ")
    assert found.headline.endswith(", 3/4 nodes, 11 min of training at risk")
    for number in range(NODES):
        put(nas, beat(3) if number == 3 else ended(number), seconds_ago=DAYS)
    found = looked(nas)
    assert (found.exit_code, found.problems) == (1, ("node n3 has not been heard of for 3 d",))


# --- who is ahead of what is safe ------------------------------------------------------------------------


def named(name: str, step: int, **more: Any) -> Heartbeat:
    """Of a node of another allocation."""
    return beat(0, step=step).model_copy(update={"node": name, "node_id": f"id-{name}", **more})


def test_new_nodes_that_died_with_what_is_not_committed_are_named(nas: Path) -> None:
    """The first allocation ended in order; the second trained on, committed nothing, and lost power."""
    aged(nas, DAYS + 60)
    for number in range(NODES):
        put(nas, ended(number), seconds_ago=DAYS)
    for seconds_ago in (60, 400):
        for name in ("spot-a", "spot-b"):
            put(nas, named(name, 900), seconds_ago)
        found = looked(nas)
        assert found.headline.startswith("BEHIND: step 5 committed 3 d ago, ")
        assert "step 900 is not committed yet" in found.headline
        assert (found.verdict, found.newest_step, found.ended_seconds_ago) == ("behind", 900, None)
        assert {row.node for row in found.nodes} >= {"spot-a", "spot-b"}
        assert found.exit_code == (3 if seconds_ago == 60 else 1)
    assert looked(nas).problems[0] == (
        "node spot-a has not been heard of for 7 min; its newest save, step 900, is not committed: "
        "start ckptd there again, else the run goes back"
    )
    assert status(nas).returncode == 1


def test_nodes_that_died_ahead_of_what_they_committed(nas: Path) -> None:
    """A node says once a minute what it has: the COMMIT may be younger than its last word."""
    for committed_seconds in (3600, 390, 0):
        aged(nas, committed_seconds)
        for number in range(NODES):
            put(nas, beat(number, step=9), seconds_ago=400)
        found = looked(nas)
        assert (found.verdict, found.exit_code, found.newest_step) == ("behind", 1, 9)
        assert all("step 9, is not committed" in text for text in found.problems)


@pytest.mark.parametrize("sent", [False, True], ids=["nothing sent", "parts sent"])
def test_who_left_before_the_run_went_on_from_an_older_save(nas: Path, tmp_path: Path, sent: bool) -> None:
    """Drained out at 50, which is not committed; others went on from 5, and all of theirs is."""
    store = DirectoryStore(str(nas), owner="t")
    if sent:
        for number in range(3):
            upload(store, tmp_path, number, tag="global_step50", step=50)
    aged(nas, 7200)
    for number in range(NODES):
        put(nas, ended(number, step=50), seconds_ago=7000)
    assert looked(nas).verdict == "behind"
    for number in range(NODES):
        node = Node(tmp_path / f"new{number}", name=f"m{number}", dp=NODES, tag="global_step8")
        node.write_all()
        for path in (node.save_dir / "global_step8").iterdir():
            if f"rank_{number}_" not in path.name and not (number == 0 and "model_states" in path.name):
                path.unlink()
        node.upload(node.attached(store), node.order(node.sealed(step=8, branch=0, seconds=5000)))
        put(nas, named(f"m{number}", 8, ranks=(number,)), seconds_ago=10)
    found = looked(nas)
    assert found.headline.startswith("SAFE: step 8 committed "), found.headline
    assert (found.exit_code, found.problems, found.uncommitted, found.newest_step) == (0, (), (), 8)
    assert [row.node for row in found.nodes] == [f"m{number}" for number in range(NODES)]
    # one that still has it is waited for
    put(nas, beat(2, step=50), seconds_ago=10)
    found = looked(nas)
    assert (found.verdict, found.newest_step) == ("behind", 50)
    assert [row.tag for row in found.uncommitted] == ["global_step50"] * sent


def cells_beat(name: str, *cells: tuple[int, int], step: int, last: int = 0) -> Heartbeat:
    """As nodes say it today."""
    newest = NewestSave(
        tag=f"global_step{step}", branch=0, step=step, written_seconds_ago=1, last_seconds=last
    )
    ranks = tuple(sorted({d for d, _ in cells}))
    update = {"node": name, "node_id": f"id-{name}", "ranks": ranks, "shards": cells, "newest": newest}
    return beat(0).model_copy(update=update)


def ship_cells(
    nas: Path, tmp_path: Path, name: str, *cells: tuple[int, int], generation: int = 1, last: int = 0
) -> None:
    """A node's part of global_step9, of two stages of two ranks; by the store's time ten minutes ago."""
    store = DirectoryStore(str(nas), owner="t")
    node = Node(tmp_path / f"{name}-{generation}", name=name, dp=2, tag="global_step9")
    names = [f"bf16_zero_pp_rank_{d}_mp_rank_{mm:02d}_optim_states.pt" for d, mm in cells]
    names += [f"mp_rank_{mm:02d}_model_states.pt" for d, mm in cells if d == 0]
    node.write({n: archive(f"{n} {generation}".encode() * 50) for n in names})
    grid = Grid(dp=2, mm_count=2, tp=1, pp=2, zero_stage=1)
    save = node.sealed(step=9, seconds=last).model_copy(update={"grid": grid})
    assert node.upload(node.attached(store), node.order(save, generation=generation)).outcome == "waiting"
    for path in (nas / "_ckptd" / "nodes").rglob("*.json"):
        os.utime(path, (time.time() - 600, time.time() - 600))


def test_a_dead_pipeline_node_is_named(nas: Path, tmp_path: Path) -> None:
    """A live node of the other stage has the same data-parallel ranks."""
    ship_cells(nas, tmp_path, "n0", (0, 0), (1, 0))
    put(nas, cells_beat("n0", (0, 0), (1, 0), step=9))
    put(nas, cells_beat("n1", (0, 1), (1, 1), step=5), seconds_ago=14 * 60)
    done = status(nas)
    assert done.returncode == 1
    assert "missing ranks 0-1 of mp_rank 1 (last seen on n1, 14 min ago)" in done.stdout


def test_two_attempts_at_one_tag_are_named_until_the_second_is_on_its_way(nas: Path, tmp_path: Path) -> None:
    """Both nodes live; none sends anything more, until n0 saves again as n1 did."""
    ship_cells(nas, tmp_path, "n0", (0, 0), (1, 0), last=1000)
    ship_cells(nas, tmp_path, "n1", (0, 1), (1, 1), generation=2, last=5000)
    put(nas, cells_beat("n0", (0, 0), (1, 0), step=9, last=1000))
    put(nas, cells_beat("n1", (0, 1), (1, 1), step=9, last=5000))
    done = status(nas)
    assert done.returncode == 1
    said = "global_step9 (generation {}) is not committed: missing ranks 0-1 of mp_rank {} (last seen on {}, "
    again = "node {} uploaded another save of this tag, as generation {}; save again"
    for words in (
        said.format(1, 1, "n1"),
        said.format(2, 0, "n0"),
        again.format("n1", 2),
        again.format("n0", 1),
    ):
        assert words in " ".join(done.stdout.split())
    put(nas, cells_beat("n0", (0, 0), (1, 0), step=9, last=5001))
    found = document(nas)
    assert found["verdict"] == "behind" and not any("save again" in text for text in found["problems"])
    assert [row["text"] for row in found["uncommitted"]] == [
        "3 shards are on their way",
        "saved again, as generation 2",
    ]


def test_a_node_that_was_replaced_is_missed_until_the_next_commit(nas: Path) -> None:
    put(nas, beat(3), seconds_ago=3600)
    put(nas, beat(3).model_copy(update={"node": "spare", "node_id": "id-spare"}))
    found = document(nas)
    assert (found["nodes_alive"], found["nodes_expected"]) == (4, 5)


def test_what_a_node_found_damaged_is_named(nas: Path) -> None:
    (commit,) = (nas / "_ckptd" / "commits").iterdir()
    put(nas, beat(2).model_copy(update={"damaged": (sha256_of(commit.read_bytes()), "f" * 64)}))
    (text,) = looked(nas).problems
    assert text.startswith("n2 found global_step5 (zero) damaged here: `ckptd verify ")
    put(nas, beat(2))
    assert looked(nas).problems == ()


def test_another_configuration_is_named(nas: Path) -> None:
    put(nas, beat(2, digest="other"))
    done = status(nas)
    assert done.returncode == 1
    assert "n2 has another configuration than the other nodes" in done.stdout


def test_a_reader_whose_clock_is_behind_says_so(nas: Path) -> None:
    for number in range(NODES):
        put(nas, beat(number), seconds_ago=-7200)
    found = document(nas)
    assert all(not node["is_dead"] for node in found["nodes"])
    assert "this machine's clock is 2 h behind the store's" in found["problems"][0]


def test_nothing_committed_is_not_safe(tmp_path: Path) -> None:
    root = tmp_path / "nas"
    root.mkdir()
    upload(DirectoryStore(str(root), owner="t"), tmp_path, 0)
    done = status(root)
    assert done.returncode == 1
    assert done.stdout.startswith("job  ● NOT SAFE  nothing is committed yet")


def test_no_remote_there_is_said(tmp_path: Path) -> None:
    done = status(f"file://{tmp_path}/none")  # type: ignore[arg-type]
    assert done.returncode in (69, 78), done.stderr
    assert "Traceback" not in done.stderr


def test_the_document_keeps_its_shape(nas: Path) -> None:
    """docs/contract.md names these."""
    found = document(nas)
    assert found["schema_version"] == 1
    assert set(found) == {
        *(
            "schema_version",
            "url",
            "job",
            "job_id",
            "verdict",
            "headline",
            "safe",
            "nodes_alive",
            "nodes_expected",
        ),
        *(
            "seconds_at_risk",
            "newest_step",
            "ended_seconds_ago",
            "nodes",
            "uncommitted",
            "problems",
            "clock",
            "run_id",
            "runs",
        ),
    }
    assert set(found["nodes"][0]) == {
        *("node", "node_id", "heard_seconds_ago", "is_store_time", "is_dead", "has_ended", "state"),
        *("newest_step", "newest_tag", "ranks", "ckptd_version", "config_digest", "is_in_safe"),
    }
