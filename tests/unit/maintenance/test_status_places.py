"""Where status looks: the bare keys of the files lead to the same places as the models, or say nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.cli.status.command import show
from ckptd.config.loader import load_all, resolve_job
from ckptd.errors import ConfigError, NotFoundError, NotPermitted
from ckptd.maintenance.status import places as status_places
from ckptd.maintenance.status.places import state_places
from ckptd.maintenance.status.published import published

DAEMON = {"alive": False, "pid": 1, "started_at": "2026-01-01T00:00:00.000Z"}
DOCUMENT = json.dumps({"generated_at": "2026-01-01T00:00:00.000Z", "daemon": DAEMON, "jobs": []})


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration directory; nothing of this machine's environment counts."""
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    (tmp_path / "etc" / "jobs.d").mkdir(parents=True)
    (tmp_path / "nvme" / "run1" / "ckpt").mkdir(parents=True)
    (tmp_path / "etc" / "ckptd.toml").write_text(f'state_dir = "{tmp_path}/state"\n')
    return tmp_path / "etc"


def job(etc: Path, file: str, text: str) -> Path:
    """A job file; `ROOT` in it is the temporary directory."""
    path = etc / "jobs.d" / f"{file}.toml"
    remote = '[[remote]]\nname = "nas"\nurl = "ROOT/nas/{dir}"\nsame_filesystem = true\n'
    if "*" not in text:
        remote = remote.replace("{dir}", file)
    path.write_text((text + remote).replace("ROOT", str(etc.parent)))
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('save_dir = "ROOT/nvme/a"\n', "a"),
        ('name = "other"\nsave_dir = "ROOT/nvme/a/"\n', "other"),
        ('save_dir = "ROOT/nvme/{hostname}"\n', "a"),
        ('save_dir = "ROOT/nvme/*/ckpt"\n', None),
    ],
)
def test_as_written_is_as_judged(etc: Path, text: str, name: str | None) -> None:
    path = job(etc, "a", text)
    for config in load_all(etc, {}).jobs:
        assert name in (config.name, None)
        state = etc.parent / "state" / config.name
        for asked in (None, config.name, f"{config.save_dir}", str(path)):
            if name is None and asked == str(path):
                continue
            assert state in list(state_places(asked, etc)), asked
            assert resolve_job(asked or config.name, {}, config_dir=etc).save_dir == config.save_dir
        state.mkdir(parents=True)
        (state / "status.json").write_text(DOCUMENT)
        assert [one.place for one in published(config.name, None, etc)] == [state]
        assert [one.place for one in published(None, None, etc)] == [state]


def test_the_node_is_filled_in(etc: Path) -> None:
    job(etc, "a", 'save_dir = "ROOT/nvme/{hostname}"\n')
    places = list(state_places("a", etc))
    assert etc.parent / "nvme" / socket.gethostname() / "_ckptd/state" in places


def test_a_wrong_file_does_not_hide_what_the_others_publish(etc: Path) -> None:
    job(etc, "a", 'save_dir = "ROOT/nvme/a"\n')
    (etc / "jobs.d" / "wrong.toml").write_text("save_dir = [\n")
    state = etc.parent / "state" / "a"
    state.mkdir(parents=True)
    (state / "status.json").write_text(DOCUMENT)
    for asked in (None, "a"):
        assert [one.place for one in published(asked, None, etc)] == [state]
    with pytest.raises(ConfigError, match=r"wrong\.toml"):
        list(state_places("wrong", etc))


def test_what_is_nowhere_is_said_in_the_words_of_the_configuration(etc: Path) -> None:
    job(etc, "a", 'save_dir = "ROOT/nvme/a"\n')
    with pytest.raises(NotFoundError, match="known: a"):
        published("b", None, etc)
    with pytest.raises(NotFoundError, match="no daemon has published a status"):
        published("a", None, etc)
    job(etc, "a", 'save_dir = "nvme/a"\n')
    with pytest.raises(ConfigError, match="save_dir"):
        published("a", None, etc)


def test_a_place_that_may_not_be_read_is_said(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the path and with what to do; another job that can be read is shown all the same."""
    paths = [job(etc, name, f'save_dir = "ROOT/nvme/{name}"\n') for name in ("a", "b")]
    for name in ("a", "b"):
        (etc.parent / "state" / name).mkdir(parents=True)
        (etc.parent / "state" / name / "status.json").write_text(DOCUMENT)
    (etc.parent / "state" / "a").chmod(0)
    (etc.parent / "nvme").chmod(0o700)
    with somebody_else(etc):
        for asked in ("a", str(paths[0]), str(etc.parent / "nvme" / "a")):
            with pytest.raises(NotPermitted, match=r"may not be read by this user"):
                published(asked, None, etc)
        # what lies in a closed save_dir is published elsewhere
        assert [one.place.name for one in published(str(etc.parent / "nvme" / "b"), None, etc)] == ["b"]
        assert capsys.readouterr().err == ""
        assert [one.place.name for one in published(None, None, etc)] == ["b"]
        assert not capsys.readouterr().err
        options: dict[str, bool] = dict.fromkeys(("retention", "watch", "live"), False)
        show(None, None, as_json=True, html=None, interval=2, state_dir=None, config_dir=str(etc), **options)
    assert "state/a/status.json may not be read" in capsys.readouterr().err


@contextlib.contextmanager
def somebody_else(etc: Path) -> Iterator[None]:
    """Not root, to whom no folder is closed."""
    if os.geteuid() != 0:
        yield
        return
    for folder in (etc.parent, *etc.parent.parents):
        if "pytest" in str(folder):
            folder.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_job_of_a_service_is_found_by_its_name(
    etc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By anybody, whose own configuration does not know it; what is told of an unknown name stays."""
    monkeypatch.setattr(status_places, "_SERVICES", tmp_path / "var")
    (tmp_path / "var" / "alice" / "llama").mkdir(parents=True)
    (tmp_path / "var" / "alice" / "llama" / "status.json").write_text(DOCUMENT)
    assert [one.place.name for one in published("llama", None, etc)] == ["llama"]
    with pytest.raises(NotFoundError, match="no job 'qwen'"):
        published("qwen", None, etc)
