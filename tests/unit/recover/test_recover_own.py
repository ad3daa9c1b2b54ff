"""Whose a COMMIT is: a name that several disks bear proves nothing, the node id does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


@pytest.fixture
def back(scene: Scene) -> Scene:
    """500 and 900 are committed by the name "trainer"; another 500 lies here."""
    scene.node = "trainer"
    for step, seq in ((500, 1), (900, 2)):
        scene.commit(scene.save(step, salt="elsewhere"), step, save_seq=seq)
    scene.lose_node()
    scene.save_dir.mkdir()
    scene.save(500, salt="here")
    return scene


def state(scene: Scene, node_id: str | None) -> Path:
    """A state directory without a status."""
    place = scene.root / "state"
    place.mkdir()
    if node_id is not None:
        (place / "node_id").write_text(node_id)
    return place


@pytest.mark.parametrize("node_id", ["another", None])
def test_the_name_alone_proves_nothing(back: Scene, node_id: str | None) -> None:
    place = state(back, node_id)
    resumed = back.resume(dry_run=True, node_name="trainer", state_dir=place)
    assert resumed.path.name == "global_step900"
    assert any("nothing proves that global_step500 here is newer" in line for line in back.said)
    assert (place / "node_id").exists() is (node_id is not None)  # it is read, never made


def test_with_its_own_id_it_was_saved_again_here(back: Scene) -> None:
    place = state(back, "id-trainer")
    resumed = back.resume(dry_run=True, node_name="trainer", state_dir=place)
    assert resumed.path.name == "global_step500"
    assert not any("nothing proves" in line for line in back.said)


def test_a_damaged_manifest_proves_nothing(back: Scene) -> None:
    place = state(back, "id-trainer")
    for path in (back.nas / "_ckptd").rglob("*"):
        if path.is_file() and "global_step500" in str(path) and "commits" not in str(path):
            path.chmod(0o644)
            path.write_bytes(path.read_bytes().replace(b"id-trainer", b"id-trainee"))
    resumed = back.resume(dry_run=True, node_name="trainer", state_dir=place)
    assert resumed.path.name == "global_step900"
    assert any("nothing proves that global_step500" in line for line in back.said)
