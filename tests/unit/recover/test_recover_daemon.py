"""Resume beside a running daemon: neither undoes what the other did (H54, P9)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]
DERIVED = "_ckptd/derived/universal"


@contextmanager
def daemon(scene: Scene) -> Iterator[None]:
    """`ckptd run` on the scene."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd", "run", str(scene.save_dir), str(scene.nas), "--same-filesystem"],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"CKPTD_SETTLE": "0.5s", "CKPTD_MIN_FREE": "0%"},
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(200)


def wait_for(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    """Until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)


def test_the_daemon_leaves_a_restored_universal(scene: Scene) -> None:
    """The pointer names a newer form whose save is not on the node; it moves on only to a newer one."""
    for step in (2, 4):
        scene.save(step)
        scene.commit(f"global_step{step}", step)
    scene.commit_universal("global_step4", 4)
    (scene.save_dir / "global_step4").rename(scene.root / "gone")
    scene.resume(world_size=1)
    with daemon(scene):
        wait_for(lambda: (scene.save_dir / DERIVED / "global_step2" / "ckptd.json").exists())
        time.sleep(2)
        assert scene.pointer("latest_universal") == f"{DERIVED}/global_step4"
        assert (scene.save_dir / DERIVED / "global_step4" / "ckptd.json").exists()
        scene.save(6)
        wait_for(lambda: scene.pointer("latest_universal") == f"{DERIVED}/global_step6")


def test_resume_while_the_daemon_runs(scene: Scene) -> None:
    """It ships nothing twice, and what resume put back it knows again."""
    scene.save(2)
    with daemon(scene):
        wait_for(lambda: (scene.nas / "_ckptd/commits/global_step2~g1~universal.json").exists())
        (scene.save_dir / "global_step2").rename(scene.root / "gone")
        scene.tear(4)
        time.sleep(1)
        done = scene.resume(world_size=1)
        assert done.path.name == "global_step2"
        assert scene.resume().path == scene.save_dir / "global_step2"
        time.sleep(3)
        assert scene.pointer() == "global_step2"
        assert scene.aside() == ["global_step4.1", "latest.1"]
        assert sorted(p.name for p in (scene.nas / "_ckptd" / "commits").iterdir()) == [
            "global_step2~g1~universal.json",
            "global_step2~g1~zero.json",
        ]
