"""The repair that a daemon orders from a process of its own: those files alone, from a copy that is good."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.errors import SourceChanged, StorageError
from ckptd.maintenance.repair_order import RepairOrder, repair_apart
from tests.support.repair_scene import RepairScene, built, scene
from tests.support.restore_scene import TAG

__all__ = ["built", "scene"]


def order(scene: RepairScene, remote: str | None, *paths: Path) -> RepairOrder:
    """A repair of these files in one place."""
    scene.state.mkdir(exist_ok=True)
    return RepairOrder(
        job=scene.job_with(scene.nas, scene.nas2),
        state_dir=str(scene.state),
        tag=TAG,
        remote=remote,
        keys=tuple(f"{TAG}/{path.name}" for path in paths),
    )


def test_only_what_is_named_is_read_and_repaired(scene: RepairScene) -> None:
    """Of two bad objects the named one; the other is not even looked at."""
    named, other = scene.shard(0, root=scene.nas), scene.shard(1, root=scene.nas)
    good = named.read_bytes()
    scene.flip(named)
    scene.flip(other)
    bad = other.read_bytes()
    (row,) = repair_apart(order(scene, "nas", named), lambda: False)
    assert (row.key, row.left) == (f"{TAG}/{named.name}", None)
    assert row.source is not None
    assert row.source.startswith("here")
    assert (named.read_bytes(), other.read_bytes()) == (good, bad)
    assert [line["tag"] for line in scene.audit()] == [TAG]


def test_here_beside_the_daemon(scene: RepairScene) -> None:
    """The daemon that asks holds the lock of save_dir; a bad remote is passed over for the next."""
    import fcntl
    import os

    shard = scene.shard(1)
    good = shard.read_bytes()
    scene.flip(shard)
    scene.flip(scene.shard(1, root=scene.nas))
    fd = os.open(scene.save_dir, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        (row,) = repair_apart(order(scene, None, shard), lambda: False)
    finally:
        os.close(fd)
    assert (row.source, row.left) == ("nas2", None)
    assert shard.read_bytes() == good


@pytest.mark.parametrize("place", [None, "nas"])
def test_where_no_copy_is_good_nothing_is_changed(scene: RepairScene, place: str | None) -> None:
    """Bad here and in both remotes: each stays as it is, and the reason is told."""
    shards = [scene.shard(1), scene.shard(1, root=scene.nas), scene.shard(1, root=scene.nas2)]
    for shard in shards:
        scene.flip(shard)
    bad = [shard.read_bytes() for shard in shards]
    (row,) = repair_apart(order(scene, place, shards[0]), lambda: False)
    assert row.left
    assert [shard.read_bytes() for shard in shards] == bad
    assert scene.audit() == []


def test_a_file_that_was_written_again_is_left_alone(scene: RepairScene) -> None:
    """A trainer saved this tag again since the scrub read it: its bytes are the newest there are."""
    shard = scene.shard(1)
    scene.flip(shard)
    scene.save(10, salt="again")
    now = {path.name: path.read_bytes() for path in (scene.save_dir / TAG).iterdir()}
    assert repair_apart(order(scene, None, shard), lambda: False) == []
    assert {path.name: path.read_bytes() for path in (scene.save_dir / TAG).iterdir()} == now


def test_it_is_stopped_at_once(scene: RepairScene) -> None:
    """A save begins: nothing is half done that the next repair would not put right."""
    shard = scene.shard(1, root=scene.nas)
    good = shard.read_bytes()
    scene.flip(shard)
    with pytest.raises(SourceChanged, match="stopped"):
        repair_apart(order(scene, "nas", shard), lambda: True)
    repair_apart(order(scene, "nas", shard), lambda: False)
    assert shard.read_bytes() == good


def test_no_remote_answers(scene: RepairScene) -> None:
    scene.nas.rename(scene.root / "away")
    scene.nas2.rename(scene.root / "away2")
    with pytest.raises(StorageError, match="remote"):
        repair_apart(order(scene, None, scene.shard(1)), lambda: False)
