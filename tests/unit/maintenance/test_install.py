"""`ckptd service install`: what it would write, judged by systemd itself; what is not ours stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.cli.setup import service
from ckptd.cli.setup.service import _next_steps, _program
from ckptd.config.commands import user_name
from ckptd.config.loader import load_all
from ckptd.errors import CkptdError, NotFoundError, NotPermitted, RefusedError, TargetExists
from ckptd.maintenance.install import plan, units
from ckptd.maintenance.install.execute import execute
from ckptd.maintenance.install.plan import (
    Command,
    Remove,
    UnitsTarget,
    Write,
    install_steps,
    service_user,
    uninstall_steps,
    writable_paths,
)
from ckptd.maintenance.install.units import DropIn

JOB = 'save_dir = "{save_dir}"\n[[remote]]\nname = "nas"\nurl = "{url}"\nsame_filesystem = true\n'


def ckptd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptd", *arguments], capture_output=True, text=True, check=False
    )


def target(folder: Path, user: str | None = "alice") -> UnitsTarget:
    return UnitsTarget(folder=folder / "etc/systemd/system", user=user, root=folder)


def write_files(folder: Path, at: UnitsTarget, drop_in: DropIn) -> None:
    steps = install_steps(at, drop_in, ("/opt/ckptd/bin/ckptd",), folder / "etc/ckptd/alice", starts=False)
    execute([step for step in steps if not isinstance(step, Command)], lambda _: None)


DROP_IN = DropIn(paths=("/nvme/a", "/mnt/my nas/50%"), memory_budget_bytes=1 << 30)


@pytest.mark.parametrize("user", ["alice", None])
def test_systemd_takes_every_unit(tmp_path: Path, user: str | None) -> None:
    """It exits with 0 whatever it finds, so every word of it counts."""
    at = target(tmp_path, user)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ckptd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    drop_in = replace(DROP_IN, config_dir="/srv/100% my jobs")
    steps = install_steps(at, drop_in, (str(program),), tmp_path / "etc/ckptd/alice", starts=False)
    execute([step for step in steps if not isinstance(step, Command)], lambda _: None)
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze here (make system-packages)")
    manager = ["--user"] if user is None else []
    unit = at.unit if user is None else at.folder / "ckptd@root.service"
    if user is not None:
        shutil.copy(at.unit, unit)
        shutil.copytree(at.drop_in.parent, at.folder / "ckptd@root.service.d")
    for path in (unit, at.folder / "ckptd.slice"):
        done = subprocess.run(
            [tool, *manager, "--man=no", "verify", str(path)],
            capture_output=True,
            text=True,
            check=False,
            env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("user", ["alice", None])
def test_a_drain_that_ran_out_of_time_is_no_failed_unit(tmp_path: Path, user: str | None) -> None:
    """What is installed says so, for a service of the system and for a user's own."""
    at = target(tmp_path, user)
    write_files(tmp_path, at, DROP_IN)
    lines = at.unit.read_text().splitlines()
    assert lines.count("SuccessExitStatus=3") == 1
    assert lines.index("[Service]") < lines.index("SuccessExitStatus=3") < lines.index("[Install]")
    assert "RestartPreventExitStatus=2 75 77 78" in lines
    assert any(line.startswith("ExecStart=") and " --drain " in line for line in lines)


def test_a_drop_in_says_what_may_be_written() -> None:
    lines = DROP_IN.text.splitlines()
    assert [line for line in lines if line.startswith("ReadWritePaths=")] == [
        "ReadWritePaths=-/nvme/a",
        'ReadWritePaths="-/mnt/my nas/50%%"',
    ]
    assert units.memory_max_of(DROP_IN.text) == DROP_IN.memory_max_bytes == 5 << 28
    with pytest.raises(RefusedError, match="cannot stand in a unit"):
        DropIn(paths=("/a\nExecStart=/bin/sh",), memory_budget_bytes=1).text  # noqa: B018


def test_what_the_jobs_write(tmp_path: Path) -> None:
    (tmp_path / "jobs.d").mkdir()
    for folder in ("nvme/a", "nvme/runs/x/ckpt", "nas"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "jobs.d/a.toml").write_text(JOB.format(save_dir=tmp_path / "nvme/a", url=tmp_path / "nas/a"))
    (tmp_path / "jobs.d/later.toml").write_text(
        JOB.format(save_dir=tmp_path / "nvme/later", url="s3://bucket/later").replace(
            "same_filesystem = true", ""
        )
    )
    (tmp_path / "jobs.d/many.toml").write_text(
        JOB.format(save_dir=tmp_path / "nvme/runs/*/ckpt", url=f"{tmp_path}/nas/{{dir}}")
    )
    loaded = load_all(tmp_path)
    assert not loaded.problems
    # a directory that is not there yet stands for its parent, which holds the others
    assert writable_paths(loaded) == (str(tmp_path / "nas"), str(tmp_path / "nvme"))
    (tmp_path / "nvme/later").mkdir()
    paths = writable_paths(load_all(tmp_path))
    assert str(tmp_path / "nvme/runs") in paths
    assert str(tmp_path / "nvme") not in paths


