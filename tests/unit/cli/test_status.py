"""`ckptd status` over several jobs: each state directory holds its own, the command joins them (H33)."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ckptd.base import files
from ckptd.cli.main import main
from ckptd.cli.status.tables import checkpoints_table
from ckptd.storage.local.state_dir import prepare_state_dir
from tests.support import status_gallery as gallery

NOBODY = 65534


def just_now() -> str:
    """As a daemon that runs publishes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def document(*names: str, pid: int, at: str, root: Path) -> dict[str, Any]:
    """What a daemon publishes for a job."""
    daemon = {"pid": pid, "alive": True, "version": "0", "started_at": "2026-01-01T00:00:00.000Z"}
    jobs = [
        {
            "name": name,
            "save_dir": f"{root}/nvme/{name}",
            "state": "ok",
            "as_of": at,
            "opt_outs": [],
            "problems": [],
            "checkpoints": [],
        }
        for name in names
    ]
    return {"schema_version": 1, "generated_at": at, "daemon": daemon, "jobs": jobs}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Three job files, and the state directory that ckptd.toml names."""
    jobs = tmp_path / "etc" / "jobs.d"
    jobs.mkdir(parents=True)
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nas").mkdir()
    (tmp_path / "etc" / "ckptd.toml").write_text(f'state_dir = "{tmp_path}/state"\n')
    for name in ("a", "b", "c"):
        (jobs / f"{name}.toml").write_text(
            f'save_dir = "{tmp_path}/nvme/{name}"\n'
            f'[[remote]]\nname = "nas"\nurl = "{tmp_path}/nas/{name}"\nsame_filesystem = true\n'
        )
        (tmp_path / "state" / name).mkdir(parents=True)
    return tmp_path


def publish(house: Path, name: str, text: dict[str, Any]) -> None:
    """status.json of one job."""
    (house / "state" / name / "status.json").write_text(json.dumps(text))


def status(house: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, as any user runs it."""
    environment = os.environ | {"CKPTD_CONFIG_DIR": str(house / "etc")} | environ
    command = [sys.executable, "-m", "ckptd", "status", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_jobs_of_one_daemon_are_joined_and_those_of_a_dead_one_are_not(house: Path) -> None:
    now, before = just_now(), "2026-01-02T10:00:00.000Z"
    publish(house, "a", document("a", pid=os.getpid(), at=now, root=house))
    publish(house, "b", document("b", pid=os.getpid(), at=now, root=house))
    publish(house, "c", document("c", pid=1, at=before, root=house))
    found = json.loads(status(house, "--json").stdout)
    assert [job["name"] for job in found["jobs"]] == ["a", "b"]
    assert found["daemon"]["alive"] is True
    shown = status(house)
    assert shown.stdout.index("a") < shown.stdout.index("b")


def test_a_job_that_the_daemon_does_not_run_any_more_is_said(house: Path) -> None:
    publish(house, "a", document(pid=os.getpid(), at=just_now(), root=house))
    done = status(house, "a")
    assert done.returncode == 66
    assert "does not run a any more" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["b", "{root}/nvme/b", "{root}/etc/jobs.d/b.toml"])
def test_a_job_is_found_by_name_by_save_dir_and_by_file(house: Path, word: str) -> None:
    """Also where `state_dir` of ckptd.toml is the only place that has it."""
    publish(house, "b", document("b", pid=os.getpid(), at=just_now(), root=house))
    (house / "nvme" / "b").mkdir()
    found = json.loads(status(house, word.format(root=house), "--json").stdout)
    assert [job["name"] for job in found["jobs"]] == ["b"]


def test_a_url_with_a_tag_says_what_shows_it(house: Path) -> None:
    done = status(house, "s3://bucket/run", "global_step5")
    assert (done.returncode, "ckptd list s3://bucket/run" in done.stderr) == (2, True), done.stderr


