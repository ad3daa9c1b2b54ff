"""Repair cut short at any point leaves nothing worse, and is finished by the next call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.repair_scene import RepairScene, built, scene
from tests.support.restore_scene import MODEL, OPTIM, TAG

__all__ = ["built", "scene"]

FULL = os.environ.get("CKPTD_FULL") == "1"

DYING = """
import os, sys
from pathlib import Path
from tests.support.repair_scene import RepairScene
count = int(sys.argv[2])
def watch(event, args):
    global count
    # the system calls that change names, here and in the remote
    if event in ("os.rename", "os.remove", "os.link") or event.startswith("ctypes.call_function"):
        count -= 1
        if count < 0:
            os.kill(os.getpid(), 9)
here = RepairScene(Path(sys.argv[1]))
import ckptd.base.files as files
import ckptd.recover.select.inventory as inventory
from ckptd.storage.stores.open import open_store
# the directory is served in this process, whose calls are counted
inventory.open_apart = lambda name, url, access, owner="": open_store(url, access=access)
real = files._renameat2
def renameat2(*args):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), 9)
    real(*args)
files._renameat2 = renameat2
sys.addaudithook(watch)
here.repair()
"""


def tree(root: Path) -> dict[str, bytes]:
    """Files by relative name, without our own folders."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and "_ckptd" not in p.relative_to(root).parts
    }


@pytest.mark.parametrize("where", ["here", "nas"])
def test_killed_between_any_two_steps(scene: RepairScene, where: str) -> None:
    """The intact copies stay as they are; a name here never goes; the next call ends it."""
    good = {"here": tree(scene.save_dir), "nas": tree(scene.nas), "nas2": tree(scene.nas2)}
    roots = {"here": scene.save_dir, "nas": scene.nas, "nas2": scene.nas2}
    bad = scene.shard(1, root=roots[where])
    scene.flip(bad)
    scene.quiet()
    rotten = bad.read_bytes()
    kills = 0
    for count in range(0, 60, 1 if FULL else 3):
        done = subprocess.run(
            [sys.executable, "-c", DYING, str(scene.root), str(count)], check=False, capture_output=True
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
        for name, root in roots.items():
            if name != where:
                assert tree(root) == good[name]
        if where == "here":
            assert bad.read_bytes() in (rotten, good["here"][f"{TAG}/{bad.name}"])
            assert rotten in [bad.read_bytes(), *_aside(scene)]
        else:
            # the committed bytes or, when the bad ones make way, their spare lie in this remote too
            held = [p.read_bytes() for p in (scene.nas / "_ckptd" / "spare").rglob("*") if p.is_file()]
            assert bad.exists() or good["nas"][f"{TAG}/{bad.name}"] in held
        scene.quiet()
    assert kills > (3 if FULL else 1)
    assert tree(roots[where]) == good[where]
    assert scene.repair().rows == []
    assert not list((scene.nas / "_ckptd").glob("spare/*"))


def _aside(scene: RepairScene) -> list[bytes]:
    return [(scene.save_dir / "_ckptd" / "aside" / name).read_bytes() for name in scene.aside()]


FILES = [
    f"{tag}/{name}" for tag in ("global_step5", TAG) for name in (MODEL, OPTIM.format(0), OPTIM.format(1))
]
PLACES = [(place, name) for place in ("here", "nas", "nas2") for name in FILES]


@given(hurt=st.dictionaries(st.sampled_from(PLACES), st.sampled_from(["gone", "flip"]), max_size=8))
@settings(
    max_examples=80 if FULL else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_intact_file_is_ever_touched(
    built: Path, tmp_path_factory: pytest.TempPathFactory, hurt: dict[tuple[str, str], str]
) -> None:
    """Whatever is damaged where: intact files keep bytes and inode, and what any place holds is repaired."""
    root = tmp_path_factory.mktemp("any")
    shutil.copytree(built, root, dirs_exist_ok=True)
    here = RepairScene(root)
    roots = {"here": here.save_dir, "nas": here.nas, "nas2": here.nas2}
    paths = {(place, name): roots[place] / name for place, name in PLACES}
    good = {name: paths["here", name].read_bytes() for name in FILES}
    for (place, name), how in hurt.items():
        path = paths[place, name]
        path.unlink() if how == "gone" else here.flip(path)
    here.quiet()
    intact = {key: path.stat() for key, path in paths.items() if key not in hurt}
    done = here.repair()
    for key, status in intact.items():
        now = paths[key].stat()
        assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
        assert paths[key].read_bytes() == good[key[1]]
    lost = {name for name in FILES if all((place, name) in hurt for place in roots)}
    for (_, name), path in paths.items():
        if name not in lost:
            assert path.read_bytes() == good[name]
    assert done.exit_code() == (65 if lost else 0)
    shutil.rmtree(root)
