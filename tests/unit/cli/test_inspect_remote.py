"""`ckptd inspect` of a directory remote judges by its COMMITs: times there are those of the upload (P3)."""

from __future__ import annotations

import os

from ckptd.maintenance.inspection import inspect_folder
from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


def test_an_upload_that_paused_is_no_doubt(scene: Scene) -> None:
    """A committed checkpoint was called suspect, as one file had come 51 seconds after another."""
    scene.commit(scene.save(2), 2)
    folder = scene.nas / "global_step2"
    for number, file in enumerate(sorted(folder.rglob("*.pt"))):
        os.utime(file, (1_700_000_000 + 900 * number,) * 2)
    for path in (scene.nas, folder):
        (seen,) = inspect_folder(path).checkpoints
        assert (seen.state, seen.reason, seen.is_complete) == ("complete", None, True)
        assert seen.saved_seconds_apart is None


def test_what_no_commit_lists_is_not_whole(scene: Scene) -> None:
    scene.commit(scene.save(2), 2)
    for commit in (scene.nas / "_ckptd" / "commits").iterdir():
        commit.unlink()
    (seen,) = inspect_folder(scene.nas / "global_step2").checkpoints
    assert not seen.is_complete
    assert "no COMMIT lists it" in str(seen.reason)


def test_another_file_than_the_commit_lists_is_damage(scene: Scene) -> None:
    scene.commit(scene.save(2), 2)
    other = scene.save(4)
    name = next(f.name for f in (scene.save_dir / other).glob("*optim_states.pt"))
    (scene.nas / "global_step2" / name).write_bytes((scene.save_dir / other / name).read_bytes())
    (seen,) = inspect_folder(scene.nas / "global_step2").checkpoints
    assert not seen.is_complete
