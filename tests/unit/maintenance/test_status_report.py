"""`ckptd.status`: what the screen says, as values, over every document of the gallery and of a remote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import ckptd
from ckptd.cli.status.command import show
from ckptd.errors import NotFoundError, RemoteUnreachable
from ckptd.maintenance.status import words
from ckptd.maintenance.status.report import reports_of
from ckptd.maintenance.status.verdict import exit_code, life_of
from ckptd.observe import status as st
from tests.support import status_gallery as gallery
from tests.support.restore_scene import RestoreScene, scene

__all__ = ["scene"]

DOCUMENTS = gallery.documents()
NOTHING: dict[str, Any] = dict.fromkeys(("retention", "watch", "live"), False) | {"html": None}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_says_what_the_screen_says(name: str) -> None:
    document = gallery.read(DOCUMENTS[name])
    life = life_of(document, gallery.NOW)
    reports = reports_of(document, gallery.NOW)
    for job, report in zip(document.jobs, reports, strict=True):
        assert report.headline == words.headline(job, life, gallery.NOW)
        assert report.exit_code == exit_code([job], is_alive=life.is_well)
        told = {(one.code, one.text, one.hint) for one in report.problems}
        assert {(one.code, one.text, one.next_step) for one in job.problems} <= told
        tags = [one.tag for one in job.checkpoints]
        held = {one.tag for remote in job.remotes for one in remote.held}
        assert [one.tag for one in report.checkpoints[: len(tags)]] == tags
        assert {one.tag for one in report.checkpoints} == {*tags, *held}
        assert repr(report).startswith(f"{job.name}  {report.verdict}  ")
        assert all(len(line) <= 100 for line in repr(report).splitlines()[1:] if "→" not in line) or (
            len({place for one in report.checkpoints for place in one.remotes}) > 1
        )


def test_an_upload_has_its_bytes_and_ends_with_the_daemon() -> None:
    (running,) = reports_of(gallery.read(DOCUMENTS["behind"]), gallery.NOW)
    (upload,) = running.uploads
    assert (upload.tag, upload.form, upload.remote) == ("global_step4500", "zero", "s3")
    assert (upload.bytes_done, upload.bytes_total, upload.eta_seconds) == (7_500_000_000, 12_000_000_000, 240)
    assert running.checkpoints[0].remotes == {"s3": {"zero": "uploading", "universal": "waiting"}}
    assert running.safe is not None
    assert (running.safe.step, running.steps_at_risk) == (4000, 500)
    (dead,) = reports_of(gallery.read(DOCUMENTS["daemon dead"]), gallery.NOW)
    assert dead.verdict == "NOT WATCHED"
    assert not dead.uploads
    assert dead.checkpoints[0].remotes["s3"]["zero"] == "not sent"
    assert "ckptd run --job llama.toml" in dead.problems[0].hint


def test_what_to_type_for_a_checkpoint_is_in_its_text() -> None:
    (report,) = reports_of(gallery.read(DOCUMENTS["something to say of checkpoints"]), gallery.NOW)
    assert "→ ckptd accept llama global_step4200" in repr(report)


def test_text_from_outside_moves_no_cursor() -> None:
    evil = "evil\x1b[2J\n"
    (report,) = reports_of(
        gallery.read(st.Status(
            generated_at=gallery.before(3),
            daemon=gallery.daemon(),
            jobs=(gallery.behind(name=evil, problems=(gallery.problem("x", "note", evil, evil),)),),
        )),
        gallery.NOW,
    )  # fmt: skip
    assert "\x1b" not in repr(report)
    assert report.name == evil, "values are as they are"


def test_of_this_node_by_every_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, etc = tmp_path / "state", tmp_path / "etc"
    for name in ("llama", "qwen"):
        (state / name).mkdir(parents=True)
        (tmp_path / name).mkdir()
        (etc / "jobs.d").mkdir(parents=True, exist_ok=True)
        job = gallery.job(name, save_dir=str(tmp_path / name))
        document = st.Status(generated_at=st.rfc3339(time.time()), daemon=gallery.daemon(), jobs=(job,))
        (state / name / "status.json").write_text(json.dumps(gallery.plain(document)))
        (etc / "jobs.d" / f"{name}.toml").write_text(f'save_dir = "{tmp_path / name}"\n')
    (etc / "ckptd.toml").write_text(f'state_dir = "{state}"\n')
    assert [one.name for one in ckptd.status(config_dir=etc)] == ["llama", "qwen"]
    for named in ("llama", etc / "jobs.d" / "llama.toml", str(tmp_path / "llama")):
        report = ckptd.status(named, config_dir=etc)
        assert (report.name, report.save_dir, report.url) == ("llama", str(tmp_path / "llama"), None)
        options = NOTHING | {"as_json": False, "interval": 2.0, "state_dir": None, "config_dir": str(etc)}
        assert show(str(named), None, **options) == report.exit_code == 0
        assert f"● {report.verdict}" in capsys.readouterr().out
    assert ckptd.status("qwen", state_dir=state).name == "qwen"
    with pytest.raises(NotFoundError) as caught:
        ckptd.status(tmp_path / "nowhere")
    assert caught.value.hint


def test_of_a_remote(scene: RestoreScene, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RemoteUnreachable):
        ckptd.status(f"file://{scene.nas}")
    for step in (5, 10):
        scene.commit(scene.save(step), step)
    report = ckptd.status(scene.nas)
    assert (report.verdict, report.exit_code, report.url) == ("SAFE", 0, str(scene.nas))
    assert report.safe is not None
    assert (report.safe.step, report.safe.tag) == (10, "global_step10")
    assert [one.step for one in report.checkpoints] == [10, 5]
    assert list(report.checkpoints[0].remotes.values()) == [{"zero": "committed"}]
    options = NOTHING | {"as_json": False, "interval": 2.0, "state_dir": None, "config_dir": None}
    assert show(str(scene.nas), None, **options) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{report.name} ● SAFE {report.clauses[0].rpartition(' committed')[0]}" in said
    assert all(clause in said for clause in report.clauses if "nodes" in clause)
