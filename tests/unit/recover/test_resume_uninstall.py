"""`ckptd uninstall` after `ckptd resume`: what was fetched or made of it is known by what it was made of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


def uninstall(scene: Scene, *, url: bool = True) -> subprocess.CompletedProcess[str]:
    """Without a word of what may be lost."""
    environ = {**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent"} | (
        {"CKPTD_URL": str(scene.nas)} if url else {}
    )
    command = [sys.executable, "-m", "ckptd", "uninstall", str(scene.save_dir)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)


def fetched(scene: Scene, *, universal: bool) -> None:
    """A new node, for another number of ranks: the form is made here, or fetched as it lies there."""
    scene.commit(scene.save(8), 8)
    if universal:
        scene.commit_universal("global_step8", 8)
    scene.lose_node()
    assert scene.resume(world_size=3).path.parts[-3:] == ("derived", "universal", "global_step8")


@pytest.mark.parametrize("universal", [True, False], ids=["fetched", "made here"])
def test_what_a_remote_holds_goes(scene: Scene, universal: bool) -> None:
    fetched(scene, universal=universal)
    done = uninstall(scene)
    assert done.returncode == 0, done
    assert not (scene.save_dir / "_ckptd").exists()


def test_what_was_made_of_shards_that_lie_here_goes_without_a_remote(scene: Scene) -> None:
    fetched(scene, universal=False)
    done = uninstall(scene, url=False)
    assert (done.returncode, "made of what lies in save_dir" in done.stdout) == (0, True), done
    assert (scene.save_dir / "global_step8").is_dir(), "what the trainer loads stays"


@pytest.mark.parametrize("why", ["no url", "away", "another save", "other shards here", "weights alone"])
def test_what_no_remote_is_seen_to_hold_is_refused(scene: Scene, why: str) -> None:
    """Nothing that may be the last copy goes without a word."""
    if why == "weights alone":
        zero = scene.commit(scene.save(8), 8)
        scene.commit_weights("global_step8", 8)
        scene.resume(world_size=3)
        scene.commit(scene.save(16), 16)
        scene.retire(zero)
    else:
        fetched(scene, universal=why != "other shards here")
    shutil.rmtree(scene.save_dir / "global_step8", ignore_errors=True)
    if why == "away":
        scene.nas.rename(scene.root / "elsewhere")
    elif why == "another save":  # of the same name, and of the same sizes
        shutil.rmtree(scene.nas)
        scene.commit(scene.save(8, salt="x"), 8)
        shutil.rmtree(scene.save_dir / "global_step8")
    elif why == "other shards here":
        scene.save(8, salt="x")
    done = uninstall(scene, url=why not in ("no url", "other shards here"))
    assert (done.returncode, "nothing was removed" in done.stderr) == (65, True), done
    assert (scene.save_dir / "_ckptd" / "derived" / "universal" / "global_step8").is_dir()
