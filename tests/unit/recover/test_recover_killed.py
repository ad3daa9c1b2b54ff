"""A resume killed at any of its writes leaves nothing that DeepSpeed would load wrongly, and goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ckptd.base import files
from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.faults
TAG = "global_step10"
DERIVED = f"_ckptd/derived/universal/{TAG}"


def _killed_at(scene: Scene, number: int, world_size: int | None) -> None:
    """Run resume in this process and die at its `number`-th change of the disk."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapper

    for module, name in ((os, "rename"), (os, "fsync"), (os, "mkdir"), (os, "link"), (os, "unlink")):
        setattr(module, name, dying(getattr(module, name)))
    files.rename_noreplace = dying(files.rename_noreplace)
    scene.resume(world_size=world_size)


def _run(scene: Scene, number: int, world_size: int | None) -> int:
    process = multiprocessing.get_context("fork").Process(target=_killed_at, args=(scene, number, world_size))
    process.start()
    process.join()
    return process.exitcode or 0


@pytest.mark.parametrize("world_size", [None, 1])
def test_killed_at_every_change(scene: Scene, world_size: int | None) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    if world_size is not None:
        scene.commit_universal(TAG, 10)
    good = scene.shards(TAG)
    number, deaths = 1, 0
    while True:
        scene.lose_node()
        scene.save_dir.mkdir()
        torn = scene.tear(20)
        code = _run(scene, number, world_size)
        named = scene.pointer()
        assert named in (torn, TAG, None)
        if (scene.save_dir / TAG).exists():
            assert scene.shards(TAG) == good
        if named == TAG:
            assert scene.shards(TAG) == good
        if scene.pointer("latest_universal") is not None:
            assert (scene.save_dir / DERIVED / "ckptd.json").is_file()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        done = scene.resume(world_size=world_size)
        assert done.path.is_dir()
        assert torn not in [p.name for p in scene.save_dir.iterdir()]
        assert scene.resume(world_size=world_size).plan.steps == ()
        number += 1 if number < 25 else 7
    assert deaths >= 15


def test_a_killed_fetch_goes_on(scene: Scene) -> None:
    """What was staged is not read again (P7: at most one file)."""
    scene.save(10)
    scene.commit(TAG, 10)
    scene.lose_node()
    fresh = scene.resume().plan.fetches[0].copy.bytes
    scene.lose_node()
    number = 1
    while not any(
        p.is_file() and p.suffix == ".pt" for p in scene.staging.rglob("*") if ".ckptd" not in p.name
    ):
        number += 1
        if scene.save_dir.exists():
            scene.lose_node()
        _run(scene, number, None)
    staged = sum(p.stat().st_size for p in scene.staging.rglob("*.pt") if ".ckptd" not in p.name)
    assert 0 < staged <= fresh
    inodes = {p.name: p.stat().st_ino for p in scene.staging.rglob("*.pt") if ".ckptd" not in p.name}
    scene.resume()
    now = {p.name: p.stat().st_ino for p in (scene.save_dir / TAG).iterdir()}
    assert {name: now[name] for name in inodes} == inodes


def test_the_ranks_of_a_node_may_all_call_it(scene: Scene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    good = scene.shards(TAG)
    scene.lose_node()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=scene.resume, kwargs={"world_size": 1}) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert scene.shards(TAG) == good
    assert scene.aside() == []
