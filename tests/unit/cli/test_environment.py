"""`CKPTD_*` for a single job: what is run, asked and resumed without a word; and --config-dir everywhere."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.daemon.run import load
from ckptd.cli.verbs import VERBS
from ckptd.config import environment
from ckptd.errors import UsageError
from tests.support.repair_scene import RepairScene, built, run_here, scene
from tests.support.restore_scene import TAG

__all__ = ["built", "scene"]

NO_JOB = ("run", "init", "inspect", "convert")
"""Verbs that read no job file by name (`run` has --config-dir of its own)."""


@pytest.fixture
def single(scene: RepairScene, monkeypatch: pytest.MonkeyPatch) -> RepairScene:
    """The job is known by the environment alone."""
    scene.quiet()
    monkeypatch.setenv("CKPTD_SAVE_DIR", str(scene.save_dir))
    monkeypatch.setenv("CKPTD_URL", str(scene.nas))
    monkeypatch.setenv("CKPTD_REMOTE_SAME_FILESYSTEM", "true")
    monkeypatch.setenv("CKPTD_MIN_FREE", "0%")
    monkeypatch.setenv("CKPTD_NAME", "run")
    monkeypatch.setenv("CKPTD_CONFIG_DIR", str(scene.root / "conf"))
    return scene


def job_file(scene: RepairScene, folder: Path) -> Path:
    """The scene's job in a configuration directory."""
    (folder / "jobs.d").mkdir(parents=True)
    path = folder / "jobs.d" / "run.toml"
    path.write_text(
        f'save_dir = "{scene.save_dir}"\n[local]\nmin_free = "0%"\n[[remote]]\nname = "nas"\n'
        f'url = "{scene.nas}"\nsame_filesystem = true\n'
    )
    return path


def test_what_is_run(single: RepairScene, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = load(os.environ).jobs
    assert (job.save_dir, job.remotes[0].url, job.name) == (single.save_dir, str(single.nas), "run")
    other = job_file(single, single.root / "conf")
    # what the command line says wins
    assert load(os.environ, jobs=[other]).jobs[0].file == other
    assert load(os.environ, config_dir=single.root / "none").jobs == ()
    (elsewhere,) = load(os.environ, save_dir=str(single.root / "else"), url=str(single.nas2)).jobs
    assert (elsewhere.save_dir, elsewhere.remotes[0].url) == (single.root / "else", str(single.nas2))
    monkeypatch.setenv("CKPTD_JOB", "run")
    with pytest.raises(UsageError, match="exclude each other"):
        load(os.environ)
    monkeypatch.delenv("CKPTD_SAVE_DIR")
    assert load(os.environ).jobs[0].file == other
    monkeypatch.setenv("CKPTD_JOB", str(single.save_dir / TAG))
    with pytest.raises(UsageError, match="names no job file"):
        load(os.environ)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"save_total_limit": 2}, "save_total_limit = 2"),
        ({"same_filesystem": True}, "same_filesystem = true"),
    ],
)
def test_what_a_job_file_says_is_not_taken_from_the_command_line(
    single: RepairScene, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], line: str
) -> None:
    """It would be ignored without a word; the job of the environment has no file, so it takes both."""
    path = job_file(single, single.root / "conf")
    named: list[dict[str, Any]] = [{"jobs": [path]}, {"config_dir": single.root / "conf"}]
    for words in named:
        with pytest.raises(UsageError, match="goes with SAVE_DIR URL alone") as refused:
            load({}, **words, **option)
        assert line in (refused.value.hint or "")
    assert len(load(os.environ, **option).jobs) == 1


def test_a_job_is_run_by_its_name_and_not_taken_for_a_save_dir(single: RepairScene) -> None:
    conf = single.root / "conf"
    path = job_file(single, conf)
    environ = {"CKPTD_CONFIG_DIR": str(conf)}
    assert load(environ, jobs=[Path("run")]).jobs[0].file == path
    for word in ("run", str(path)):
        with pytest.raises(UsageError, match="is a job, no SAVE_DIR") as refused:
            load(environ, save_dir=word)
        assert refused.value.hint == f"ckptd run {word}"
    # with a URL it is a directory that is still to come
    assert load(environ, save_dir="run", url=str(single.nas2)).jobs[0].file is None
    ((_, unknown),) = load(environ, jobs=[Path("nobody")]).problems
    assert "no file nobody" in unknown.message
    path.write_text("save_dri = 1\n")
    ((wrong, error),) = load(environ, jobs=[Path("run")]).problems
    assert (wrong, "did you mean" in (error.hint or "")) == (path, True)
    with pytest.raises(UsageError, match="there is no URL") as refused:
        load(environ, save_dir=str(single.save_dir), verb="check")
    assert (refused.value.hint or "").startswith("ckptd check SAVE_DIR URL")


def test_what_is_asked(
    single: RepairScene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ("list",),
        ("verify",),
        ("gc", "--dry-run"),
        ("resume", "--dry-run"),
        ("restore", "--to", single.root / "to", "--dry-run"),
        ("check", "--no-probe"),
    ):
        done = run_here(capsys, *command)
        assert done.returncode == 0, (command, done)
        expected = {"list": TAG, "verify": TAG, "resume": TAG, "check": single.nas}.get(str(command[0]), "")
        assert str(expected) in done.stdout, (command, done.stdout)
    daemon = {"alive": False, "pid": 1, "started_at": ""}
    status = {"generated_at": "2026-01-01T00:00:00+00:00", "daemon": daemon, "jobs": []}
    state = single.save_dir / "_ckptd" / "state"
    state.mkdir(parents=True)
    (state / "status.json").write_text(json.dumps(status))
    assert json.loads(run_here(capsys, "status", "--json").stdout)["generated_at"] == status["generated_at"]
    monkeypatch.delenv("CKPTD_SAVE_DIR")
    assert TAG in run_here(capsys, "list").stdout
    monkeypatch.delenv("CKPTD_URL")
    assert run_here(capsys, "list").returncode == 2


