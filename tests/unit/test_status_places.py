"""Where status looks: the bare keys of the files lead to the same places as the models, or say nothing."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from ckptd.cli.status_cmd import published
from ckptd.cli.status_places import state_places
from ckptd.config import load_all, resolve_job
from ckptd.errors import ConfigError, NotFoundError

DOCUMENT = json.dumps({"generated_at": "2026-01-01T00:00:00.000Z", "daemon": {}, "jobs": []})


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
        assert [place for place, _ in published(config.name, None, etc)] == [state]
        assert [place for place, _ in published(None, None, etc)] == [state]


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
        assert [place for place, _ in published(asked, None, etc)] == [state]
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
