"""`ckptd rm` on two nodes: a COMMIT goes from the remote once every node that it rests on has had its say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import runs
from tests.cluster.harness import cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.faults]


@pytest.fixture(scope="module", autouse=True)
def _real_saves() -> None:
    runs.prepare()


def test_each_node_deletes_its_own_copy_and_then_one_the_remotes(tmp_path: Path) -> None:
    """By default the remote's stays: the other node's copy rests on it. Said by name it goes, for all."""
    run = runs.LOCAL_2
    with cluster(tmp_path) as here:
        nodes = [
            here.add(name, local="save_total_limit = 9", remote='forms = ["zero"]') for name in ("a", "b")
        ]
        for node in nodes:
            node.start()
        for step in (2, 4):
            for number, node in enumerate(nodes):
                node.write(run, number, step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait_told("global_step2~g1")
        here.wait_told("global_step4~g1")
        first, second = nodes
        done = first.ckptd("rm", first.job_file, "global_step2", "--yes")
        assert done.returncode == 65, done.stdout + done.stderr
        assert "deleted global_step2 here" in done.stdout
        assert "the copies of other nodes rest on it (b) → there" in done.stderr
        assert ("global_step2" in first.local_tags(), "global_step2" in second.local_tags()) == (False, True)
        assert second.ckptd("rm", second.job_file, "global_step2", "--local", "--yes").returncode == 0
        done = first.ckptd("rm", first.job_file, "global_step2", "--remote", "nas", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(here.commits()) == {"global_step4~g1"}
        assert here.objects("global_step2") == []
        assert [node.local_tags() for node in nodes] == [{"global_step4"}] * 2