def test_no_job_at_all_is_said(tmp_path: Path) -> None:
    done = status(tmp_path)
    assert (done.returncode, "there is no job in" in done.stderr) == (66, True), done.stderr


def test_a_configuration_that_names_no_job_any_more_says_why(tmp_path: Path) -> None:
    """A daemon may go on with what it read before: "there is no job" would be a lie about it."""
    (tmp_path / "etc" / "jobs.d").mkdir(parents=True)
    (tmp_path / "etc" / "jobs.d" / "a.toml").write_text('save_dri = "/nvme/a"\n')
    done = status(tmp_path)
    assert done.returncode == 66
    assert "etc/jobs.d/a.toml: save_dri" in done.stderr
    assert 'did you mean "save_dir"?; `ckptd check` reads it' in done.stderr


def test_what_to_type_names_what_was_asked_for(tmp_path: Path) -> None:
    """A SAVE_DIR that no daemon runs, and a directory that is not there (a remote that is not mounted)."""
    assert f"start it with: ckptd run {tmp_path} URL" in status(tmp_path, str(tmp_path)).stderr
    gone = tmp_path / "mnt" / "run"
    done = status(tmp_path, str(gone))
    assert (done.returncode, f"{gone} is not there: a remote that is not mounted" in done.stderr) == (
        66,
        True,
    )


def test_a_daemon_that_nobody_has_waited_for_is_gone(house: Path) -> None:
    """A container without an init keeps it as a zombie, which takes signals like any process."""
    with subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        publish(house, "a", document("a", pid=zombie.pid, at=just_now(), root=house))
        done, live = status(house, "a"), status(house, "a", "--live")
    assert (done.returncode, live.returncode) == (1, 1)
    assert f"● NOT WATCHED  the daemon (process {zombie.pid}) is gone" in done.stdout


@pytest.mark.parametrize("state", ["committed", "shipping"])
def test_what_was_committed_is_said_while_its_remote_is_away(house: Path, state: str) -> None:
    """Still not safe (P17), but nobody has to think that everything is lost."""
    text = document("a", pid=os.getpid(), at=just_now(), root=house)
    local = {"present": True, "universal": "none", "held": False}
    text["jobs"][0]["checkpoints"] = [
        {
            "tag": f"global_step{step}",
            "step": step,
            "branch": 1,
            "bytes": 5,
            "state": "complete",
            "local": local,
            "remotes": {"nas": {"zero": {"state": state, "bytes_done": 0, "bytes_total": 0}}},
            "keep": [],
            "reason": None,
            "pinned": False,
        }
        for step in (9, 10)
    ]
    publish(house, "a", text)
    first = status(house, "a").stdout.splitlines()[0]
    assert "NOT SAFE" in first
    assert ("global_step10 was committed" in first) is (state == "committed")


def test_an_opt_out_stands_on_the_first_line(house: Path) -> None:
    """Whoever weakened a promise reads it with each "is my run safe?" (P1)."""
    text = document("a", pid=os.getpid(), at=just_now(), root=house)
    text["jobs"][0]["opt_outs"] = ['unuploaded = "thin": checkpoints may go before they are committed']
    publish(house, "a", text)
    first = status(house, "a", COLUMNS="200").stdout.splitlines()[0]
    assert first.startswith("a  ● NOT SAFE")
    assert 'OPT-OUT unuploaded = "thin"' in first


