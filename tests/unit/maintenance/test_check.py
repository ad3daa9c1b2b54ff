"""`ckptd check`: what it proves on a node and a remote, that it leaves nothing, its exit codes (P19)."""

from __future__ import annotations

import configparser
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptd.base.humanize import size_of
from ckptd.config.loader import load_daemon, load_job
from ckptd.config.quantities import parse_share, show_seconds
from ckptd.config.schema import DaemonConfig
from ckptd.errors import ConfigError, NotPermitted
from ckptd.maintenance.check import check_job, check_outlets
from ckptd.storage.local.probe import Finding, probe_save_dir
from ckptd.storage.local.state_dir import filesystem_type, is_network, prepare_state_dir, state_dir_of
from ckptd.storage.stores.directory import DirectoryStore
from tests.support.recover_scene import Scene

UNIT = Path(__file__).parents[3] / "systemd" / "ckptd@.service"
NOBODY = 65534


def job_file(tmp_path: Path, *, same: bool = True, url: str = "") -> Path:
    """A job on this machine's disk."""
    (tmp_path / "nvme").mkdir(exist_ok=True)
    (tmp_path / "nas").mkdir(exist_ok=True)
    path = tmp_path / "run.toml"
    url = url or f"{tmp_path}/nas/run"
    path.write_text(
        f'save_dir = "{tmp_path}/nvme/run"\n[[remote]]\nname = "nas"\nurl = "{url}"\n'
        f"same_filesystem = {str(same).lower()}\n"
    )
    return path


def findings(path: Path, **options: bool) -> dict[str, Finding]:
    """Findings by what they are about (the worst of several)."""
    found: dict[str, Finding] = {}
    for finding in check_job(load_job(path), DaemonConfig(), os.environ, **options):
        if finding.what not in found or finding.verdict == "fail":
            found[finding.what] = finding
    return found


