"""`ckptd service install`, and the daemon under a real systemd: start, reload, watchdog, memory, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import RUN, shards_in_order
from tests.service import boot
from tests.service.boot import UID, USER, Booted
from tests.stores import servers
from tests.support.real import prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.faults]

SERVICE = f"ckptd@{USER}.service"
JOB = """save_dir = "/mnt/nvme/{name}"
settle = "0.5s"
[[remote]]
name = "nas"
url = "/mnt/nas/{name}"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    """A booted systemd with ckptd installed for one user and one job, started."""
    if reason := boot.why_not():
        pytest.skip(reason)
    prepare([RUN])
    with boot.booted(tmp_path_factory.mktemp("boot")) as made:
        job(made, "one")
        done = made.run("ckptd", "service", "install", "--run-as", USER, "--now")
        assert done.returncode == 0, done.stderr + made.log()
        yield made


def job(machine: Booted, name: str, text: str = JOB) -> Path:
    """A job file, and its save_dir, which the user owns."""
    save_dir = machine.inside(f"/mnt/nvme/{name}")
    save_dir.mkdir(exist_ok=True)
    os.chown(save_dir, UID, UID)
    (save_dir / "lost+found").mkdir(mode=0o700, exist_ok=True)  # root's, as on a disk of its own
    path = machine.inside(f"/etc/ckptd/{USER}/jobs.d/{name}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(name=name))
    return path


def save(machine: Booted, name: str, step: int = 1) -> None:
    """A real save as the trainer's user writes it."""
    source = save_dir_of(RUN) / f"global_step{step}"
    folder = machine.inside(f"/mnt/nvme/{name}/{source.name}")
    folder.mkdir()
    for path in shards_in_order(source):
        (folder / path.name).write_bytes(path.read_bytes())
        os.chown(folder / path.name, UID, UID)
    os.chown(folder, UID, UID)


def status(machine: Booted, name: str) -> dict[str, Any]:
    """That job in its status.json."""
    path = machine.inside(f"/var/lib/ckptd/{USER}/{name}/status.json")
    document: dict[str, Any] = json.loads(path.read_bytes())
    return next(j for j in document["jobs"] if j["name"] == name)


def committed(machine: Booted, name: str, step: int, form: str) -> bool:
    """A COMMIT on the NAS."""
    return machine.inside(f"/mnt/nas/{name}/_ckptd/commits/global_step{step}~g1~{form}.json").exists()


def test_started_it_ships_converts_and_answers(machine: Booted) -> None:
    assert machine.show(SERVICE, "ActiveState") == "active"
    assert machine.show(SERVICE, "User") == USER
    save(machine, "one")
    machine.wait("both forms", lambda: committed(machine, "one", 1, "universal"))
    assert committed(machine, "one", 1, "zero")
    said = json.loads(machine.journal(SERVICE, r"global_step1 \(zero\) committed on nas"))
    assert (said["job"], said["action"], said["tag"]) == ("one", "commit", "global_step1")
    machine.wait("status", lambda: status(machine, "one")["safe"])
    machine.wait("nothing left to do", lambda: status(machine, "one")["state"] == "ok")
    for where in ((), ("--state-dir", f"/var/lib/ckptd/{USER}")):
        said = machine.run("ckptd", "status", *where)
        assert said.returncode == 0, said.stdout + said.stderr
        assert "● SAFE  step 1" in said.stdout
    limit = int(machine.show(SERVICE, "MemoryMax"))
    group = machine.memory / "ckptd.slice" / f"ckptd@{USER}.service"
    group = next(machine.memory.rglob(SERVICE), group)
    assert int((group / "memory.limit_in_bytes").read_text()) <= limit
    counters = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    assert counters["oom_kill"] == "0"
    assert int((group / "memory.max_usage_in_bytes").read_text()) < limit
    assert machine.show(SERVICE, "Slice") == "ckptd.slice"


def test_what_it_may_write_is_what_the_jobs_name(machine: Booted) -> None:
    paths = machine.show(SERVICE, "ReadWritePaths").split()
    assert "-/mnt/nvme/one" in paths
    assert "-/mnt/nas" in paths or "-/mnt/nas/one" in paths
    pid = machine.show(SERVICE, "MainPID")
    seen = machine.run("nsenter", "-t", pid, "-m", "touch", "/opt/x")
    assert seen.returncode != 0
    assert "Read-only file system" in seen.stderr


def test_reload_with_a_good_and_a_bad_file(machine: Booted) -> None:
    job(machine, "two")
    done = machine.run("ckptd", "service", "install", "--run-as", USER, "--now")
    assert done.returncode == 0, done.stderr
    save(machine, "two")
    machine.wait("the second job", lambda: committed(machine, "two", 1, "zero"))
    # two jobs need a state directory: check knows the service's
    checked = machine.run("ckptd", "check", "--config-dir", f"/etc/ckptd/{USER}", "--no-probe")
    assert checked.returncode == 0, checked.stdout
    bad = job(machine, "three", JOB + "save_totl_limit = 3\n")
    refused = machine.run("systemctl", "reload", SERVICE)
    assert refused.returncode != 0
    assert "save_totl_limit" in machine.log()
    assert machine.journal(SERVICE, "save_totl_limit", "-p", "err")
    assert machine.show(SERVICE, "ActiveState") == "active"
    bad.unlink()
    assert machine.run("systemctl", "reload", SERVICE).returncode == 0
    assert status(machine, "two")["state"] == "ok"


KEYS_JOB = """save_dir = "/mnt/nvme/{name}"
settle = "0.5s"
[local]
forms = []
[[remote]]
name = "nas"
url = "s3://{bucket}/run"
endpoint_url = "http://127.0.0.1:{port}"
credentials = "file:s3"
forms = ["zero"]
"""


def test_keys_that_systemd_hands_over(machine: Booted, tmp_path: Path) -> None:
    """Root's file reaches the daemon of a user who may not read it; without the drop-in the words name it."""
    port, objects = servers.free_port(), tmp_path / "objects"
    (objects / servers.BUCKET).mkdir(parents=True)
    program = Path(sys.executable).with_name("rclone")
    server = subprocess.Popen(
        [
            *("nsenter", "-t", str(machine.pid), "-n", str(program), "serve", "s3", "--config", "/dev/null"),
            *("--addr", f"127.0.0.1:{port}", "--auth-key", f"{servers.ACCESS_KEY},{servers.SECRET_KEY}"),
            str(objects),
        ]
    )
    try:
        written = job(
            machine, "keys", KEYS_JOB.replace("{bucket}", servers.BUCKET).replace("{port}", str(port))
        )
        assert machine.run("ckptd", "service", "install", "--run-as", USER, "--now").returncode == 0
        save(machine, "keys")
        # a journal that is new asks the remote first, and status says so until it has been refused
        machine.wait(
            "the problem",
            lambda: "LoadCredential=s3:" in json.dumps(status(machine, "keys")["problems"]),
        )
        keys = machine.inside(f"/etc/ckptd/{USER}/s3.credentials")
        keys.write_text(
            f"[default]\naws_access_key_id = {servers.ACCESS_KEY}\n"
            f"aws_secret_access_key = {servers.SECRET_KEY}\n"
        )
        keys.chmod(0o600)
        more = machine.inside(f"/etc/systemd/system/{SERVICE}.d/20-keys.conf")
        # what waits for keys would be waited for as it ends
        more.write_text("[Service]\nTimeoutStopSec=3s\nLoadCredential=s3:/etc/ckptd/%i/s3.credentials\n")
        assert machine.run("systemctl", "daemon-reload").returncode == 0
        assert machine.run("systemctl", "restart", SERVICE).returncode == 0
        commits = objects / servers.BUCKET / "run" / "_ckptd" / "commits"
        machine.wait("the COMMIT", (commits / "global_step1~g1~zero.json").exists)
        assert machine.run("setpriv", "--reuid", USER, "--clear-groups", "cat", str(keys)).returncode != 0
        assert servers.SECRET_KEY not in machine.run("journalctl", "--no-pager").stdout
        more.unlink()
        keys.unlink()
        written.unlink()
        assert machine.run("ckptd", "service", "install", "--run-as", USER, "--now").returncode == 0
    finally:
        server.kill()
        server.wait()


def test_a_daemon_that_stands_still_is_started_anew(machine: Booted) -> None:
    more = machine.inside(f"/etc/systemd/system/{SERVICE}.d/20-test.conf")
    more.write_text("[Service]\nWatchdogSec=3s\n")
    assert machine.run("systemctl", "daemon-reload").returncode == 0
    assert machine.run("systemctl", "restart", SERVICE).returncode == 0
    before = machine.show(SERVICE, "MainPID")
    stopped = machine.run("kill", "-STOP", before)
    assert stopped.returncode == 0
    machine.wait("a restart", lambda: machine.show(SERVICE, "NRestarts") == "1", 90)
    machine.wait("a new one", lambda: machine.show(SERVICE, "MainPID") not in ("0", before))
    machine.wait("it is up", lambda: machine.show(SERVICE, "ActiveState") == "active")
    more.unlink()


def test_children_end_with_a_daemon_that_is_killed(machine: Booted) -> None:
    """systemd signals the daemon alone, so that a child that hangs in the kernel does not fail a stop."""
    before = machine.show(SERVICE, "MainPID")

    def children() -> list[str]:
        return machine.run("pgrep", "-P", before).stdout.split()

    machine.wait("the remote's process", children)
    known = children()
    assert machine.run("kill", "-KILL", before).returncode == 0
    machine.wait("their end", lambda: not any(machine.inside(f"/proc/{pid}").exists() for pid in known), 30)
    machine.wait("a new one", lambda: machine.show(SERVICE, "MainPID") not in ("0", before))
    machine.wait("it is up", lambda: machine.show(SERVICE, "ActiveState") == "active")


def test_a_wrong_configuration_is_not_started_again_and_again(machine: Booted) -> None:
    place = machine.inside(f"/etc/ckptd/{USER}/ckptd.toml")
    place.write_text('memory_budgt = "1GiB"\n')
    assert machine.run("systemctl", "daemon-reload").returncode == 0
    machine.run("systemctl", "restart", SERVICE)
    machine.wait("its end", lambda: machine.show(SERVICE, "ActiveState") == "failed")
    assert machine.show(SERVICE, "ExecMainStatus") == "78"
    assert "memory_budget" in machine.log()
    place.unlink()
    assert machine.run("systemctl", "restart", SERVICE).returncode == 0


def test_stopped_it_ends_in_time_and_uninstalled_it_is_gone(machine: Booted) -> None:
    save(machine, "one", 2)
    assert machine.run("systemctl", "stop", SERVICE).returncode == 0
    assert machine.show(SERVICE, "Result") == "success"
    assert machine.show(SERVICE, "ActiveState") == "inactive"
    gone = machine.run("ckptd", "status", "one")
    assert f"→ start it: systemctl start ckptd@{USER};" in gone.stdout, gone.stdout + gone.stderr
    assert machine.run("systemctl", "start", SERVICE).returncode == 0
    done = machine.run("ckptd", "service", "uninstall", "--run-as", USER)
    assert done.returncode == 0, done.stderr
    assert machine.show(SERVICE, "LoadState") in ("not-found", "masked")
    units = machine.inside("/etc/systemd/system")
    assert not list(units.rglob("*ckptd*"))
    assert machine.inside("/mnt/nvme/one/global_step2").is_dir()
    assert committed(machine, "one", 1, "zero")
    again = machine.run("ckptd", "service", "uninstall", "--run-as", USER)
    assert again.returncode == 66
    assert "is not installed" in again.stderr


def test_nothing_is_left_running(machine: Booted) -> None:
    left = machine.run("pgrep", "-u", USER)
    assert left.stdout == ""
    assert signal.SIGKILL not in (left.returncode,)
