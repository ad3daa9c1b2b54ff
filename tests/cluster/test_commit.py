"""Two nodes, one job: shards on each node's own disk, one COMMIT that covers them (H1, H13, H27, H29)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import runs
from tests.cluster.harness import Cluster, cluster

if TYPE_CHECKING:
    from pathlib import Path

    from tests.stores.servers import Server


@pytest.fixture(scope="module", autouse=True)
def _real_saves() -> None:
    runs.prepare()


def keys_of(here: Cluster, key: str) -> list[str]:
    """Paths that a COMMIT's manifests list, with repeats."""
    refs = {ref["sha256"][:12] for ref in here.commits()[key]["manifests"]}
    return sorted(
        file["path"]
        for name, manifest in here.documents("nodes").items()
        if name.rsplit("~", 1)[1].removesuffix(".json") in refs
        for file in manifest["files"]
        if file["role"] in ("optim", "model")
    )


@pytest.mark.parametrize(
    ("run", "on_s3"),
    [
        (runs.LOCAL_2, True),
        (runs.LOCAL_3, False),
        pytest.param(runs.APART_2, False, marks=pytest.mark.full),
        pytest.param(runs.LOCAL_1, False, marks=pytest.mark.full),
        pytest.param(runs.LOCAL_2, False, marks=pytest.mark.full),
        pytest.param(runs.LOCAL_3, True, marks=pytest.mark.full),
    ],
    ids=["z2-s3", "z3", "z2-apart", "z1", "z2", "z3-s3"],
)
def test_two_nodes_make_one_commit(tmp_path: Path, moto: Server, run: runs.Run, on_s3: bool) -> None:
    """Each node's daemon ships its ranks' shards; no `latest` on node 1; replicas go once."""
    with cluster(tmp_path, moto if on_s3 else None) as here:
        for number, name in enumerate(("a", "b")):
            here.add(name).start()
            here.nodes[name].write(run, number, 2)
        here.wait_committed("global_step2~g1")
        assert not (here.nodes["b"].save_dir / "latest").exists()
        names = sorted(
            p.name
            for n in (0, 1)
            for p in (run.save_dir(n) / "global_step2").iterdir()
            if "model" not in p.name
        )
        paths = keys_of(here, "global_step2~g1")
        assert [p for p in paths if "optim" in p] == names
        assert len(paths) == len(set(paths))
        here.wait_told("global_step2~g1")
        assert here.read("latest") == "global_step2"
        assert list(here.commits()) == ["global_step2~g1"]
        for node in here.nodes.values():
            assert not {"commit-waiting", "commit-incomplete"} & node.problems()
        assert not any(beat["ended"] for beat in here.documents("heartbeats").values())
        assert [node.stop() for node in here.nodes.values()] == [0, 0]
        assert [beat["ended"] for beat in here.documents("heartbeats").values()] == [True, True]
        if not on_s3:
            told = here.nodes["a"].ckptd("status", here.nas)
            assert told.returncode == 0, told.stdout + told.stderr
            assert told.stdout.startswith("run  ● SAFE  ended ")
