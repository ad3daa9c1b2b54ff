"""Whose turn it is in a remote: core/model/runs.py as a table of scenes, and the row of documents over a
store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.core.model.heartbeat import Heartbeat, SeenNode
from ckptd.core.model.manifest import RemoteIdentity, to_bytes
from ckptd.core.model.runs import RUNS, Claim, ClaimVerdict, Row, RunFile, judge, run_of
from ckptd.daemon.intake.runs import JobRuns
from ckptd.daemon.node_id import node_id_of
from ckptd.daemon.state.problems import Problems
from ckptd.storage.child.service import Service
from ckptd.storage.local.run_file import read_run, run_file, write_run
from ckptd.storage.local.state_dir import own_state
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.documents import DocumentCache
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import RemoteSettings
from ckptd.storage.remote.runs import claim_run, newest_run, read_runs
from ckptd.storage.stores.directory import DirectoryStore

A: dict[str, Any] = {"node": "a", "node_id": "ida", "host": "ha", "user": "alice", "save_dir": "/a/output"}
B: dict[str, Any] = {"node": "b", "node_id": "idb", "host": "hb", "user": "bob", "save_dir": "/b/output"}
HALVES: dict[str, Any] = {"is_whole": False, "grid": (2, 1, 3)}


def row(number: int = 1, run_id: str = "r1", **more: Any) -> Row:
    """A's, unless told otherwise."""
    return Row.model_validate(
        {**A, "job_id": "j", "number": number, "run_id": run_id, "created_at": "2026-01-01T00:00:00Z", **more}
    )


def claim(run_id: str = "r2", **more: Any) -> Claim:
    """B's, unless told otherwise."""
    return Claim.model_validate({**B, "run_id": run_id, **more})


def beat(run_id: str | None = "r1", age: float = 30.0, **more: Any) -> SeenNode:
    """A's, unless told otherwise."""
    head = {"job_id": "j", "job": "output", "config_digest": "c", "ckptd_version": "0", "state": "ok"}
    said = Heartbeat.model_validate({**A, **head, "as_of": "2026-01-01T00:00:00Z", "run_id": run_id, **more})
    return SeenNode(node=said.node, seconds_ago=age, heartbeat=said)


def judged(c: Claim, r: Row | None, *seen: SeenNode, is_virgin: bool = False) -> ClaimVerdict:
    """With the job's id j."""
    return judge(c, r, seen, job_id="j", is_virgin=is_virgin)


def test_the_first_run_of_a_fresh_remote_bears_the_jobs_id() -> None:
    assert judged(claim(is_new=True), None, is_virgin=True) == ClaimVerdict(run_id="j", appends=True)
    assert judged(claim(is_new=True), None) == ClaimVerdict(run_id="r2", appends=True)
    assert judged(claim("r7"), None, is_virgin=True) == ClaimVerdict(run_id="r7", appends=True)


@pytest.mark.parametrize("run_id", ["r2", "r1"], ids=["another run", "the same, by hand"])
def test_a_second_place_that_saves_whole_checkpoints_is_refused_while_the_first_lives(run_id: str) -> None:
    found = judged(claim(run_id, is_new=run_id == "r2"), row(), beat())
    assert not found.appends
    assert [other.words for other in found.others] == ["alice@ha:/a/output"]


@pytest.mark.parametrize("seen", [beat(age=301.0), beat(ended=True), beat("r9", age=1.0)])
def test_it_goes_on_once_the_first_is_silent_or_has_ended(seen: SeenNode) -> None:
    assert judged(claim(), row(), seen) == ClaimVerdict(run_id="r2", appends=True)


def test_a_daemon_that_beat_before_it_knew_its_run_lives() -> None:
    assert judged(claim(), row(), beat(None)).others


def test_the_same_place_never_conflicts_with_itself() -> None:
    again = {**A, "node_id": "other"}  # its state was lost
    assert judged(Claim(**again, run_id="r1"), row(), beat()) == ClaimVerdict(run_id="r1", appends=True)
    assert judged(Claim(**A, run_id="r1"), row(), beat()) == ClaimVerdict(run_id="r1")
    assert judged(Claim(**A, run_id="r2", is_new=True), row(), beat()) == ClaimVerdict(
        run_id="r2", appends=True
    )


def test_a_run_that_was_resumed_elsewhere_moves_there_and_its_former_place_is_the_second() -> None:
    moved = judged(claim("r1", was_resumed=True, knows=1), row(), beat())
    assert moved == ClaimVerdict(run_id="r1", appends=True)
    former = judged(Claim(**A, run_id="r1", accepted=1), row(2, **B), beat(**B))
    assert former.others
    late = judged(claim("r1", was_resumed=True, knows=1), row(2, **{**A, "save_dir": "/c"}), beat())
    assert late.others, "another place claimed it after that resume"


