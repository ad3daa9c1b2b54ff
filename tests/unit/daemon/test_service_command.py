"""What status says to type when its daemon is gone: the unit, or the very command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest.mock import Mock

import pytest

from ckptd.config.schema import NotifyConfig
from ckptd.daemon.health.exporter import Exporter
from ckptd.daemon.health.notify import Notifier
from ckptd.daemon.publisher import Publisher
from ckptd.daemon.systemd import start_command, unit_of

if TYPE_CHECKING:
    from ckptd.daemon.job import Job


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("0::/ckptd.slice/ckptd@alice.service\n", "systemctl start ckptd@alice"),
        ("12:memory:/x\n1:name=systemd:/ckptd.slice/ckptd@bob.service\n", "systemctl start ckptd@bob"),
        (
            "0::/user.slice/user-7.slice/user@7.service/ckptd.slice/ckptd.service\n",
            "systemctl --user start ckptd",
        ),
        ("0::/user.slice/user-7.slice/session-3.scope\n", ""),
        ("0::/system.slice/cron.service\n", ""),
        ("", ""),
    ],
)
def test_a_unit_of_ours_is_started_by_systemd(groups: str, said: str) -> None:
    assert unit_of(groups) == said


def test_a_command_line_is_typed_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "my jobs"
    here.mkdir()
    (here / "llama.toml").touch()
    monkeypatch.chdir(here)
    line = "run --job llama.toml --drain 2m"
    assert start_command(line.split(), {}) == f"cd {shlex.quote(str(here))} && ckptd {line}"
    absolute = f"run --job {shlex.quote(str(here / 'llama.toml'))}"
    assert start_command(shlex.split(absolute), {}) == f"ckptd {absolute}"
    assert start_command(["drain", "llama.toml"], {"CKPTD_NAME": "my"}) == ""


def test_the_settings_of_its_environment_are_typed_too(tmp_path: Path) -> None:
    """A save_dir `my run` has no name of its own; what may be a secret stays where it is."""
    environ = {
        "CKPTD_NAME": "my",
        "CKPTD_REMOTE_ENDPOINT_URL": "https://s3.example",
        "CKPTD_SAVE_TOTAL_LIMIT": "3",
        "CKPTD_LOCAL_FORMS": '["universal"]',
        "CKPTD_URL": "https://user:hunter2@example/x",
        "CKPTD_REMOTE_CREDENTIALS": "AKIAHUNTER2HUNTER23",
        "CKPTD_PORT_80_TCP": "hunter2",
        "CKPTD_DEBUG": "1",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
    }
    arguments = ["run", str(tmp_path / "my run"), "s3://bucket/x"]
    said = start_command(arguments, environ)
    assert said == (
        "CKPTD_LOCAL_FORMS='[\"universal\"]' CKPTD_NAME=my CKPTD_REMOTE_ENDPOINT_URL=https://s3.example "
        f"CKPTD_SAVE_TOTAL_LIMIT=3 ckptd {shlex.join(arguments)}"
    )


def test_a_drain_keeps_what_starts_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no daemon to be started again, and its status replaces the daemon's."""
    monkeypatch.setattr(sys, "argv", ["ckptd", "drain", "run"])
    publisher = Publisher(Notifier(NotifyConfig(), "n0"), Exporter(None))
    job = cast("Job", Mock(state_dir=tmp_path))
    (tmp_path / "status.json").write_text('{"daemon": {"start_command": "ckptd run --job /etc/a.toml"}}')
    assert publisher._command_before(job) == "ckptd run --job /etc/a.toml"
    (tmp_path / "status.json").unlink()
    assert publisher._command_before(job) == "ckptd run --job /etc/a.toml"
    never = cast("Job", Mock(state_dir=tmp_path / "none"))
    assert publisher._command_before(never) == ""
