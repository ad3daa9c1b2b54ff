"""Where our folder lies: in save_dir, and beside it only where Accelerate would stumble over it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.base.owned_dirs import path_of
from ckptd.errors import RefusedError
from ckptd.storage.local import fs


def ensure(save_dir: Path) -> None:
    with files.opened_dir(save_dir) as fd:
        os.close(fs.ensure_ours(fd, fs.STAGING))


@pytest.mark.parametrize("names", [[], ["global_step2"], ["checkpoint_0"], ["checkpoint-2"], ["state"]])
def test_inside_save_dir(tmp_path: Path, names: list[str]) -> None:
    save_dir = tmp_path / "checkpoints"
    for name in ["", *names]:
        (save_dir / name).mkdir()
    if "state" in names:
        (save_dir / "state" / "pytorch_model").mkdir()
    ensure(save_dir)
    assert (save_dir / "_ckptd" / "staging").is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]
    assert path_of(save_dir, "_ckptd/state") == save_dir / "_ckptd" / "state"


def test_beside_what_accelerate_names_itself(tmp_path: Path) -> None:
    save_dir = tmp_path / "checkpoints"
    (save_dir / "checkpoint_0" / "pytorch_model").mkdir(parents=True)
    ensure(save_dir)
    beside = tmp_path / "_ckptd.checkpoints"
    assert (beside / "staging").is_dir()
    assert os.listdir(save_dir) == ["checkpoint_0"]
    assert path_of(save_dir, "_ckptd/state") == beside / "state"
    assert path_of(save_dir, "checkpoint_0") == save_dir / "checkpoint_0"
    with files.opened_dir(save_dir) as fd:
        (beside / "hold" / "a").mkdir(parents=True)
        (beside / "hold" / "a" / "b").write_bytes(b"1")
        assert fs.names_in(fd, fs.HOLD) == ["a"]
        assert files.read_beneath(fd, "_ckptd/hold/a/b", limit_bytes=10) == b"1"
        fs.remove_ours(fd, fs.HOLD, "a")
        assert fs.names_in(fd, fs.HOLD) == []


def test_one_that_is_inside_stays(tmp_path: Path) -> None:
    save_dir = tmp_path / "checkpoints"
    (save_dir / "_ckptd").mkdir(parents=True)
    (save_dir / "checkpoint_0" / "pytorch_model").mkdir(parents=True)
    ensure(save_dir)
    assert not (tmp_path / "_ckptd.checkpoints").exists()


def test_a_symlink_beside_is_not_followed(tmp_path: Path) -> None:
    save_dir, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    (save_dir / "checkpoint_0" / "pytorch_model").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "_ckptd.checkpoints").symlink_to(elsewhere)
    with pytest.raises(RefusedError, match="no folder"):
        ensure(save_dir)
    assert not list(elsewhere.iterdir())