def test_parts_of_one_save_are_one_run() -> None:
    mine, theirs = {**HALVES, "shards": [(1, 0)]}, {**HALVES, "shards": [(0, 0)]}
    assert judged(claim(is_new=True, **mine), row(**theirs), beat(shards=[(0, 0)])) == ClaimVerdict(
        run_id="r1"
    )
    assert judged(claim("r1", **mine), row(**theirs), beat()) == ClaimVerdict(run_id="r1")
    # the same shard twice, another grid, a whole one: two runs
    assert judged(claim(is_new=True, **theirs), row(**theirs), beat()).others
    assert judged(claim(is_new=True, **{**mine, "grid": (4, 1, 3)}), row(**theirs), beat()).others
    assert judged(claim(is_new=True), row(**theirs), beat()).others


def test_a_part_does_not_join_a_run_that_nobody_saves_or_that_its_directory_left() -> None:
    mine, theirs = {**HALVES, "shards": [(1, 0)]}, {**HALVES, "shards": [(0, 0)]}
    dead = judged(claim(is_new=True, **mine), row(**theirs), beat(age=400.0))
    assert dead == ClaimVerdict(run_id="r2", appends=True)
    assert judged(claim(is_new=True, left="r1", **mine), row(**theirs), beat()).others


def test_a_node_whose_ranks_changed_goes_on_under_the_row_that_it_was_accepted_under() -> None:
    theirs = {**HALVES, "shards": [(0, 0)]}
    found = judged(claim("r1", accepted=3, **theirs), row(3, **theirs), beat(shards=[(0, 0)]))
    assert found == ClaimVerdict(run_id="r1")
    assert judged(claim("r1", accepted=2, **theirs), row(3, **theirs), beat(shards=[(0, 0)])).others


def test_hosts_that_share_a_directory_are_one_place() -> None:
    goes_on = ClaimVerdict(run_id="r1")
    assert judged(claim(is_new=True, is_shared=True), row(is_shared=True), beat()) == goes_on
    # hosts of one name and path, as containers are: no row is added in turn, and no run begun
    same = {**A, "node": "c", "node_id": "idc", "is_shared": True}
    assert judged(Claim(**same, run_id="r2", is_new=True), row(is_shared=True), beat()) == goes_on
    assert judged(Claim(**same, run_id="r1"), row(is_shared=True), beat()) == goes_on
    assert judged(Claim(**same, run_id="r2", is_new=True, left="r1"), row(is_shared=True), beat()).others


def test_a_document_of_an_older_release_is_of_the_first_run() -> None:
    said = beat(None).heartbeat
    assert said is not None
    assert run_of(said, "j") == "j"
    assert run_of(said.model_copy(update={"run_id": "r"}), "j") == "r"


# --- over a store ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    found = DirectoryStore(str(tmp_path))
    identity = RemoteIdentity(remote_id="r", job_id="j", job="output", created="2026-01-01T00:00:00Z")
    found.put("_ckptd/remote.json", to_bytes(identity))
    return found


def test_of_two_that_begin_in_a_fresh_remote_one_has_it(store: DirectoryStore) -> None:
    first = claim_run(store, Claim(**A, run_id="x", is_new=True), "j")
    assert (first.run_id, first.number, first.others) == ("j", 1, ())
    said = beat(None).heartbeat
    assert said is not None
    Heartbeats(store).put(said)
    second = claim_run(store, claim(is_new=True), "j")
    assert [other.save_dir for other in second.others] == ["/a/output"]
    assert [(one.number, one.run_id) for one in read_runs(store, DocumentCache(), store.list(RUNS))] == [
        (1, "j")
    ]
    os.utime(Path(store.url) / "_ckptd/heartbeats/a.json", (1, 1))
    assert claim_run(store, claim(is_new=True), "j").run_id == "r2"
    newest = newest_run(store)
    assert newest is not None
    assert (newest.number, newest.run_id, newest.words) == (2, "r2", "bob@hb:/b/output")
    assert claim_run(store, claim("r2"), "j").number == 2, "said again, nothing is added"


def test_who_claims_lives_for_the_next_that_reads_its_row(store: DirectoryStore) -> None:
    """Its last heartbeat told the run of its directory, and the next was due a minute later."""
    answers: list[m.Answer] = []
    service = Service(lambda _order_id, answer: answers.append(answer), window_bytes=1 << 20)
    settings = RemoteSettings(name="nas", url=store.url, job="output", save_dir="/a/output", node="a",
                              node_id="ida", same_filesystem=True, job_id="j", remote_id="r")  # fmt: skip
    service.expect(settings)
    service.carry_out(1, m.Attach(settings=settings))
    said = beat("x").heartbeat
    service.carry_out(2, m.Beat(heartbeat=said, node="a"))
    service.carry_out(3, m.ClaimRun(claim=Claim(**A, run_id="x", is_new=True), heartbeat=said))
    # one that was ordered before the answer was heard tells nothing older
    service.carry_out(4, m.Beat(heartbeat=said, node="a"))
    claimed = next(answer for answer in answers if isinstance(answer, m.Claimed))
    assert (claimed.run.run_id, claimed.run.number) == ("j", 1)
    assert claim_run(store, claim(is_new=True), "j").others


