"""Nodes that die, are replaced, are cut off or disagree: one COMMIT of one save, or that message (H1, H29).

Nothing is deleted in any of these; each wait is for a condition, with a limit far beyond the usual.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.heartbeat import DEAD_SECONDS
from tests.cluster import runs
from tests.cluster.harness import SHORT, Cluster, cluster
from tests.stores import servers
from tests.support.real import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUN = runs.LOCAL_2
TAG = "global_step2"
FULL = bool(os.environ.get("CKPTD_FULL"))
KILLS = 12 if FULL else 3
SEED = int(os.environ.get("CKPTD_SEED", "11"))


@pytest.fixture(scope="module", autouse=True)
def _real_saves() -> None:
    runs.prepare()


def pair(here: Cluster, **more: object) -> None:
    """Nodes a and b, started, with nothing saved yet."""
    for name in ("a", "b"):
        here.add(name, **more).start()


def problem(here: Cluster, name: str, code: str) -> str:
    """Text of an open problem of a node; empty: there is none."""
    found = [p["text"] for p in here.nodes[name].status().get("problems", ()) if p["code"] == code]
    return found[0] if found else ""


def said(here: Cluster, name: str, words: str) -> bool:
    """Whether a node says of a save that lacks shards."""
    return words in problem(here, name, "commit-incomplete")


def test_a_replacement_steps_in_for_a_dead_owner_and_missing_ranks_are_named(tmp_path: Path) -> None:
    """The node of rank 0 dies before it ships: ranks 0-1 are missed by name. Another node, of another name,
    gets the same ranks' files: one COMMIT."""
    with cluster(tmp_path) as here:
        pair(here, step_in_seconds=2)
        here.nodes["a"].write(RUN, 0, 2)
        here.nodes["b"].write(RUN, 1, 2)
        here.wait_committed(f"{TAG}~g1")
        here.wait(
            "a's ranks in its heartbeat", lambda: here.documents("heartbeats")["a.json"]["job"] == "run"
        )
        here.nodes["a"].kill()
        here.nodes["b"].write(RUN, 1, 4)
        # b sends the replica itself once the owner had its time, and then names what is missing
        here.wait("b stepped in", lambda: "mp_rank_00_model_states.pt" in sent(here, "global_step4", "b"))
        here.wait("the message", lambda: problem(here, "b", "commit-incomplete"), seconds=240)
        text = problem(here, "b", "commit-incomplete")
        assert "missing ranks 0-1" in text
        assert here.nodes["b"].status()["state"] == "attention"
        assert f"{TAG}~g1" in here.commits() and "global_step4~g1" not in here.commits()
        # a node that never resumed may stand in for one that has been silent for five minutes, not sooner
        before = time.time() - 2 * DEAD_SECONDS
        os.utime(here.nas / "_ckptd" / "heartbeats" / "a.json", (before, before))
        fresh = here.add("c", step_in_seconds=2)
        fresh.write(RUN, 0, 4)
        fresh.start()
        here.wait_committed("global_step4~g1")
        here.wait_told("global_step4~g1", "b", "c")
        here.wait("the message is gone", lambda: not problem(here, "b", "commit-incomplete"))
        assert sorted(here.commits()) == [f"{TAG}~g1", "global_step4~g1"]
        assert not here.documents("disputes")
        assert all(node.audit() == [] for node in here.nodes.values())


def sent(here: Cluster, tag: str, node: str, generation: int = 1) -> set[str]:
    """Paths in a node's newest manifest."""
    manifest = here.manifests(tag, generation).get(node)
    return {file["path"] for file in manifest["files"]} if manifest else set()


