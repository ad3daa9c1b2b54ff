"""A recovery killed at any write leaves nothing that DeepSpeed would load wrongly, and goes on (P7)."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files
from tests.support.restore_scene import OPTIM, TAG, RestoreScene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.faults
FORM = f"_ckptd/derived/universal/{TAG}/ckptd.json"


def _dying_at(number: int, recover: Callable[[], object]) -> None:
    """Recover in this process and die at its `number`-th change of the disk."""
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
    recover()


def _run(number: int, recover: Callable[[], object]) -> int:
    process = multiprocessing.get_context("fork").Process(target=_dying_at, args=(number, recover))
    process.start()
    process.join()
    return process.exitcode or 0


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _pointer(place: Path, name: str) -> str | None:
    return (place / name).read_text() if (place / name).exists() else None


def _place(scene: RestoreScene, verb: str) -> Path:
    return scene.save_dir if verb == "resume" else scene.dir


@pytest.mark.parametrize(
    ("verb", "wish", "has_form", "least"),
    [
        ("resume", {}, False, 15),
        ("resume", {"world_size": 1}, True, 15),
        ("restore", {}, False, 3),
        ("restore", {"form": "universal"}, True, 3),
        ("restore", {"world_size": 3}, False, 3),
    ],
    ids=["resume zero", "resume universal", "restore zero", "restore universal", "restore converted"],
)
def test_killed_at_every_change(
    scene: RestoreScene, verb: str, wish: dict[str, Any], has_form: bool, least: int
) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    if has_form:
        scene.commit_universal(TAG, 10)
    good = scene.shards(TAG)
    place, recover = _place(scene, verb), partial(getattr(scene, verb), **wish)
    number, deaths, torn = 1, 0, None
    while True:
        if verb == "resume":
            scene.lose_node()
            scene.save_dir.mkdir()
            torn = scene.tear(20)
        code = _run(number, recover)
        assert _pointer(place, "latest") in (torn, TAG, None)
        if (place / TAG).exists() or _pointer(place, "latest") == TAG:
            assert _content(place / TAG) == good
        if _pointer(place, "latest_universal") is not None:
            assert (place / FORM).is_file()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        done = recover()
        assert done.path.is_dir()
        assert torn not in [path.name for path in place.iterdir()]
        if verb == "restore":
            assert not list((place / "_ckptd" / "staging").iterdir())
        assert recover().plan.steps == ()
        if verb == "restore":
            shutil.rmtree(place)
            number += 7 if "world_size" in wish else 1 if number < 20 else 9
        else:
            number += 1 if number < 25 else 7
    assert deaths >= least


@pytest.mark.parametrize("verb", ["resume", "restore"])
def test_a_killed_fetch_goes_on(scene: RestoreScene, verb: str) -> None:
    """What was staged is not read again (P7: at most one file)."""
    scene.save(10)
    scene.commit(TAG, 10)
    total = sum(map(len, scene.shards(TAG).values()))
    place, recover = _place(scene, verb), getattr(scene, verb)
    staging = place / "_ckptd" / "staging"

    def staged() -> dict[str, int]:
        found = [path for path in staging.rglob("*.pt") if ".ckptd" not in path.name]
        assert sum(path.stat().st_size for path in found) <= total
        return {path.name: path.stat().st_ino for path in found}

    if verb == "resume":
        scene.lose_node()
    number = 1
    while not staged():
        if verb == "resume" and place.exists():
            scene.lose_node()
        assert _run(number, recover) == -signal.SIGKILL
        number += 1
    kept = staged()
    assert _pointer(place, "latest") is None
    recover()
    now = {path.name: path.stat().st_ino for path in (place / TAG).iterdir()}
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
        code = _run(number, scene.restore)
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


@pytest.mark.parametrize("verb", ["resume", "restore"])
def test_the_ranks_of_a_node_may_all_call_it(scene: RestoreScene, verb: str) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    good = scene.shards(TAG)
    if verb == "resume":
        scene.lose_node()
    context = multiprocessing.get_context("fork")
    target = getattr(scene, verb)
    processes = [context.Process(target=target, kwargs={"world_size": 1}) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert (_place(scene, verb) / FORM).is_file()
    if verb == "resume":
        assert scene.shards(TAG) == good
        assert scene.aside() == []
