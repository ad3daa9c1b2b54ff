"""Two runs in one remote: neither is counted, pointed at, retired or taken for the other (adr/0185)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.core.model.generation import AlreadyCommitted, JoinGeneration, choose_generation
from ckptd.core.model.manifest import NodeManifest, Tombstone, parse
from ckptd.core.model.runs import Claim
from ckptd.daemon.uploads.session import commits_of, of_run
from ckptd.errors import RefusedError
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.documents import read_commits
from ckptd.storage.remote.messages import DeleteCommit, UploadRequest
from ckptd.storage.remote.runs import claim_run
from ckptd.storage.stores.open import open_store
from tests.stores.scene import Node
from tests.support.observing import describe, observe


class Two:
    """The remote of two runs, each with its own node over its own directory."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = open_store(str(tmp_path / "nas"))
        self.nodes = {run: Node(tmp_path / run) for run in ("x", "y")}
        self.grounds = {run: node.attached(self.store) for run, node in self.nodes.items()}

    def commit(self, run: str, step: int, generation: int = 1) -> NodeManifest:
        """A save of one of them."""
        node = self.nodes[run]
        node.tag = f"global_step{step}"
        node.write_all(f"{run}{step}".encode(), size=20)
        order = node.order(node.sealed(step=step), generation=generation)
        order = order.model_copy(update={"manifest": order.manifest.model_copy(update={"run_id": run})})
        assert isinstance(order, UploadRequest)
        assert node.upload(self.grounds[run], order).outcome == "committed"
        return order.manifest

    def claim(self, run: str) -> None:
        """It is that run's turn."""
        place = Claim(node=run, node_id=run, host="h", save_dir=f"/{run}", run_id=run)
        assert not claim_run(self.store, place, "j").others


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def test_a_run_sees_its_own_commits(two: Two) -> None:
    two.commit("x", 10)
    two.commit("y", 20)
    seen = observe(two.store)
    assert {view.commit.run_id for view in seen.commits} == {"x", "y"}
    assert [view.commit.tag for view in of_run(seen, "x").commits] == ["global_step10"]
    assert [view.commit.tag for view in of_run(seen, "y").commits] == ["global_step20"]
    assert of_run(seen, "").commits == (), "of a run that is not known yet"


def test_pointers_follow_the_run_whose_turn_it_is(two: Two) -> None:
    """Not the highest step; and until it has committed anything they stay where they are."""
    two.claim("x")
    two.commit("x", 30)
    assert two.store.get("latest") == b"global_step30"
    two.claim("y")
    assert observe(two.store).is_pointing
    two.commit("y", 10)
    assert two.store.get("latest") == b"global_step10"


def test_the_newest_of_each_run_stays(two: Two) -> None:
    """One run's newest was an older one of the other, and went by its limit."""
    two.commit("x", 10)
    two.commit("y", 20)
    view = next(v for v in read_commits(two.store).commits if v.commit.run_id == "x")
    order = DeleteCommit(
        tag="global_step10", generation=1, form="zero", reason="r", commit_sha256=view.sha256
    )
    with pytest.raises(RefusedError, match="newest"):
        delete_commit(two.grounds["y"], order, lambda: None)
    delete_commit(two.grounds["y"], order.model_copy(update={"ends_run": True}), lambda: None)
    stone = two.store.get("_ckptd/retired/global_step10~g1~zero.json")
    assert stone is not None
    assert parse(Tombstone, stone, "").run_id == "x"


def test_the_same_bytes_committed_by_another_run_are_another_save(two: Two) -> None:
    two.commit("x", 10)
    view = describe(two.store, "global_step10")
    manifests, commits = commits_of(view)
    save = two.nodes["x"].sealed(step=10)
    job_id = manifests[0].manifest.job_id

    def choice(run_id: str | None) -> object:
        return choose_generation(
            save,
            job_id,
            manifests=manifests,
            commits=commits,
            tombstones=(),
            save_spread_seconds=60,
            run_id=run_id,
        )

    assert isinstance(choice("x"), AlreadyCommitted)
    assert choice("y") == JoinGeneration(generation=2)