def asked(here: Cluster) -> str:
    """The exit status of `status URL`, and what it says."""
    done = subprocess.run(
        [sys.executable, str(SHORT), "2", "status", here.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return " ".join([str(done.returncode), *done.stdout.split()])


def test_two_attempts_at_one_tag_never_mix(tmp_path: Path) -> None:
    """Node a has the first save of a tag, node b the second: no COMMIT over both, and both say so; when a
    saves again, one of the second."""
    with cluster(tmp_path) as here:
        # by Slurm's word: node b has nothing to say yet
        pair(here, step_in_seconds=2, environment={"SLURM_JOB_NUM_NODES": "2"})
        here.nodes["a"].write(RUN, 0, 2)
        here.wait("a uploaded", lambda: "a" in here.manifests(TAG))
        here.nodes["b"].write(runs.OTHER_2, 1, 2)
        here.wait("b uploaded", lambda: "b" in here.manifests(TAG, 2))
        for name, other, generation in (("a", "b", 2), ("b", "a", 1)):
            words = f"node {other} uploaded another save of this tag, as generation {generation}"
            here.wait(f"{name} to say so", partial(said, here, name, words), 240)
        # what a node sends once it has stepped in is of its own minute again
        here.wait("status to say so", lambda: asked(here).count("; save again") == 2)
        told = asked(here)
        assert told.startswith("1 ")
        assert f"{TAG} (generation 2) is not committed: missing ranks 0-1" in told
        assert not here.commits()
        here.nodes["a"].write(runs.OTHER_2, 0, 2)
        here.wait_committed(f"{TAG}~g2")
        assert list(here.commits()) == [f"{TAG}~g2"]
        folder = here.nas / f"{TAG}.g2"
        for number in (0, 1):
            for path in (runs.OTHER_2.save_dir(number) / TAG).glob("*optim*"):
                assert (folder / path.name).read_bytes() == path.read_bytes()
        assert not here.documents("disputes")


@pytest.mark.full
def test_a_part_grows_and_ranks_that_saved_here_before_are_waited_for(tmp_path: Path) -> None:
    """A rank that writes long after its neighbours is not another node's: the manifest is revised (H27)."""
    with cluster(tmp_path) as here:
        pair(here)
        late = "zero_pp_rank_3"
        others = [p.name for p in (RUN.save_dir(1) / TAG).iterdir() if late not in p.name]
        for name in others:
            here.nodes["b"].write(RUN, 1, 2, only=name)
        here.nodes["a"].write(RUN, 0, 2)
        here.wait("b's first part", lambda: "b" in here.manifests(TAG))
        assert not here.commits()
        here.nodes["b"].write(RUN, 1, 2, only=late)
        here.wait_committed(f"{TAG}~g1")
        assert any(late in path for path in sent(here, TAG, "b"))
        # now it is known who lives here: rank 2 alone is not uploaded as this node's part
        here.nodes["b"].write(RUN, 1, 4, only="rank_2_")
        here.nodes["b"].write(RUN, 1, 4, only="model_states")
        here.nodes["a"].write(RUN, 0, 4)
        here.wait("a's part", lambda: "a" in here.manifests("global_step4"))
        here.wait("b waits", lambda: here.nodes["b"].checkpoint("global_step4")["state"] == "saving")
        assert "b" not in here.manifests("global_step4")
        here.nodes["b"].write(RUN, 1, 4, only=late)
        here.wait_committed("global_step4~g1")
        assert here.manifests("global_step4")["b"]["revision"] == 1


@pytest.mark.full
def test_another_configuration_deletes_nothing_and_says_so(tmp_path: Path) -> None:
    """A node that was told to keep less than the others is an alarm on every node (H12)."""
    with cluster(tmp_path) as here:
        here.add("a", local="save_total_limit = 1\nforms = []").start()
        here.add("b", local="save_total_limit = 3\nforms = []").start()
        for step in (2, 4):
            for number, name in enumerate(("a", "b")):
                here.nodes[name].write(RUN, number, step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait_told("global_step4~g1")
        here.wait("somebody is told", lambda: any(problem(here, n, "config-differs") for n in ("a", "b")))
        time.sleep(3)
        differing = [n for n in ("a", "b") if problem(here, n, "config-differs")]
        assert all("nothing is deleted" in problem(here, n, "config-differs") for n in differing)
        if "a" in differing:
            assert here.nodes["a"].local_tags() == {"global_step2", "global_step4"}


@pytest.mark.parametrize("store", ["directory", pytest.param("moto", marks=pytest.mark.full)])
def test_daemons_killed_at_any_time_end_in_one_commit(
    tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    """kill -9 of either daemon at a random moment, started again, several times; on a directory and on S3."""
    rng = random.Random(SEED)
    with cluster(tmp_path, None if store == "directory" else request.getfixturevalue(store)) as here:
        pair(here)
        for number, name in enumerate(("a", "b")):
            here.nodes[name].write(RUN, number, 2)
        for _ in range(KILLS):
            name = rng.choice(("a", "b"))
            time.sleep(rng.uniform(0, 2.0))
            here.nodes[name].kill()
            here.nodes[name].start()
        here.wait_committed(f"{TAG}~g1", 180)
        here.wait_told(f"{TAG}~g1")
        assert list(here.commits()) == [f"{TAG}~g1"]
        for number in (0, 1):
            for path in (RUN.save_dir(number) / TAG).glob("*optim*"):
                assert here.read_bytes(f"{TAG}/{path.name}") == path.read_bytes()
        assert not here.documents("disputes")


@pytest.fixture
def island(tmp_path: Path) -> Iterator[tuple[str, servers.Server]]:
    """A network namespace that reaches an S3 server of this machine by its own loopback, and nothing else."""
    name = f"ckptd{os.getpid()}"
    relays = []
    with servers.moto(tmp_path) as server:
        try:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            inside = ["ip", "netns", "exec", name]
            for prefix, side in (([], "out"), (inside, "in")):
                where = [
                    sys.executable,
                    "-m",
                    "tests.cluster.relay",
                    side,
                    str(server.port),
                    str(tmp_path / "wire"),
                ]
                relays.append(subprocess.Popen([*prefix, *where], cwd=REPOSITORY))
            yield name, server
        finally:
            for relay in relays:
                relay.kill()
                relay.wait()
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    """`ip`, as root."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.mark.full
def test_a_node_cut_off_the_network_comes_back_to_one_commit(
    tmp_path: Path, island: tuple[str, servers.Server]
) -> None:
    """Node b lives in a network namespace of its own; its wire is pulled before it can upload its part."""
    space, server = island
    with cluster(tmp_path, server) as here:
        here.add("a").start()
        here.add("b", prefix=("ip", "netns", "exec", space)).start()
        here.nodes["a"].write(RUN, 0, 2)
        here.nodes["b"].write(RUN, 1, 2)
        here.wait_committed(f"{TAG}~g1", 180)
        here.wait_told(f"{TAG}~g1")
        ip("-n", space, "link", "set", "lo", "down")
        here.nodes["a"].write(RUN, 0, 4)
        here.nodes["b"].write(RUN, 1, 4)
        here.wait("a waits", lambda: problem(here, "a", "commit-waiting"), 180)
        here.wait("b is cut off", lambda: problem(here, "b", "remote-unreachable"), 300)
        assert "global_step4~g1" not in here.commits()
        ip("-n", space, "link", "set", "lo", "up")
        here.wait_committed("global_step4~g1", 300)
        assert sorted(here.commits()) == [f"{TAG}~g1", "global_step4~g1"]
