"""Committed checkpoints through fsspec: what is listed, that nothing is written, that damage is an error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path

import fsspec
import pytest

from ckptd.errors import DamagedError, NotFoundError
from ckptd.filesystem import CheckpointFileSystem
from tests.support.restore_scene import MODEL, OPTIM, TAG, RestoreScene, scene

__all__ = ["scene"]


def opened(scene: RestoreScene, **options: str) -> CheckpointFileSystem:
    """A file system of its own: fsspec hands out the same one again."""
    found: CheckpointFileSystem = fsspec.filesystem(
        "ckptd", url=str(scene.nas), skip_instance_cache=True, **options
    )
    return found


def test_what_is_committed_is_there_and_nothing_else(scene: RestoreScene) -> None:
    scene.two()
    scene.commit_weights(TAG, 10)
    scene.save(15)
    there = opened(scene)
    weights = f"{TAG}_weights-fp32"
    assert there.ls("", detail=False) == [TAG, weights, "global_step5"]
    assert {Path(one).name for one in there.find(TAG)} == scene.shards(TAG).keys()
    assert f"{weights}/model.safetensors" in there.find("")
    row = there.info(f"{TAG}/{MODEL}")
    assert (row["type"], row["size"]) == ("file", (scene.save_dir / TAG / MODEL).stat().st_size)
    assert there.isdir(TAG)
    assert not there.exists("global_step15")
    assert not there.exists(f"{TAG}/nothing.pt")
    with pytest.raises(FileNotFoundError):
        there.open("global_step15/x")


def test_bytes_are_those_that_were_saved(scene: RestoreScene, tmp_path: Path) -> None:
    """Whole, in parts, backwards, copied, by a chained path, and in a process that was forked or sent it."""
    scene.two()
    saved = (scene.save_dir / TAG / MODEL).read_bytes()
    there, path = opened(scene), f"{TAG}/{MODEL}"
    assert there.cat_file(path) == saved
    assert there.cat_file(path, 10, 30) == saved[10:30]
    with there.open(path) as stream:
        stream.seek(-7, os.SEEK_END)
        assert stream.read() == saved[-7:]
        stream.seek(3)
        assert stream.read(5) == saved[3:8]
    there.get(TAG, str(tmp_path / "copy"), recursive=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()} == scene.shards(TAG)
    done = scene.restore(TAG)
    assert {p.name: p.stat().st_mode for p in (tmp_path / "copy").iterdir()} == {
        p.name: p.stat().st_mode for p in done.path.iterdir()
    }
    with fsspec.open(f"ckptd://{path}::file://{scene.nas}") as stream:
        assert stream.read() == saved
    assert pickle.loads(pickle.dumps(there)).cat_file(path) == saved
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(there.cat_file, [path] * 4) == [saved] * 4


def test_a_large_file_lies_in_a_temporary_file_while_it_is_open(
    scene: RestoreScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.filesystem._IN_MEMORY_BYTES", 100)
    scene.two()
    with opened(scene).open(f"{TAG}/{MODEL}") as stream:
        assert stream.fileno() > 2
        assert stream.read() == (scene.save_dir / TAG / MODEL).read_bytes()


def test_a_damaged_file_is_an_error_before_its_first_byte(scene: RestoreScene, tmp_path: Path) -> None:
    scene.two()
    scene.turn_a_byte(TAG)
    there, path = opened(scene), f"{TAG}/{OPTIM.format(0)}"
    with pytest.raises(DamagedError, match="is not what was committed"):
        there.open(path)
    with pytest.raises(DamagedError):
        there.cat_file(path, 0, 4)
    with pytest.raises(DamagedError):
        there.get_file(path, str(tmp_path / "copy"))
    assert list(tmp_path.glob("copy*")) == []
    assert there.cat_file(f"{TAG}/{MODEL}")


def test_of_a_tag_that_was_saved_again_the_newest_is_shown(scene: RestoreScene) -> None:
    scene.save(10, salt="first")
    scene.commit(TAG, 10)
    first = (scene.save_dir / TAG / MODEL).read_bytes()
    scene.save(10, salt="second")
    there = opened(scene)
    assert there.cat_file(f"{TAG}/{MODEL}") == first
    scene.commit(TAG, 10, save_seq=2, generation=2)
    assert there.cat_file(f"{TAG}/{MODEL}") == first, "as it was listed"
    there.invalidate_cache()
    assert there.ls("", detail=False) == [TAG]
    assert there.cat_file(f"{TAG}/{MODEL}") == (scene.save_dir / TAG / MODEL).read_bytes() != first


def test_runs_are_apart(scene: RestoreScene) -> None:
    scene.run_id = "aa" * 16
    scene.two()
    assert opened(scene, run="aa").ls("", detail=False) == [TAG, "global_step5"]
    with pytest.raises(NotFoundError, match="bb"):
        opened(scene, run="bb").ls("")


def test_nothing_is_written(scene: RestoreScene) -> None:
    scene.two()
    there = opened(scene)
    before = {p: p.stat().st_mtime_ns for p in scene.nas.rglob("*") if "probe" not in p.name}
    for verb, arguments in (
        ("open", (f"{TAG}/new", "wb")),
        ("pipe_file", (f"{TAG}/{MODEL}", b"x")),
        ("rm_file", (f"{TAG}/{MODEL}",)),
        ("cp_file", (f"{TAG}/{MODEL}", f"{TAG}/copy")),
    ):
        with pytest.raises(NotImplementedError):
            getattr(there, verb)(*arguments)
    assert {p: p.stat().st_mtime_ns for p in scene.nas.rglob("*") if "probe" not in p.name} == before