def test_twice_is_once_and_two_users_share_a_slice(tmp_path: Path) -> None:
    alice, bob = target(tmp_path), target(tmp_path, "bob")
    for at in (alice, alice, bob):
        write_files(tmp_path, at, DROP_IN)
    assert units.memory_max_of((alice.folder / "ckptd.slice").read_text()) == 2 * DROP_IN.memory_max_bytes
    doomed = {s.path for s in uninstall_steps(bob) if isinstance(s, Remove)}
    assert doomed == {bob.drop_in}
    execute([s for s in uninstall_steps(bob) if not isinstance(s, Command)], lambda _: None)
    assert units.memory_max_of((alice.folder / "ckptd.slice").read_text()) == DROP_IN.memory_max_bytes
    execute([s for s in uninstall_steps(alice) if not isinstance(s, Command)], lambda _: None)
    assert list(alice.folder.iterdir()) == []
    with pytest.raises(NotFoundError, match="not installed"):
        uninstall_steps(alice)


def test_what_somebody_else_wrote_stays(tmp_path: Path) -> None:
    at = target(tmp_path)
    at.folder.mkdir(parents=True)
    at.unit.write_text("[Service]\nExecStart=/usr/local/bin/mine\n")
    with pytest.raises(TargetExists, match="was not written by ckptd"):
        write_files(tmp_path, at, DROP_IN)
    at.drop_in.parent.mkdir()
    at.drop_in.write_text(DROP_IN.text)
    (at.drop_in.parent / "20-mine.conf").write_text("[Service]\n")
    steps = uninstall_steps(at)
    assert [s.path for s in steps if isinstance(s, Remove)] == [at.drop_in]
    execute([s for s in steps if not isinstance(s, Command)], lambda _: None)
    assert (at.drop_in.parent / "20-mine.conf").exists()
    assert at.unit.exists()


def test_what_an_older_ckptd_wrote_is_written_anew_and_removed(tmp_path: Path) -> None:
    """Its first line names the verbs as they were called."""
    at = target(tmp_path)
    at.drop_in.parent.mkdir(parents=True)
    first, _, rest = DROP_IN.text.partition("\n")
    was = first.replace("service install", "install-service").replace(
        "service uninstall", "uninstall-service"
    )
    assert was != first
    at.drop_in.write_text(f"{was}\n{rest}")
    assert at.drop_in in [s.path for s in uninstall_steps(at) if isinstance(s, Remove)]
    write_files(tmp_path, at, DROP_IN)
    assert at.drop_in.read_text() == DROP_IN.text


def test_a_systemctl_that_refuses_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "systemctl"
    script.write_text("#!/bin/sh\necho 'Unit is masked.' >&2; exit 1\n")
    script.chmod(0o755)
    with pytest.raises(CkptdError, match=r"failed: Unit is masked\."):
        execute([Command(argv=(str(script), "enable", "x"))], lambda _: None)
    execute([Command(argv=(str(script), "disable", "x"), may_fail=True)], lambda _: None)
    with pytest.raises(CkptdError, match="there is no"):
        execute([Command(argv=(str(tmp_path / "none"),))], lambda _: None)


def test_the_command_says_before_it_does(tmp_path: Path) -> None:
    asked = ckptd("service", "install", "--run-as", "alice", "--root", str(tmp_path), "--dry-run")
    assert asked.returncode == 0, asked.stderr
    assert f"would write {tmp_path}/etc/systemd/system/ckptd@alice.service.d/10-ckptd.conf" in asked.stdout
    assert list(tmp_path.iterdir()) == []
    assert any(
        isinstance(s, Write) for s in install_steps(target(tmp_path), DROP_IN, ("/c",), tmp_path, starts=True)
    )
    both = ckptd("service", "install", "--run-as", "alice", "--user")
    assert both.returncode == 2
    unknown = ckptd("service", "install", "--run-as", "nobody-of-that-name")
    assert unknown.returncode == 66
    assert "there is no user" in unknown.stderr
    gone = ckptd("service", "uninstall", "--run-as", "alice", "--root", str(tmp_path))
    assert gone.returncode == 66