def test_two_daemons_of_one_node_name_do_not_write_over_each_others_heartbeat(store: DirectoryStore) -> None:
    first, second = (beat(**where).heartbeat for where in (A, {**B, "node": "a"}))
    assert first is not None
    assert second is not None
    for one in (first, second, first, second):
        Heartbeats(store).put(one)
    names = sorted(info.key.rpartition("/")[2] for info in store.list("_ckptd/heartbeats/"))
    assert names == ["a.json", "a~idb.json"]
    seen = Heartbeats(store).elsewhere(first)
    assert [one.heartbeat.save_dir for one in seen if one.heartbeat is not None] == ["/b/output"]
    # the first one's state was lost: it is the same place
    again = first.model_copy(update={"node_id": "new"})
    Heartbeats(store).put(again)
    assert store.get("_ckptd/heartbeats/a.json") == to_bytes(again)


def test_of_nodes_of_one_run_nobody_says_that_they_share_a_name(tmp_path: Path) -> None:
    """A second node was told of the first, when neither knew yet that they save parts of one checkpoint."""
    fd = os.open(tmp_path, os.O_RDONLY)
    write_run(fd, run_file(fd, str(tmp_path), "j", "joined").accepting("remote", 1, "j"))
    link: Any = SimpleNamespace(
        bind=lambda _run: None,
        set_claim=lambda **given: link.__dict__.update(given),
        is_claimed=False,
        others=(),
        seen_all=None,
        settings=SimpleNamespace(),
    )
    state: Any = SimpleNamespace(set_run=lambda _run: None)
    config: Any = SimpleNamespace(save_dir=tmp_path, name="job", shared_fs=False)
    ours: Any = JobRuns(config, state, {"nas": link}, fd, ("b", "idb"), lambda: None, lambda: None)  # type: ignore[arg-type, return-value]
    os.close(fd)
    for is_claimed, seen, is_said in (
        (False, beat("j"), True),
        (True, beat("x"), True),
        (True, beat(None), True),
        (True, beat("j"), False),
    ):
        link.is_claimed, ours.sharers["nas"] = is_claimed, (seen,)
        problems = Problems()
        problems.put("name-shared", "nas", "node a writes to nas under this name, too", "")
        ours.see_problems(problems)
        assert ("name-shared" in {problem.code for problem in problems.all()}) == is_said


def test_who_told_of_another_run_is_read_again(store: DirectoryStore) -> None:
    first, second = beat("x").heartbeat, beat("j", **B).heartbeat
    assert first is not None
    assert second is not None
    ours = Heartbeats(store)
    Heartbeats(store).put(first)
    assert [seen.heartbeat and seen.heartbeat.run_id for seen in ours.elsewhere(second)] == ["x"]
    Heartbeats(store).put(first.model_copy(update={"run_id": "j"}))
    os.utime(Path(store.url) / "_ckptd/heartbeats/a.json", (9, 9))
    assert [seen.heartbeat and seen.heartbeat.run_id for seen in ours.elsewhere(second)] == ["j"]


def test_a_copy_of_the_state_has_a_node_id_of_its_own(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    first = node_id_of(state)
    assert node_id_of(state, 7) == first, "of a release that noted no directory"
    assert node_id_of(state, 7) == first, "moved on one file system, it is the same"
    (state / "journal.db").write_bytes(b"")
    assert own_state(state, tmp_path) is None, "its inode is neither"
    copied = node_id_of(state, 8)
    assert copied != first
    assert not (state / "journal.db").exists(), "it told of the original's checkpoints and uploads"
    assert (node_id_of(state, 8), node_id_of(state)) == (copied, copied)


def test_run_json_is_of_one_directory(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    fd = os.open(here, os.O_RDONLY)
    assert read_run(fd, str(here)) is None
    write_run(fd, run_file(fd, str(here), "r1", "resumed", known=(("remote", 4),)))
    found = read_run(fd, str(here))
    os.close(fd)
    assert isinstance(found, RunFile)
    assert (found.run_id, found.knows("remote"), found.is_accepted("remote")) == ("r1", 4, 0)
    assert found.accepting("remote", 5, "r1").is_accepted("remote") == 5
    fd = os.open(here, os.O_RDONLY)
    write_run(fd, run_file(fd, "", "r1", "begun"))
    shared = read_run(fd, "/another/path/to/it")
    assert shared is not None
    assert shared.run_id == "r1", "of hosts that share it under several paths"
    write_run(fd, found)
    os.close(fd)
    shutil.copytree(here, there)
    fd = os.open(there, os.O_RDONLY)
    assert read_run(fd, str(there)) is None, "a copy of the directory is another place"
    os.close(fd)
