"""The best checkpoint of a Hugging Face run over two nodes, of which one has trainer_state.json.

Two real daemons over disks of their own, which keep one checkpoint each and two in the remote.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.cluster.harness import cluster
from tests.support.synthetic import write_stage12

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.harness import Cluster, ClusterNode

pytestmark = pytest.mark.faults
BEST = "best_model_checkpoint"


def save(here: Cluster, step: int, best: int) -> None:
    """What each of two ranks writes of checkpoint-N; rank 0 notes which is the best so far."""
    made = here.root / f"made-{step}"
    write_stage12(made, [{"w": (64, 80), "b": (8,)}], 2, step=step)
    for rank, node in enumerate(here.nodes.values()):
        folder = node.save_dir / f"checkpoint-{step}"
        shards = folder / f"global_step{step}"
        shards.mkdir(parents=True)
        for path in made.iterdir():
            if "optim" not in path.name or f"rank_{rank}_" in path.name:
                shutil.copyfile(path, shards / path.name)
        shutil.copyfile(next(shards.iterdir()), folder / f"rng_state_{rank}.pth")
        if rank == 0:
            (folder / "latest").write_text(f"global_step{step}")
            state = {"global_step": step, "best_metric": 0.5, BEST: f"/out/checkpoint-{best}"}
            (folder / "trainer_state.json").write_text(json.dumps(state))
    here.wait_committed(f"checkpoint-{step}~g1")
    here.wait_told(f"checkpoint-{step}~g1")


def held(node: ClusterNode, tag: str) -> tuple[str, list[str]]:
    """What the node says becomes of a checkpoint in the remote, and why."""
    rows = node.status()["remotes"][0]["held"]
    return next((row["verdict"], row["why"]) for row in rows if row["tag"] == tag)


def test_the_best_stays_on_every_node_and_in_the_remote(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        for name in ("a", "b"):
            node: ClusterNode = here.add(
                name,
                local="save_total_limit = 1\nforms = []",
                remote='save_total_limit = 2\nforms = ["zero"]',
                step_in_seconds=10,
                environment={"SHORT_SAVE": "2"},
            )
            node.start()
        for step in (2, 4, 6, 8):
            save(here, step, best=2)
        tags = {f"checkpoint-{step}" for step in (2, 6, 8)}
        here.wait("one to go", lambda: set(here.commits()) == {f"{tag}~g1" for tag in tags})
        assert here.commits()["checkpoint-8~g1"]["best_checkpoint"] == "checkpoint-2"
        left = {"checkpoint-2", "checkpoint-8"}
        for node in here.nodes.values():
            here.wait(f"{node.name} to keep two", lambda n=node: n.local_tags() == left)  # type: ignore[misc]
            assert BEST in node.checkpoint("checkpoint-2")["keep"], node.name
            verdict, why = held(node, "checkpoint-2")
            assert (verdict, BEST in why) == ("keep", True), node.name
