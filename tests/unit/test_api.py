"""The functions of `ckptd.api`: the examples in their docstrings, their errors, and what they import."""

from __future__ import annotations

import doctest
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd import api
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotFoundError,
    NothingCommitted,
    RemoteUnreachable,
    TargetExists,
    UsageError,
)
from ckptd.maintenance.verify import Slice
from tests.support.restore_scene import OPTIM, RestoreScene, scene

__all__ = ["scene"]

JOB = """
save_dir = "{root}/nvme/run"
[[remote]]
name = "nas"
url = "{root}/nas/run"
same_filesystem = true
[[remote]]
name = "far"
url = "{root}/far/run"
same_filesystem = true
"""


@pytest.mark.parametrize("name", ["checkpoints", "convert", "inspect", "restore", "resume", "verify"])
def test_each_example_is_true(scene: RestoreScene, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    scene.commit(scene.save(5), 5)
    monkeypatch.chdir(scene.root)
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(api, name), name, globs={"api": api})
    assert found.examples, name
    assert doctest.DocTestRunner().run(found).failed == 0


def test_what_is_damaged_is_told_and_not_restored(scene: RestoreScene, tmp_path: Path) -> None:
    scene.commit(scene.save(5), 5)
    url, tag = str(scene.nas), "global_step5"
    assert [row.verdict for row in api.verify(url, read=Slice())[0].commits] == ["good"]
    scene.turn_a_byte(tag)
    (verified,) = api.verify(url, tag, read=Slice())
    assert OPTIM.format(0) in str(verified.commits[0].differences)
    with pytest.raises(DamagedError) as caught:
        api.restore(url, tmp_path / "there", tag)
    assert caught.value.exit_code == 65
    assert caught.value.hint


def test_errors_are_those_of_the_commands(scene: RestoreScene, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        api.inspect(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a URL"):
        api.inspect("s3://bucket/run")
    with pytest.raises(RemoteUnreachable):
        api.checkpoints(str(scene.nas))
    scene.save(5)
    scene.ground()
    with pytest.raises(NothingCommitted):
        api.restore(str(scene.nas), tmp_path / "there")
    (tmp_path / "taken").mkdir()
    with pytest.raises(TargetExists):
        api.convert(scene.save_dir / "global_step5", tmp_path / "taken")


def test_a_remote_that_does_not_answer_is_raised_unless_it_is_asked_for(scene: RestoreScene) -> None:
    scene.commit(scene.save(5), 5)
    job = scene.root / "run.toml"
    job.write_text(JOB.format(root=scene.root))
    for call in (api.checkpoints, api.verify):
        with pytest.raises(RemoteUnreachable):
            call(str(job))
        failures: dict[str, CkptdError] = {}
        said: list[str] = []
        (found,) = call(str(job), failures=failures, say=said.append)
        assert (found.name, list(failures)) == ("nas", ["far"])
        assert any("far" in line for line in said)


def test_resume_takes_the_place_of_what_is_lost(scene: RestoreScene) -> None:
    scene.commit(scene.save(5), 5)
    shutil.rmtree(scene.save_dir / "global_step5")
    planned = api.resume(str(scene.save_dir), str(scene.nas), dry_run=True)
    assert planned.plan.fetches
    assert not planned.path.exists()
    done = api.resume(str(scene.save_dir), str(scene.nas), world_size=4)
    assert (done.path / "zero").is_dir(), "another grid: the universal form"


def test_import_is_light() -> None:
    code = "import sys, ckptd.api; print(sorted({'pydantic', 'torch', 'botocore'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