def test_a_variable_that_means_nothing_for_this_url(
    single: RepairScene,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Set for S3; the URL of the command line is a directory: said once, not used, no refusal."""
    environment._say_once.cache_clear()
    monkeypatch.setenv("CKPTD_REMOTE_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("CKPTD_REMOTE_PART_SIZE", "64MiB")
    monkeypatch.setenv("CKPTD_REMOTE_CREDENTIALS", "profile:train")
    with caplog.at_level(logging.WARNING, logger="ckptd.config"):
        done = run_here(capsys, "resume", single.save_dir, single.nas, "--dry-run")
    assert done.returncode == 0, done.stderr
    said = sorted(record.getMessage() for record in caplog.records)
    assert [text.split(" ")[1] for text in said] == [
        f"CKPTD_REMOTE_{key}" for key in ("CREDENTIALS", "ENDPOINT_URL", "PART_SIZE")
    ]
    assert all(str(single.nas) in text and "not used" in text for text in said)
    found = environment.remote_keys_from_environment(
        {"CKPTD_REMOTE_ENDPOINT_URL": "http://x"}, "s3://bucket/x"
    )
    assert found == {"endpoint_url": "http://x"}
    # in a job file it is a mistake
    path = job_file(single, single.root / "conf")
    path.write_text(path.read_text() + 'endpoint_url = "http://127.0.0.1:9"\n')
    assert run_here(capsys, "list", path).returncode == 78


@pytest.mark.parametrize("command", ["list", "verify", "resume"])
def test_a_remote_without_a_name_is_called_by_its_url(
    single: RepairScene, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (single.nas / "_ckptd" / "remote.json").unlink()
    done = run_here(capsys, command)
    assert "remote remote" not in done.stderr
    assert str(single.nas) in done.stderr
    assert not re.search(r"ckptd: remote: ", done.stderr), done.stderr


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in NO_JOB])
def test_every_verb_that_reads_job_files_takes_their_place(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--config-dir" in run_here(capsys, verb, "--help").stdout


def test_a_job_by_name_in_another_place(scene: RepairScene, capsys: pytest.CaptureFixture[str]) -> None:
    place = scene.root / "other"
    # daemons of other tests watch jobs called "run"
    file = job_file(scene, place)
    name = f"file-{os.getpid()}"
    file.write_text('name = "run"\n' + file.read_text())
    file.rename(file.with_name(f"{name}.toml"))
    state = scene.save_dir / "_ckptd" / "state"
    state.mkdir(parents=True)
    for command in (("list", name), ("pin", name, TAG), ("pin", name, TAG, "--remove")):
        assert run_here(capsys, *command).returncode == 66
        done = run_here(capsys, *command, "--config-dir", place)
        assert done.returncode == 0, done.stderr
    done = run_here(capsys, "pin", "--remove", name, TAG + "0", "--config-dir", place)
    assert done.returncode == 66, "a pin that stays would pass for taken back"
    assert f"no checkpoint {TAG}0, neither in" in done.stderr
    row = {"name": "run", "save_dir": str(scene.save_dir), "state": "ok", "problems": [], "checkpoints": []}
    status = {
        "generated_at": "2026-01-01T00:00:00+00:00",
        "daemon": {"alive": False, "pid": 1, "started_at": ""},
        "jobs": [row],
    }
    (state / "status.json").write_text(json.dumps(status))
    assert run_here(capsys, "status", name, "--json").returncode == 66
    for arguments in ((name,), ("run",), ()):
        done = run_here(capsys, "status", *arguments, "--json", "--config-dir", place)
        assert [job["name"] for job in json.loads(done.stdout)["jobs"]] == ["run"]


def test_a_job_file_alone_is_run(
    single: RepairScene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with --job: whatever CKPTD_URL says, which is another job's; a file that is not there is named."""
    path = job_file(single, single.root / "conf")
    ran: list[tuple[object, ...]] = []

    class Daemon:
        def __init__(self, loaded: Any, *_: object, **__: object) -> None:
            ran.extend((job.file, job.save_dir) for job in loaded.jobs)
            self.jobs: list[object] = []

        def run(self) -> int:
            return 0

    monkeypatch.setattr("ckptd.daemon.loop.Daemon", Daemon)
    monkeypatch.setattr("ckptd.cli.daemon.run._configure_logs", lambda *_: None)
    assert run_here(capsys, "run", path).returncode == 0
    assert ran == [(path, single.save_dir)]
    monkeypatch.delenv("CKPTD_URL")
    assert run_here(capsys, "run", "run").returncode == 0
    assert ran[1:] == ran[:1]
    for url in ("", str(single.nas)):
        monkeypatch.setenv("CKPTD_URL", url)
        done = run_here(capsys, "run", single.root / "none.toml")
        assert (done.returncode, len(ran)) == (66, 2)
        assert f"no file {single.root / 'none.toml'}" in done.stderr
    assert run_here(capsys, "run", path, single.nas).returncode == 2
