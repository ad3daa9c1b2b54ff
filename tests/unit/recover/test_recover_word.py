"""`resume` in layouts without `latest` tells the daemon what the run goes on from."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base import files
from ckptd.core.model.other_layouts import NOTHING_DECLARED
from ckptd.core.model.resume_marker import RESUMED_PATH, ResumeMarker, read_resume_marker
from ckptd.daemon.actions.local_deletion import _check_no_save_began
from ckptd.errors import SourceChanged
from ckptd.maintenance.uninstall import JobUninstall
from ckptd.recover.execute import StepExecution, write_resume_marker
from ckptd.storage.local.scan import scan
from tests.support.recover_scene import EXTRA, SHAPES, Scene, scene
from tests.support.synthetic import write_stage12
from tests.unit.recover.test_recover_daemon import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptd.recover.select.steps import Step

__all__ = ["scene"]


def save(scene: Scene, step: int) -> str:
    """As Hugging Face's Trainer, without `latest` in save_dir."""

    def change(model: dict[str, object]) -> None:
        model["ds_config"] = {"salt": str(step)}

    tag = f"checkpoint-{step}"
    write_stage12(
        scene.save_dir / tag / f"global_step{step}", SHAPES, scene.dp, step=step, change_model=change
    )
    (scene.save_dir / tag / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (scene.save_dir / EXTRA).write_text("{}")
    return tag


def word(scene: Scene) -> ResumeMarker | None:
    path = scene.save_dir / RESUMED_PATH
    return read_resume_marker(path.read_text()) if path.exists() else None


def test_the_word_is_there_before_the_folder_is(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may let a folder go as soon as it lies there."""
    for step in (10, 20):
        scene.commit(save(scene, step), step)
    shutil.rmtree(scene.save_dir / "checkpoint-10")
    seen: list[ResumeMarker | None] = []
    run = StepExecution.run

    def watched(execution: StepExecution, steps: Sequence[Step]) -> None:
        seen.append(word(scene))
        run(execution, steps)

    monkeypatch.setattr(StepExecution, "run", watched)
    scene.resume(tag="checkpoint-10", dry_run=True)
    assert word(scene) is None, "a dry run changes nothing"
    scene.resume(tag="checkpoint-10")
    assert seen[0] is not None
    assert (seen[0].tag, set(seen[0].written_ns)) == ("checkpoint-10", {"checkpoint-20"})


def test_the_next_resume_writes_over_it_and_the_same_one_does_not(scene: Scene) -> None:
    for step in (10, 20):
        scene.commit(save(scene, step), step)
    scene.resume(tag="checkpoint-10")
    first = (scene.save_dir / RESUMED_PATH).stat()
    scene.resume(tag="checkpoint-10")
    assert (scene.save_dir / RESUMED_PATH).stat().st_ino == first.st_ino
    (scene.save_dir / RESUMED_PATH).write_text("{torn")
    scene.resume()
    later = word(scene)
    assert later is not None
    assert (later.tag, set(later.written_ns)) == ("checkpoint-20", {"checkpoint-10", "checkpoint-20"})


def test_where_latest_names_it_there_is_no_word(scene: Scene) -> None:
    scene.save(10)
    scene.commit("global_step10", 10)
    scene.resume()
    assert word(scene) is None


def test_what_cannot_be_written_stops_no_resume(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save_dir that is mounted read-only: no daemon can remove anything there."""
    save(scene, 10)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(files, "write_atomic", refuse)
    assert scene.resume(remote=False).path.name == "checkpoint-10"
    assert any("Read-only file system" in line for line in scene.said)


def test_a_folder_that_went_before_the_word_was_there_is_fetched(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.commit(save(scene, 10), 10)

    def late(*args: Any) -> None:
        if word(scene) is None:
            shutil.rmtree(scene.save_dir / "checkpoint-10")
        write_resume_marker(*args)

    monkeypatch.setattr("ckptd.recover.resume.write_resume_marker", late)
    assert scene.resume().plan.fetches
    assert (scene.save_dir / "checkpoint-10" / "trainer_state.json").exists()


def test_a_removal_that_was_planned_before_the_word_is_not_begun(scene: Scene) -> None:
    save(scene, 10)
    save(scene, 20)
    with files.opened_dir(scene.save_dir) as fd:
        planned = scan(fd)
        _check_no_save_began(fd, planned, "checkpoint-10", "auto", NOTHING_DECLARED)
        scene.resume(remote=False, tag="checkpoint-10")
        with pytest.raises(SourceChanged, match="resume"):
            _check_no_save_began(fd, planned, "checkpoint-10", "auto", NOTHING_DECLARED)


@contextmanager
def daemon(scene: Scene) -> Iterator[None]:
    """`ckptd run` on the scene, with a limit of one."""
    command = [sys.executable, "-m", "ckptd", "run", str(scene.save_dir), str(scene.nas)]
    process = subprocess.Popen(
        [*command, "--same-filesystem", "--save-total-limit", "1"],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"CKPTD_SETTLE": "0.3s", "CKPTD_MIN_FREE": "0%", "CKPTD_EXISTING": "all"},
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(200)


def test_beside_a_daemon_it_stays_until_the_run_has_gone_on(scene: Scene) -> None:
    for step in (10, 20):
        scene.commit(save(scene, step), step)
    shutil.rmtree(scene.save_dir / "checkpoint-10")
    state = scene.save_dir / "_ckptd" / "state" / "status.json"

    def why(tag: str) -> str:
        status = json.loads(state.read_text()) if state.exists() else {"jobs": []}
        rows = [row for job in status["jobs"] for row in job["checkpoints"] if row["tag"] == tag]
        return "; ".join(rows[0]["keep"]) if rows and rows[0]["local"]["present"] else ""

    with daemon(scene):
        wait_for(lambda: "newest complete" in why("checkpoint-20"))
        scene.resume(tag="checkpoint-10")
        wait_for(lambda: re.search("resumed from", why("checkpoint-10")) is not None)
        assert (scene.save_dir / "checkpoint-10" / "trainer_state.json").exists()
        save(scene, 30)
        wait_for(lambda: not (scene.save_dir / "checkpoint-10").exists())
        assert (scene.nas / "_ckptd/commits/checkpoint-30~g1~zero.json").exists()


def test_it_goes_with_all_that_is_ours(scene: Scene) -> None:
    save(scene, 10)
    scene.resume(remote=False)
    removal = JobUninstall(scene.job(), None)
    try:
        gone = removal.carry_out(removal.plan(), with_uncommitted=False)
    finally:
        removal.close()
    assert [piece.path for piece in gone] == [RESUMED_PATH]
    assert sorted(p.name for p in scene.save_dir.iterdir()) == ["checkpoint-10", EXTRA]
