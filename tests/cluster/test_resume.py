"""Train on two nodes, go on with one, two or three in real DeepSpeed, from where `ckptd resume` put it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import runs
from tests.cluster.harness import cluster

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.harness import Cluster, ClusterNode

STEP = 2
TOLERANCE = 2e-2
"""Of bf16 losses after another summation order; the loss falls by more in a step."""


def resume(node: ClusterNode, wish: Again, rank: int) -> str:
    """`ckptd resume` as a launch script calls it; the path it prints."""
    done = node.ckptd(
        *("resume", node.job_file, "--nnodes", wish.nodes, "--node-rank", rank),
        *("--world-size", wish.nodes * wish.ranks),
        timeout_seconds=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def committed(here: Cluster, run: runs.Run) -> None:
    """Both nodes upload their parts of the run's first save, and end."""
    for number, name in enumerate(("a", "b")):
        here.add(name, local="save_total_limit = 2\nforms = []").start()
        here.nodes[name].write(run, number, STEP)
    here.wait_committed(f"global_step{STEP}~g1")
    for node in here.nodes.values():
        node.stop(60)


def train(here: Cluster, run: runs.Run, wish: Again) -> dict[str, Any]:
    """A job for `runs.launch` that goes on from each node's save_dir."""
    losses = here.root / f"losses-{wish.nodes}.json"
    made = runs.job_of(run, str(here.root / f"{wish.nodes}nodes{{node}}"), losses, steps=2)
    made["recipe"]["world_size"] = wish.nodes * wish.ranks
    return made | {"load": "zero" if wish.is_same else "universal", "tag": None}


def on_track(run: runs.Run, losses: dict[int, float]) -> None:
    """As the run that was never interrupted."""
    assert sorted(losses) == [STEP + 1, STEP + 2]
    for step, loss in losses.items():
        assert loss == pytest.approx(run.losses[step], abs=TOLERANCE), (step, loss, run.losses)


@dataclass(frozen=True)
class Again:
    """So many nodes, with so many ranks each, go on."""

    nodes: int
    ranks: int

    @property
    def is_same(self) -> bool:
        """The grid that saved."""
        return self.nodes * self.ranks == 2 * runs.RANKS


SAME, ONE, THREE = Again(2, runs.RANKS), Again(1, 2), Again(3, 1)
ALL = (SAME, ONE, THREE)


@pytest.mark.parametrize(
    ("run", "again"),
    [
        (runs.LOCAL_2, (SAME, THREE)),
        pytest.param(runs.LOCAL_2, (ONE,), marks=pytest.mark.full),
        pytest.param(runs.LOCAL_3, ALL, marks=pytest.mark.full),
        pytest.param(runs.APART_2, ALL, marks=pytest.mark.full),
    ],
    ids=["z2", "z2-one", "z3", "z2-apart"],
)
def test_resumed_on_one_two_and_three_nodes(tmp_path: Path, run: runs.Run, again: tuple[Again, ...]) -> None:
    """Two nodes again: each gets its ranks' shards and `latest`; another number: the universal form."""
    runs.prepare([run])
    tag = f"global_step{STEP}"
    with cluster(tmp_path) as here:
        committed(here, run)
        for wish in again:
            for rank in range(wish.nodes):
                node = here.add(f"on{wish.nodes}-{rank}", local="forms = []")
                path = resume(node, wish, rank)
                if wish.is_same:
                    assert path == str(node.save_dir / tag)
                    assert shards(node.save_dir / tag) == shards(run.save_dir(rank) / tag)
                    assert (node.save_dir / "latest").read_text() == tag
                else:
                    assert path == str(node.save_dir / "_ckptd" / "derived" / "universal" / tag)
                    pointer = node.save_dir / "latest_universal"
                    assert pointer.read_text() == f"_ckptd/derived/universal/{tag}"
                (here.root / f"{wish.nodes}nodes{rank}").symlink_to(node.save_dir)
            runs.launch(wish.nodes, [train(here, run, wish)], tmp_path, wish.ranks)
            on_track(run, runs.losses_at(here.root / f"losses-{wish.nodes}.json"))
            for rank in range(wish.nodes):
                shutil.rmtree(here.nodes[f"on{wish.nodes}-{rank}"].root)


def shards(folder: Path) -> set[str]:
    """Names of the optimizer shards in a folder."""
    return {path.name for path in folder.glob("*optim*")}


@pytest.mark.full
def test_stages_of_a_pipeline_get_their_own_shards_and_go_on(tmp_path: Path) -> None:
    """A node a stage: both have data-parallel ranks 0 and 1. The nodes that saved, and fresh ones."""
    run = runs.STAGES
    runs.prepare([run])
    tag = f"global_step{STEP}"
    with cluster(tmp_path) as here:
        committed(here, run)
        for rank, name in enumerate("ab"):
            for node in (here.nodes[name], here.add(f"on2-{rank}", local="forms = []")):
                assert resume(node, SAME, rank) == str(node.save_dir / tag)
                assert shards(node.save_dir / tag) == shards(run.save_dir(rank) / tag)
        for kind, names in (("own", ("a", "b")), ("fresh", ("on2-0", "on2-1"))):
            for rank, name in enumerate(names):
                (here.root / f"{kind}{rank}").symlink_to(here.nodes[name].save_dir)
            job = train(here, run, SAME) | {"out": str(here.root / f"{kind}{{node}}")}
            runs.launch(2, [job], tmp_path, runs.RANKS)
            on_track(run, runs.losses_at(here.root / "losses-2.json"))
