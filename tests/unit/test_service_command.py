"""What status says to type when its daemon is gone: the unit, or the very command line."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ckptd.daemon.service import start_command, unit_of


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
    assert start_command(line.split()) == f"cd {shlex.quote(str(here))} && ckptd {line}"
    absolute = f"run --job {shlex.quote(str(here / 'llama.toml'))}"
    assert start_command(shlex.split(absolute)) == f"ckptd {absolute}"
    assert start_command(["drain", "llama.toml"]) == ""