def test_a_save_that_was_cut_short_is_shown_with_its_bytes_and_the_command(house: Path) -> None:
    """What nobody else removes, and what all of them hold of a disk that fills (H23)."""
    text = document("a", pid=os.getpid(), at=just_now(), root=house)
    job = text["jobs"][0]
    job["disk"] = {
        "free_bytes": 5 * 10**9,
        "next_save_bytes": 10**9,
        "full_in_saves": 2,
        "full_in_seconds": 2400.0,
        "unfinished_bytes": 12 * 10**9,
    }
    job |= {"production_bytes_per_second": 8e8, "link_bytes_per_second": 2e8}
    job["checkpoints"] = [
        {
            "tag": "global_step9",
            "step": 9,
            "branch": None,
            "bytes": 12 * 10**9,
            "state": "incomplete",
            "local": {"present": True, "universal": "none", "held": False},
            "remotes": {},
            "keep": [],
            "reason": "missing: optimizer shard of rank 1",
            "next_step": "ckptd gc a --incomplete global_step9",
            "pinned": False,
        }
    ]
    publish(house, "a", text)
    shown = " ".join(status(house, "a").stdout.split())
    assert "full in 2 saves, 40 min at this pace" in shown
    speeds = "trainer writes 800 MB/s upload 200 MB/s"
    assert f"12.0 GB in saves cut short, damaged or in doubt · {speeds}" in shown
    assert "rank 1 → ckptd gc a --incomplete global_step9 removes it" in shown


@pytest.mark.parametrize("text", ["{}", "[]", '{"generated_at": 1, "daemon": {}, "jobs": []}', '{"x'])
def test_what_is_no_status_is_said(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_text(text)
    for verb in (["status"], ["status", "--json"], ["pause"]):
        with pytest.raises(SystemExit) as ended:
            main([*verb, "--state-dir", str(tmp_path)])
        assert ended.value.code == 66
        assert "status.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"generated_at": null, "daemon": {"version": "9.9.9"}, "jobs": []}', "ckptd 9.9.9 wrote it"),
        ('{"schema_version": 2}', "another ckptd (schema_version 2) wrote it"),
        ("[" * 200_000, "writes it again within 20 s"),
    ],
)
def test_what_another_version_wrote_is_said(
    tmp_path: Path, text: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["status", "--state-dir", str(tmp_path)])
    assert hint in capsys.readouterr().err


def test_retention_says_why_each_stays_and_why_one_goes() -> None:
    kept = replace(gallery.checkpoint(5), keep=("newest complete", "pinned"))
    goes_soon = replace(gallery.checkpoint(4), keep=(), goes="save_total_limit 1")
    job = gallery.job(checkpoints=(kept, goes_soon))
    out = io.StringIO()
    Console(file=out, width=200).print(checkpoints_table(job, retention=True))
    title, stays, goes = (line.rstrip() for line in out.getvalue().splitlines())
    assert title.endswith("kept here because")
    assert stays.endswith("  newest complete; pinned")
    assert goes.endswith("  delete: save_total_limit 1")


def test_a_tag_is_whole_on_a_narrow_terminal() -> None:
    long = replace(gallery.checkpoint(4000), tag=f"global_step{'0' * 20}", reason="word " * 9)
    job = gallery.job(checkpoints=(long,), remotes=())
    out = io.StringIO()
    Console(file=out, width=70).print(checkpoints_table(job, retention=False))
    assert f"global_step{'0' * 20} " in out.getvalue()


def _as_somebody_else(place: str, answers: multiprocessing.Queue[tuple[object, str]]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            main(["status", "--state-dir", place])
        except SystemExit as end:
            answers.put((end.code, said.getvalue()))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_any_user_is_answered() -> None:
    """By the modes that a daemon gives what it publishes, and its process seen from another user."""
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o755)
        place = base / "run" / "_ckptd" / "state"
        place.parent.mkdir(parents=True)
        prepare_state_dir(place)
        text = json.dumps(document("a", pid=os.getpid(), at=just_now(), root=base)).encode()
        with files.opened_dir(place) as fd:
            files.write_atomic(fd, "status.json", text, mode=0o644)
        context = multiprocessing.get_context("fork")
        answers: multiprocessing.Queue[tuple[object, str]] = context.Queue()
        process = context.Process(target=_as_somebody_else, args=(str(place), answers))
        process.start()
        code, said = answers.get(timeout=200)
        process.join()
    finally:
        shutil.rmtree(base)
    assert (code, "a  ● NOT SAFE  nothing is committed yet" in said) == (3, True), said