def test_another_configuration_directory_is_the_one_that_is_read(tmp_path: Path) -> None:
    """The unit reads where the drop-in says, and check finds the service's state directory by it."""
    place = tmp_path / "srv/my jobs"
    (place / "jobs.d").mkdir(parents=True)
    asked = ["service", "install", "--run-as", "alice", "--root", str(tmp_path), "--dry-run"]
    done = ckptd(*asked, "--config-dir", str(place))
    assert (done.returncode, "run --config-dir ${CKPTD_CONFIG_DIR} " in done.stdout) == (0, True), done.stderr
    assert 'Environment="CKPTD_CONFIG_DIR=/srv/my jobs"\n' in done.stdout
    own = ckptd(*asked, "--config-dir", f"{tmp_path}/etc/ckptd/alice")
    assert 'Environment="CKPTD' not in own.stdout
    hidden = ckptd(*asked, "--config-dir", "/var/tmp/jobs")
    assert (hidden.returncode, "lies in /var/tmp, which a service does not see" in hidden.stderr) == (
        65,
        True,
    )
    at = target(tmp_path)
    drop_in = DropIn(paths=("/nvme/a",), memory_budget_bytes=1 << 30, config_dir=str(place))
    write_files(tmp_path, at, drop_in)
    assert service_user(place, at.folder) == "alice"
    assert service_user(Path("/etc/ckptd/alice"), at.folder) == "alice"
    assert service_user(tmp_path, at.folder) is None


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"])
def test_a_program_that_a_service_does_not_see_is_refused(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", f"{place}/venv/bin/python")
    with pytest.raises(RefusedError, match=f"lies in {place}, which a service does not see"):
        _program(Path("/"))
    assert _program(Path("/image"))[0] == f"{place}/venv/bin/python"


def test_whoever_does_not_linger_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of a user's own ends with the last session."""
    target_of_mine = UnitsTarget(folder=tmp_path, user=None)
    loaded = load_all(tmp_path)
    monkeypatch.setattr(service, "_LINGER", tmp_path)
    assert any(
        "loginctl enable-linger" in line
        for line in _next_steps(target_of_mine, loaded, tmp_path, started=True)
    )
    (tmp_path / user_name()).touch()
    assert not any(
        "enable-linger" in line for line in _next_steps(target_of_mine, loaded, tmp_path, started=True)
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="running as another user needs root")
def test_an_interpreter_that_the_user_cannot_run_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a unit that fails, and not by a library of another release once a store is asked."""
    at = UnitsTarget(folder=tmp_path, user="nobody")

    def tried(program: str, script: str = "") -> None:
        monkeypatch.setattr(sys, "executable", program)
        monkeypatch.setattr(plan, "_IMPORTS", script)
        execute(install_steps(at, DROP_IN, ("/c",), tmp_path, starts=False)[:1], lambda _: None)

    tmp_path.chmod(0o700)
    shutil.copy("/bin/true", tmp_path / "python")
    with pytest.raises(NotPermitted, match=r"nobody.*python.*Permission denied") as refused:
        tried(str(tmp_path / "python"))
    assert "/opt/ckptd" in refused.value.hint
    with pytest.raises(NotPermitted, match="undefined symbol"):
        tried("/bin/sh", "echo Traceback; echo 'ImportError: undefined symbol' >&2; exit 1")
    with pytest.raises(NotPermitted, match="exit status 1"):
        tried("/bin/sh", "exit 1")
    tried("/bin/sh", "test $(id -un) = nobody -a ! -w /etc")
    own = install_steps(UnitsTarget(folder=tmp_path, user="root"), DROP_IN, ("/c",), tmp_path, starts=False)
    assert isinstance(own[0], Write)


def test_what_another_user_runs_gets_no_hold_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its terminal, nor its patience, nor a traceback."""
    is_leader = 'read pid comm state ppid pgrp sid rest < /proc/$$/stat; test "$pid" = "$sid"'
    execute([Command(argv=("/bin/sh", "-c", is_leader))], lambda _: None)
    with pytest.raises(CkptdError, match="cannot open \ufffd"):
        execute([Command(argv=("/bin/sh", "-c", r"printf 'cannot open \377' >&2; exit 1"))], lambda _: None)
    monkeypatch.setattr("ckptd.maintenance.install.execute._COMMAND_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(CkptdError, match=r"did not end within 0\.5 s"):
        execute([Command(argv=("/bin/sh", "-c", "sleep 50 & sleep 50"))], lambda _: None)
    assert time.monotonic() - began < 30
