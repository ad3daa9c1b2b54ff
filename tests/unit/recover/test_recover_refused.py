"""`resume` and a checkpoint here that the daemon found damaged: its bytes are read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptd.errors import DamagedError
from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]

SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def status(scene: Scene, tag: str, state: str = "refused") -> Path:
    """What a daemon left: its word about one checkpoint."""
    local = {"present": True}
    rows = [{"tag": tag, "state": state, "branch": 1, "step": 3, "local": local}]
    place = scene.root / "state"
    place.mkdir(exist_ok=True)
    jobs = [{"save_dir": str(scene.save_dir), "checkpoints": rows}]
    (place / "status.json").write_text(json.dumps({"jobs": jobs}))
    return place


@pytest.fixture
def damaged(scene: Scene) -> Scene:
    """Step 2 is committed; step 3 lies here alone, one bit of it turned."""
    scene.commit(scene.save(2), 2)
    scene.turn_a_byte_of(scene.save_dir / scene.save(3) / SHARD)
    return scene


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_damaged_one_is_named_and_the_next_best_taken(damaged: Scene, dry_run: bool) -> None:
    resumed = damaged.resume(state_dir=status(damaged, "global_step3"), dry_run=dry_run)
    assert resumed.path.name == "global_step2"
    assert any(
        "global_step3: " in line and "torch.save wrote" in line and line.endswith("the next best is taken")
        for line in damaged.said
    )
    assert damaged.pointer() == ("global_step3" if dry_run else "global_step2")
    assert SHARD in damaged.shards("global_step3")  # nothing is removed


def test_with_its_tag_it_is_refused(damaged: Scene) -> None:
    with pytest.raises(DamagedError, match=r"global_step3: .*torch.save wrote"):
        damaged.resume(state_dir=status(damaged, "global_step3"), tag="global_step3")


def test_the_bytes_are_the_proof(scene: Scene) -> None:
    """A status of before: the shard was put right since."""
    scene.commit(scene.save(2), 2)
    scene.save(3)
    assert scene.resume(state_dir=status(scene, "global_step3")).path.name == "global_step3"
    assert any("read to its end" in line for line in scene.said)


def test_one_that_nobody_read_is_taken_as_it_is(damaged: Scene) -> None:
    """What it would cost at every restart: docs/internals/recover.md."""
    assert damaged.resume(state_dir=status(damaged, "global_step3", "complete")).path.name == "global_step3"