def ckptd(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command."""
    return subprocess.run(
        [sys.executable, "-m", "ckptd", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_what_will_be_uploaded_and_what_each_save_costs_is_said_before_the_start(tmp_path: Path) -> None:
    """Who comes with a running training is told what becomes of its checkpoints, and of the link."""
    path, scene = job_file(tmp_path), Scene(tmp_path)
    path.write_text(path.read_text() + 'bandwidth = "1kB/s"\nforms = ["zero", "universal"]\n')

    def told() -> dict[str, list[Finding]]:
        found: dict[str, list[Finding]] = {}
        for finding in check_job(load_job(path), DaemonConfig(), os.environ):
            found.setdefault(finding.what, []).append(finding)
        return found

    assert "existing" not in told()
    for step in (5, 10, 15):
        scene.save(step)
    size_bytes = sum(p.stat().st_size for p in (scene.save_dir / "global_step15").iterdir())
    rows = told()
    (existing,) = rows["existing"]
    said = "3 checkpoints lie here already: global_step15 will be uploaded; the other 2 stay"
    assert existing.text.startswith(said)
    assert "CKPTD_EXISTING=all" in existing.hint
    cost = next(row for row in rows["remote nas"] if "a save of this size" in row.text)
    total_bytes = size_bytes * 30 / 14
    assert f"uploads about {size_of(round(total_bytes))} (zero {size_of(size_bytes)}, " in cost.text
    assert f", {show_seconds(total_bytes / 1000)} at 1 kB/s" in cost.text
    assert 'forms = ["zero"] halves it' in cost.hint
    path.write_text(f'existing = "all"\n{path.read_text()}'.replace('["zero", "universal"]', '["zero"]'))
    rows = told()
    (existing,) = rows["existing"]
    said = "3 checkpoints lie here already: all of them will be uploaded"
    assert (existing.verdict, existing.text, existing.hint) == ("ok", said, "")
    cost = next(row for row in rows["remote nas"] if "a save of this size" in row.text)
    assert f"about {size_of(size_bytes)}, " in cost.text
    assert cost.hint == ""


@pytest.mark.parametrize(
    ("count", "existing", "said"),
    [
        (1, "newest", "global_step5 lies here already: it will be uploaded"),
        (1, "all", "global_step5 lies here already: it will be uploaded"),
        (1, "none", "global_step5 lies here already: nothing of it will be uploaded; it stays on this node "),
        (2, "newest", "2 checkpoints lie here already: global_step10 will be uploaded; the other one stays "),
        (2, "none", "2 checkpoints lie here already: nothing of it will be uploaded; all 2 stay on this "),
    ],
)
def test_each_number_and_each_choice_is_said(tmp_path: Path, count: int, existing: str, said: str) -> None:
    path, scene = job_file(tmp_path), Scene(tmp_path)
    path.write_text(f'existing = "{existing}"\n{path.read_text()}')
    for step in range(5, 5 * count + 1, 5):
        scene.save(step)
    assert findings(path)["existing"].text.startswith(said)


WITHOUT_RIGHTS = (  # root too keeps to modes without its capabilities
    "import ctypes, os, sys; drop = ctypes.CDLL(None).prctl; [drop(24, n, 0, 0, 0) for n in range(4)];"
    "os.execv(sys.executable, [sys.executable, '-m', 'ckptd', *sys.argv[1:]])"
)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to somebody else")
@pytest.mark.parametrize("closed", ["nvme/run", "nvme"])
def test_what_may_not_be_entered_stops_no_other_row_and_no_other_job(tmp_path: Path, closed: str) -> None:
    path, other = job_file(tmp_path), tmp_path / "other.toml"
    (tmp_path / "nvme/run").mkdir()
    (tmp_path / "beside").mkdir()
    other.write_text(path.read_text().replace("/nvme/run", "/beside").replace("/nas/run", "/nas/other"))
    os.chown(tmp_path / closed, NOBODY, NOBODY)
    (tmp_path / closed).chmod(0o700)

    def told(*files: Path, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_RIGHTS, "check", *map(str, files)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent", **more},
            timeout=60,
        )
        assert done.returncode in (77, 78), done
        said = " ".join(done.stdout.split())
        assert "see `ckptd check`" not in said
        return said

    both = told(path, other, CKPTD_STATE_DIR=str(tmp_path / "state"))
    assert f"other: {other} save_dir ok" in both
    if closed == "nvme":
        assert f"looking at {tmp_path}/nvme/run: Permission denied" in both
        return
    alone = told(path)
    assert f"{tmp_path}/nvme/run is owned by nobody ({NOBODY}), mode 700; ckptd runs as root" in alone
    assert "remote nas note" in alone


TOUCHES = """
import os, sys
nas, looked = sys.argv.pop(1), []
def noting(call):
    def noted(path, *rest, **named):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(nas):
            looked.append(os.fspath(path))
        return call(path, *rest, **named)
    return noted
for name in ("stat", "lstat", "open", "readlink", "listdir", "scandir", "access", "statvfs"):
    setattr(os, name, noting(getattr(os, name)))
from ckptd.__main__ import entry
try:
    entry()
finally:
    print("touched:", looked, file=sys.stderr)
"""
"""ckptd, and at its end which paths at and below the first argument its own process touched."""


@pytest.mark.parametrize(
    ("lies_apart", "is_there", "code", "told"),
    [
        (True, False, 0, "is not initialised yet"),
        (True, True, 0, "is not initialised yet"),
        (False, False, 69, "nas lies on the same file system as save_dir"),
        (False, True, 69, "nas/run lies on the same file system as save_dir"),
    ],
)
def test_a_place_that_may_become_a_remote_is_judged_by_the_child(
    tmp_path: Path, lies_apart: bool, is_there: bool, code: int, told: str
) -> None:
    """A mount that hangs once the child answered would keep the command for ever."""
    path = job_file(tmp_path)
    if not lies_apart:
        path.write_text(path.read_text().replace("same_filesystem = true", "same_filesystem = false"))
    if is_there:
        (tmp_path / "nas" / "run").mkdir()
    command = [sys.executable, "-c", TOUCHES, str(tmp_path / "nas"), "check", str(path)]
    environ = {**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent", "COLUMNS": "400"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=100)
    assert (done.returncode, told in done.stdout) == (code, True), done
    assert "touched: []" in done.stderr, done.stderr


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root's rights to give up")
@pytest.mark.parametrize("closed", ["nvme/run", "nas/run"])
def test_what_its_own_user_may_not_write_is_said_with_its_mode(tmp_path: Path, closed: str) -> None:
    """save_dir, and the remote's root, though what lies in `_ckptd` may be written."""
    path = job_file(tmp_path)
    (tmp_path / "nvme/run").mkdir()

    def told(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-c", WITHOUT_RIGHTS, "check", str(path), *words]
        environ = {**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=100)
        return done.returncode, " ".join(done.stdout.split())

    assert told("--init-remote")[0] == 0
    (tmp_path / closed).chmod(0o500)
    code, said = told()
    assert code == 77, said
    if closed == "nas/run":
        assert "making a folder there: Permission denied" in said
    else:
        assert "as whom ckptd runs, mode 500: it may not write there" in said
        assert f"chmod u+wx {tmp_path}/nvme/run" in said
        assert "run ckptd as" not in said


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to somebody else")
@pytest.mark.parametrize("closed", ["nas/run", "nas"])
@pytest.mark.parametrize("words", [(), ("--init-remote",)])
def test_a_share_whose_server_squashes_root_is_told_as_one(
    tmp_path: Path, closed: str, words: tuple[str, ...]
) -> None:
    """A root that may not write there, as a server's answer to root is; and what to type there."""
    path = job_file(tmp_path)
    (tmp_path / "nvme/run").mkdir()
    (tmp_path / closed).mkdir(exist_ok=True)
    os.chown(tmp_path / closed, NOBODY, NOBODY)
    (tmp_path / closed).chmod(0o755)
    command = [sys.executable, "-c", WITHOUT_RIGHTS, "check", str(path), *words]
    environ = {**os.environ, "CKPTD_CONFIG_DIR": "/nonexistent", "COLUMNS": "999"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=100)
    assert done.returncode == 77, done
    assert "the server squashes root (root_squash)" in done.stdout
    assert f"{tmp_path}/{closed} is owned by nobody ({NOBODY}), mode 755, ckptd runs as root" in done.stdout
    assert (
        "→ run ckptd as the user who trains, and let that user write there: on the server, `install -d "
        in done.stdout
    )
    assert f"-o USER {tmp_path}/nas/run`" in done.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_a_remote_of_somebody_else_is_told_with_who_may() -> None:
    with tempfile.TemporaryDirectory() as place:  # below pytest's own folders nobody may look
        Path(place).chmod(0o755)
        run = Path(place) / "run"
        run.mkdir(mode=0o755)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(NotPermitted) as denied:
                DirectoryStore(str(run)).probe()
        finally:
            os.seteuid(0)
    assert f"{run} is owned by root (0), mode 755, ckptd runs as nobody" in denied.value.message
    assert f"`install -d -o {NOBODY} {run}`" in denied.value.hint


def test_before_the_first_start(tmp_path: Path) -> None:
    found = findings(job_file(tmp_path))
    assert found["save_dir"].verdict == "note"
    assert "waits" in found["save_dir"].text
    assert found["remote nas"].verdict == "note"
    assert "not initialised yet" in found["remote nas"].text
    assert not (tmp_path / "nas" / "run").exists()
    assert not (tmp_path / "nvme" / "run").exists()


def test_init_remote_and_then_all_is_well(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    (tmp_path / "nvme" / "run").mkdir()
    found = findings(path, init_remote=True)
    assert "made this job's remote" in found["remote nas"].text
    assert (tmp_path / "nas" / "run" / "_ckptd" / "remote.json").is_file()
    again = findings(path)
    assert again["remote nas"].verdict == "ok"
    assert again["write"].verdict == "ok"
    assert again["children"].what == "children"
    assert list((tmp_path / "nvme" / "run").iterdir()) == []
    assert [p.name for p in (tmp_path / "nas" / "run").rglob("*") if p.is_file()] == ["remote.json"]


def test_two_remotes_that_are_made_at_once_are_one_jobs(tmp_path: Path) -> None:
    """Each got a job id of its own, and the first run two."""
    path = job_file(tmp_path)
    (tmp_path / "nvme" / "run").mkdir()
    (tmp_path / "nas2").mkdir()
    other = f'[[remote]]\nname = "b"\nurl = "{tmp_path}/nas2/run"\nsame_filesystem = true\n'
    path.write_text(path.read_text() + other)
    found = findings(path, init_remote=True)
    assert "made this job's remote" in found["remote b"].text
    made = [(tmp_path / nas / "run" / "_ckptd" / "remote.json").read_text() for nas in ("nas", "nas2")]
    ids = [json.loads(text) for text in made]
    assert ids[0]["job_id"] == ids[1]["job_id"]
    assert ids[0]["remote_id"] != ids[1]["remote_id"]


def test_what_run_takes_check_takes(tmp_path: Path) -> None:
    """SAVE_DIR URL: whoever starts without a job file proves it as well before."""
    job_file(tmp_path)
    (tmp_path / "nvme" / "run").mkdir()
    done = ckptd("check", f"{tmp_path}/nvme/run", f"{tmp_path}/nas/run", "--no-probe")
    assert (done.returncode, f"run: {tmp_path}/nvme/run" in done.stdout) == (0, True), (
        done.stdout + done.stderr
    )
    (tmp_path / "etc" / "jobs.d").mkdir(parents=True)
    (tmp_path / "run.toml").rename(tmp_path / "etc" / "jobs.d" / "llama.toml")
    for word in ("llama", f"{tmp_path}/nvme/run", f"{tmp_path}/etc/jobs.d/llama.toml"):
        named = ckptd("check", word, "--no-probe", "--config-dir", f"{tmp_path}/etc")
        assert (named.returncode, "jobs.d/llama.toml" in named.stdout) == (0, True), (
            named.stdout + named.stderr
        )
    alone = ckptd("check", f"{tmp_path}/nvme/run")
    assert (alone.returncode, "there is no URL" in alone.stderr) == (2, True), alone.stderr


def test_bandwidth_is_echoed_with_what_holds_now(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    path.write_text(f'{path.read_text()}bandwidth = "00:00,8Gb/s"\n')
    all_of_it = check_job(load_job(path), DaemonConfig(), os.environ, init_remote=True)
    assert any("bandwidth 00:00 1 GB/s = 8 Gb/s" in finding.text for finding in all_of_it)
    path.write_text(path.read_text().replace("00:00,8Gb/s", "00:00,8Gb/s 12:00,off"))
    told = " ".join(finding.text for finding in check_job(load_job(path), DaemonConfig(), os.environ))
    assert "bandwidth 00:00 1 GB/s = 8 Gb/s, 12:00 none (local time; now " in told
    path.write_text(path.read_text().replace("12:00,off", "12.00,off"))
    with pytest.raises(
        ConfigError, match=r"remote\[0\]\.bandwidth .*'12\.00,off' is no entry of a timetable"
    ):
        load_job(path)


def test_a_remote_without_the_zero_form_is_told_what_it_will_not_get(tmp_path: Path) -> None:
    """On several nodes with disks of their own; over a shared directory each save lies whole."""
    path = job_file(tmp_path)
    archive = f'[[remote]]\nname = "archive"\nurl = "{tmp_path}/archive"\nforms = ["universal"]\n'
    path.write_text(f"{path.read_text()}{archive}required = false\n")

    def told() -> list[Finding]:
        every = check_job(load_job(path), DaemonConfig(), os.environ, writes=False)
        return [one for one in every if "takes no ZeRO form" in one.text]

    (finding,) = told()
    assert (finding.verdict, "archive" in finding.what) == ("note", True)
    assert "nothing of saves that are spread" in finding.text
    path.write_text(f"shared_fs = true\n{path.read_text()}")
    assert told() == []


def test_no_probe_touches_nothing(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    (tmp_path / "nvme" / "run").mkdir()
    found = findings(path, writes=False)
    assert found["write"].verdict == "note"
    assert found["remote nas"].verdict == "note"


def test_the_same_disk_is_no_remote(tmp_path: Path) -> None:
    found = findings(job_file(tmp_path, same=False))
    assert found["remote nas"].verdict == "fail"
    assert found["remote nas"].exit_code == 69


def test_a_remote_that_is_not_there(tmp_path: Path) -> None:
    found = findings(job_file(tmp_path, url="/nowhere/at/all"))
    assert found["remote nas"].verdict == "fail"
    assert found["remote nas"].exit_code == 69


def test_another_jobs_remote(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    findings(path, init_remote=True)
    other = path.rename(tmp_path / "other.toml")
    found = findings(other)
    assert found["remote nas"].exit_code == 69
    assert "job run" in found["remote nas"].text


def test_commits_without_an_identity_are_no_new_remote(tmp_path: Path) -> None:
    """`run` and `--init-remote` refuse it, so it is not called one that they will make."""
    path = job_file(tmp_path)
    commits = tmp_path / "nas" / "run" / "_ckptd" / "commits"
    commits.mkdir(parents=True)
    (commits / "global_step5~g1~zero.json").write_text("{}")
    for init_remote in (False, True):
        found = findings(path, init_remote=init_remote)["remote nas"]
        assert (found.verdict, found.exit_code) == ("fail", 69)
        assert "holds commits but no _ckptd/remote.json" in found.text
        assert "docs/recovery.md" in found.hint
    assert not (tmp_path / "nas" / "run" / "_ckptd" / "remote.json").exists()


def test_existing_folders_of_ours_stay(tmp_path: Path) -> None:
    save_dir = tmp_path / "run"
    (save_dir / "_ckptd" / "derived").mkdir(parents=True)
    found = {f.what: f for f in probe_save_dir(save_dir, parse_share("5%"), writes=True)}
    assert found["write"].verdict == "ok"
    assert [p.name for p in (save_dir / "_ckptd").iterdir()] == ["derived"]


def test_who_is_told_and_where_metrics_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm that nobody hears is found before it is needed; its URL is not shown, and nothing is sent."""
    program, url, page = tmp_path / "page", tmp_path / "slack", tmp_path / "metrics" / "x.prom"
    text = (
        f'metrics = "{page}"\n[notify]\nwebhook = "file:{url}"\nheartbeat = "file:hc"\n'
        f'command = ["{program}", "-v"]\non_committed = ["{program}"]\n'
    )
    (tmp_path / "ckptd.toml").write_text(text)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)

    def seen(*, metrics: str = str(page)) -> dict[str, tuple[str, str]]:
        daemon = load_daemon(tmp_path / "ckptd.toml", {"CKPTD_METRICS": metrics})
        return {f.what: (f.verdict, f.text) for f in check_outlets(daemon, writes=True)}

    found = seen()
    assert {what for what, (verdict, _) in found.items() if verdict == "fail"} == {
        *("webhook", "command", "on_committed", "metrics")
    }
    assert found["heartbeat"][0] == "note"
    program.write_text("#!/bin/sh\ntouch ran\n")
    url.write_text("nothing like one\n")
    page.parent.mkdir()
    assert (seen()["command"], seen()["webhook"]) == (
        ("fail", f"{program} cannot be run"),
        ("fail", f"{url} holds no URL"),
    )
    program.chmod(0o755)
    url.write_text("https://hooks.example/hunter2\n")
    found = seen()
    assert {what for what, (verdict, _) in found.items() if verdict != "ok"} == {"heartbeat"}
    assert "hunter2" not in str(found)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert seen(metrics=f"127.0.0.1:{port}")["metrics"][0] == "note"
    assert seen(metrics=f"127.0.0.1:{port}")["metrics"][0] == "ok"
    assert seen(metrics="192.0.2.1:9310")["metrics"][0] == "fail"
    (tmp_path / "jobs.d").mkdir()
    job_file(tmp_path).rename(tmp_path / "jobs.d/run.toml")
    assert ckptd("check", "--config-dir", str(tmp_path), "--no-probe").returncode == 0
    url.unlink()
    done = ckptd("check", "--config-dir", str(tmp_path), "--no-probe")
    assert (done.returncode, "webhook" in done.stdout) == (78, True)


def test_little_room_is_said(tmp_path: Path) -> None:
    found = {f.what: f for f in probe_save_dir(tmp_path, parse_share("100%"), writes=False)}
    assert found["room"].verdict == "note"
    assert "min_free" in found["room"].text


def _as_nobody(save_dir: Path, queue: multiprocessing.Queue[list[Finding]]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    queue.put(list(probe_save_dir(save_dir, parse_share("5%"), writes=True)))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize(("mode", "shard_mode"), [(0o755, 0o644), (0o777, 0o600), (0o1777, 0o644)])
def test_somebody_elses_save_dir(mode: int, shard_mode: int) -> None:
    base = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        base.chmod(0o755)
        save_dir = base / "run"
        folder = save_dir / "global_step5"
        folder.mkdir(parents=True)
        shard = folder / "mp_rank_00_model_states.pt"
        shard.write_bytes(b"PK")
        shard.chmod(shard_mode)
        save_dir.chmod(mode)
        context = multiprocessing.get_context("fork")
        queue: multiprocessing.Queue[list[Finding]] = context.Queue()
        process = context.Process(target=_as_nobody, args=(save_dir, queue))
        process.start()
        found = queue.get(timeout=200)
        process.join()
    finally:
        shutil.rmtree(base)
    failed = {f.what: f for f in found if f.verdict == "fail"}
    assert failed
    assert {f.exit_code for f in failed.values()} == {77}
    assert any("root (0)" in f.text or "root (0)" in f.hint for f in found)
    if shard_mode == 0o600:
        assert "mp_rank_00_model_states.pt" in failed["read"].text


def test_exit_codes(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    assert ckptd("check", str(path)).returncode == 0
    bad = tmp_path / "bad.toml"
    bad.write_text('output_dir = "/x"\n')
    done = ckptd("check", str(path), str(bad))
    assert done.returncode == 78
    assert '"save_dir"' in done.stdout
    assert "run: " in done.stdout
    assert ckptd("check", "--config-dir", str(tmp_path / "none")).returncode == 66
    assert ckptd("check", str(job_file(tmp_path, same=False))).returncode == 69


def test_init_prints_what_check_takes(tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    done = ckptd("init", str(tmp_path / "run"), str(tmp_path / "nas" / "run"))
    assert done.returncode == 0
    path = tmp_path / "run.toml"
    path.write_text(done.stdout.replace("# same_filesystem = false", "same_filesystem = true"))
    assert ckptd("check", str(path)).returncode == 0
    assert ckptd("init", "run", "ftp://bucket/run").returncode == 78


def test_a_glob_needs_a_place_for_state_before_it_matches_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one match it would run, until a second directory comes and the daemon starts again."""
    path = job_file(tmp_path, url=f"{tmp_path}/nas/{{dir}}")
    path.write_text(path.read_text().replace("/nvme/run", "/nvme/*/ckpt"))
    monkeypatch.setenv("CKPTD_CONFIG_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("CKPTD_STATE_DIR", str(tmp_path / "state"))
    done = ckptd("check", str(path))
    assert (done.returncode, "no directory matches yet" in done.stdout) == (0, True)
    done = ckptd("list", str(path))
    assert (done.returncode, "no directory matches" in done.stderr) == (66, True)
    monkeypatch.delenv("CKPTD_STATE_DIR")
    for matches in ([], ["r1"]):
        for name in matches:
            (tmp_path / "nvme" / name / "ckpt").mkdir(parents=True)
        done = ckptd("check", str(path))
        assert (done.returncode, "state_dir is missing" in done.stdout) == (78, True)
        done = ckptd("run", "--once", "--job", str(path))
        assert (done.returncode, "a glob in save_dir" in done.stderr) == (78, True)
    done = ckptd("status", str(path))
    assert (done.returncode, "its jobs are run-r1\n" in done.stderr) == (66, True)


def test_state_dir_of(tmp_path: Path) -> None:
    save_dir = tmp_path / "run"
    nowhere = {"HOME": "/nonexistent"}
    assert state_dir_of(save_dir, "run", None, nowhere) == save_dir / "_ckptd" / "state"
    assert state_dir_of(save_dir, "run", tmp_path / "s", nowhere, jobs_in_daemon=2) == tmp_path / "s" / "run"
    given = nowhere | {"STATE_DIRECTORY": "/var/lib/ckptd/alice"}
    assert state_dir_of(save_dir, "run", None, given) == Path("/var/lib/ckptd/alice/run")
    with pytest.raises(ConfigError):
        state_dir_of(save_dir, "run", None, nowhere, jobs_in_daemon=2)
    at_home = state_dir_of(save_dir, "run", None, {"HOME": str(tmp_path)})
    assert at_home.parent == Path(f"/var/tmp/ckptd-{os.getuid()}")
    assert at_home != state_dir_of(tmp_path / "other", "run", None, {"HOME": str(tmp_path)})


def test_private_state_is_ours_alone() -> None:
    place = Path(f"/var/tmp/ckptd-{os.getuid()}") / "test-state-dir"
    try:
        prepare_state_dir(place)
        assert place.stat().st_mode & 0o777 == 0o700
        prepare_state_dir(place)
        place.chmod(0o755)
        with pytest.raises(NotPermitted):
            prepare_state_dir(place)
        place.rmdir()
        place.symlink_to("/tmp")
        with pytest.raises(NotPermitted):
            prepare_state_dir(place)
    finally:
        if place.is_symlink():
            place.unlink()
        elif place.exists():
            place.rmdir()


def test_file_systems() -> None:
    assert filesystem_type(Path("/proc/self")) == "proc"
    assert is_network("nfs4")
    assert is_network("fuse.sshfs")
    assert not is_network("ext4")


def test_the_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["User"] == "%i"
    assert "--config-dir ${CKPTD_CONFIG_DIR} " in service["ExecStart"]
    assert service["RestartPreventExitStatus"] == "2 75 77 78"
    assert service["SuccessExitStatus"] == "3", "a drain that ran out of time is no failed unit"
    assert service["KillMode"] == "process", "a stop does not wait for a child that hangs in the kernel"
    assert service["ExecReload"].endswith("ckptd reload")
    assert service["Environment"] == "CKPTD_CONFIG_DIR=/etc/ckptd/%i"
    assert service["StateDirectory"] == "ckptd/%i"


def systemd_analyze() -> str:
    """The tool, or a skip with its reason."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze here (make system-packages)")
    return tool


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """It exits with 0 whatever it finds, so every word of it counts."""
    unit = tmp_path / "ckptd@root.service"
    unit.write_text(UNIT.read_text())
    done = subprocess.run(
        [systemd_analyze(), "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_exposes_little() -> None:
    command = [systemd_analyze(), "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= 2.0
