"""A job that went to another node and comes back, a copy of an old checkpoint: no rewinds (P9, adr/0003)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support.recover_scene import Scene


def look_once(scene: Scene, nas: Path, *words: str) -> None:
    """A daemon comes, ships what is there, and goes; or another command, by its `words`."""
    job_file = scene.root / "run.toml"
    job_file.write_text(
        f'name = "run"\nsave_dir = "{scene.save_dir}"\nnode_name = "{scene.node}"\nsettle = "0.3s"\n'
        'existing = "all"\n'
        '[local]\nmin_free = "0%"\nforms = []\nsave_total_limit = 2\n'
        f'[[remote]]\nname = "nas"\nurl = "{nas}"\nforms = ["zero"]\nsame_filesystem = true\n'
        "save_total_limit = 1\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    command = [sys.executable, "-m", "ckptd", *(words or ("run", "--once", "--job")), str(job_file)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=200)


def lying_here(scene: Scene) -> set[str]:
    """Checkpoints in save_dir."""
    return {path.name for path in scene.save_dir.glob("global_step*")}


def look_until(scene: Scene, wanted: set[str]) -> None:
    """What may go, goes: a daemon that comes for a moment need not get to it."""
    deadline = time.monotonic() + 100
    while lying_here(scene) != wanted:
        assert time.monotonic() < deadline, lying_here(scene)
        look_once(scene, scene.nas)


def test_the_newest_of_another_node_stays_the_newest(tmp_path: Path) -> None:
    """Node a dies before its daemon sees 550; b goes on from 400 to 900, and the job comes back to a."""
    a, b = Scene(tmp_path / "a", node="a"), Scene(tmp_path / "b", node="b")
    a.save(400)
    look_once(a, a.nas)
    a.save(550)
    look_once(b, a.nas, "resume")
    b.save(900)
    look_once(b, a.nas)
    for _ in range(2):
        assert (a.nas / "latest").read_text() == "global_step900"
        assert (a.nas / "_ckptd/commits/global_step900~g1~zero.json").exists()
        look_once(a, a.nas)
    assert (a.nas / "latest").read_text() == "global_step900"
    assert a.resume().path.name == "global_step900"


def test_a_copy_of_an_older_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    """Whether its original is still here or not; it stays until the next save."""
    node, copies = Scene(tmp_path), {"global_step300_keep", "global_step800_keep"}
    for step in (300, 800, 900):
        node.save(step)
        if step == 300:
            shutil.copytree(node.save_dir / "global_step300", tmp_path / "keep")
        look_once(node, node.nas)
    look_until(node, {"global_step800", "global_step900"})
    shutil.copytree(tmp_path / "keep", node.save_dir / "global_step300_keep")
    shutil.copytree(node.save_dir / "global_step800", node.save_dir / "global_step800_keep")
    for _ in range(2):
        look_once(node, node.nas)
        assert (node.nas / "latest").read_text() == "global_step900"
        assert lying_here(node) > copies
    assert node.resume(dry_run=True).path.name == "global_step900"
    node.save(1000)
    look_until(node, {"global_step900", "global_step1000"})
    assert (node.nas / "latest").read_text() == "global_step1000"
