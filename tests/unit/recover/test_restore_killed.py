"""A restore killed at any write leaves nothing that DeepSpeed would load wrongly, and goes on (P7)."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ckptd.base import files
from tests.support.restore_scene import OPTIM, TAG, RestoreScene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.faults


def _killed_at(scene: RestoreScene, number: int, wish: dict[str, Any]) -> None:
    """Run restore in this process and die at its `number`-th change of the disk."""
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
    scene.restore(**wish)


def _run(scene: RestoreScene, number: int, wish: dict[str, Any]) -> int:
    process = multiprocessing.get_context("fork").Process(target=_killed_at, args=(scene, number, wish))
    process.start()
    process.join()
    return process.exitcode or 0


@pytest.mark.parametrize(
    "wish", [{}, {"form": "universal"}, {"world_size": 3}], ids=["zero", "universal", "converted"]
)
def test_killed_at_every_change(scene: RestoreScene, wish: dict[str, Any]) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    if "form" in wish:
        scene.commit_universal(TAG, 10)
    good = scene.shards(TAG)
    number, deaths = 1, 0
    while True:
        code = _run(scene, number, wish)
        if (scene.dir / TAG).exists():
            assert scene.got(TAG) == good
        if scene.named() is not None:
            assert scene.got(str(scene.named())) == good
        if scene.named("latest_universal") is not None:
            assert (scene.derived / "ckptd.json").is_file()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        done = scene.restore(**wish)
        assert done.path.is_dir()
        assert not list((scene.dir / "_ckptd" / "staging").iterdir())
        assert scene.restore(**wish).plan.steps == ()
        shutil.rmtree(scene.dir)
        number += 7 if "world_size" in wish else 1 if number < 20 else 9
    assert deaths >= 3


def test_a_killed_fetch_goes_on(scene: RestoreScene) -> None:
    """What was staged is not read again (P7: at most one file)."""
    scene.save(10)
    scene.commit(TAG, 10)
    staging = scene.dir / "_ckptd" / "staging"

    def staged() -> dict[str, int]:
        return {p.name: p.stat().st_ino for p in staging.rglob("*.pt") if ".ckptd" not in p.name}

    number = 1
    while not staged():
        assert _run(scene, number, {}) == -signal.SIGKILL
        number += 1
    kept = staged()
    assert scene.named() is None
    scene.restore()
    now = {p.name: p.stat().st_ino for p in (scene.dir / TAG).iterdir()}
    assert {name: now[name] for name in kept} == kept


def test_killed_while_a_bad_file_is_replaced(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    good = scene.shards(TAG)
    number, deaths = 1, 0
    scene.restore()
    while True:
        scene.flip(scene.dir / TAG / OPTIM.format(1))
        (scene.dir / TAG / OPTIM.format(0)).unlink()
        code = _run(scene, number, {})
        if code == 0:
            break
        assert code == -signal.SIGKILL
        scene.restore()
        assert scene.got(TAG) == good
        assert not list((scene.dir / "_ckptd" / "staging").iterdir())
        shutil.rmtree(scene.dir / "_ckptd" / "aside", ignore_errors=True)
        deaths += 1
        number += 1
    assert scene.got(TAG) == good
    assert deaths >= 8


def test_several_at_once(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=scene.restore, kwargs={"world_size": 1}) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (scene.derived / "ckptd.json").is_file()
