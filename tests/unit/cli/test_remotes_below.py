"""A folder above remotes is no job: those below it are named, with what to type (P18)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptd.cli.main import main
from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What an error says, in one line."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    assert ended.value.code in (66, 69)
    return " ".join(capsys.readouterr().err.replace("ckptd: ", "").split())


@pytest.mark.parametrize("verb", ["list", "verify", "status", "gc", "pin"])
def test_the_remote_below_is_named(scene: Scene, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    scene.commit(scene.save(8), 8)
    typed = "status" if verb == "status" else "list"
    rest = ["global_step8"] if verb == "pin" else []
    for above in (scene.nas.parent, scene.root):
        told = said(capsys, verb, above, *rest)
        assert told.endswith(f"the remote {scene.nas} lies below it: ckptd {typed} {scene.nas}"), told


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_several_are_named_and_what_is_none_is_not(
    scene: Scene, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.commit(scene.save(8), 8)
    for name in ("a job", "b", "none"):
        shutil.copytree(scene.nas, scene.nas.parent / name)
    shutil.rmtree(scene.nas.parent / "none" / "_ckptd")
    folder = f"{scheme}{scene.nas.parent}"
    told = said(capsys, "list", folder)
    assert f"remotes lie below it, {folder}/a job, {folder}/b, {folder}/run: ckptd list" in told
    assert f"'{folder}/a job'" in told
    assert "none" not in told.partition("remotes lie below")[2]


def test_where_none_lies_below_the_answer_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert "set CKPTD_URL to its remote" in said(capsys, "list", tmp_path)
    assert "is it mounted?" in said(capsys, "list", f"file://{tmp_path}")
