"""JOB means the same to every verb: a job file, a name, a SAVE_DIR or a URL, of real daemons."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_group

from ckptd.cli.main import build_app, main
from ckptd.cli.output import JOB_HELP
from ckptd.cli.verbs import VERBS
from ckptd.errors import LockHeld, UsageError
from ckptd.maintenance.uninstall import JobUninstall
from ckptd.page.sources import read_page, wanted
from ckptd.recover.select.job import job_named, state_dir_for
from ckptd.storage.local.job_names import is_daemon, running_daemons, running_in, running_job
from tests.support.recover_scene import Scene

WORKS, REFUSED, HELD = 0, 2, 75

TABLE: dict[str, tuple[tuple[str, ...], int, int]] = {
    "status": ((), WORKS, WORKS),
    "list": ((), WORKS, WORKS),
    "verify": ((), WORKS, WORKS),
    "restore": (("--to", "{root}/to", "--dry-run"), WORKS, WORKS),
    "gc": (("--dry-run",), WORKS, WORKS),
    "resume": (("--dry-run",), WORKS, REFUSED),
    "check": (("--no-probe",), WORKS, REFUSED),
    "pin": (("global_step2",), WORKS, REFUSED),
    "accept": (("--existing",), WORKS, REFUSED),
    # the newest stays
    "rm": (("global_step2", "--dry-run"), 65, REFUSED),
    "pause": (("--off",), WORKS, REFUSED),
    "plan": (("--with", "keep_last=1"), WORKS, REFUSED),
    "reload": ((), WORKS, REFUSED),
    "drain": (("--deadline", "20s"), WORKS, REFUSED),
    "logs": ((), WORKS, REFUSED),
    "events": ((), WORKS, REFUSED),
    "wait": (("--step", "2", "--timeout", "20s"), WORKS, REFUSED),
    # a daemon runs, which both refuse: they know which job is meant
    "takeover": ((), HELD, REFUSED),
    "uninstall": (("--dry-run",), HELD, REFUSED),
}
"""Of each verb: what follows JOB, and how it ends for a job of this node and for a remote alone."""
OTHERS = {"run", "init", "service", "inspect", "convert"}
"""Verbs that take no JOB."""
ENDLESS = {"ui"}
"""Verbs that take every JOB and do not end by themselves."""


@dataclass(frozen=True)
class Jobs:
    """Three daemons that run: of two arguments, of a job file somewhere, of a configuration directory."""

    root: Path
    by_hand: Scene
    by_file: Scene
    configured: Scene

    def notations(self) -> dict[str, list[tuple[str, Scene]]]:
        """Every way to write a job of this node, and a remote; with the job that is meant."""
        number = os.getpid()
        scenes = (self.by_hand, self.by_file, self.configured)
        return {
            "file": [
                (f"{self.root}/elsewhere.toml", self.by_file),
                (f"{self.root}/conf/jobs.d/stem-{number}.toml", self.configured),
            ],
            "name": [
                (f"hand-{number}", self.by_hand),
                (f"file-{number}", self.by_file),
                (f"conf-{number}", self.configured),
                (f"stem-{number}", self.configured),
            ],
            "save_dir": [
                *((str(scene.save_dir), scene) for scene in scenes),
                (os.path.relpath(self.by_hand.save_dir), self.by_hand),
            ],
            "url": [(f"file://{scene.nas}", scene) for scene in scenes]
            + [(str(self.by_hand.nas), self.by_hand)],
        }


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The daemons, with step 2 committed by each; this process has their configuration directory."""
    root, number = tmp_path_factory.mktemp("jobs"), os.getpid()
    (root / "conf" / "jobs.d").mkdir(parents=True)
    found = Jobs(root, *(Scene(root / name) for name in ("a", "b", "c")))
    text = (
        'name = "{}"\nsave_dir = "{}"\nsettle = "0.3s"\n'
        '[[remote]]\nname = "nas"\nurl = "{}"\nsame_filesystem = true\n'
    )
    elsewhere, configured = root / "elsewhere.toml", root / "conf" / "jobs.d" / f"stem-{number}.toml"
    elsewhere.write_text(text.format(f"file-{number}", found.by_file.save_dir, found.by_file.nas))
    configured.write_text(text.format(f"conf-{number}", found.configured.save_dir, found.configured.nas))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    environ["CKPTD_CONFIG_DIR"] = str(root / "conf")
    of_hand = {"CKPTD_NAME": f"hand-{number}", "CKPTD_SETTLE": "0.3s", "CKPTD_STATE_DIR": str(root / "state")}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CKPTD_")]:
            patch.delenv(name)
        patch.setenv("CKPTD_CONFIG_DIR", str(root / "conf"))
        daemons = []
        for scene, words, more in (
            (found.by_hand, [found.by_hand.save_dir, found.by_hand.nas, "--same-filesystem"], of_hand),
            (found.by_file, [elsewhere], {}),
            (found.configured, [], {}),
        ):
            scene.save(2)
            daemons.append(start(root, environ | more, *map(str, words)))
        try:
            for scene in (found.by_hand, found.by_file, found.configured):
                until_committed(scene)
            yield found
        finally:
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(60)


def start(root: Path, environ: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    """`ckptd run`; what it logs goes to a file."""
    with (root / "log").open("ab") as log:
        command = [sys.executable, "-m", "ckptd", "run", *words]
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log)


def until_committed(scene: Scene) -> None:
    """The pointer of its remote names step 2, and status says so."""
    deadline = time.monotonic() + 120
    while not (scene.nas / "latest").exists() or ends("status", str(scene.save_dir)) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def ends(*words: str) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    code = ended.value.code
    assert isinstance(code, int | None)
    return code or 0


@pytest.mark.parametrize("verb", TABLE)
def test_every_verb_takes_every_notation(jobs: Jobs, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, here, remote = TABLE[verb]
    wrong = []
    for kind, words in jobs.notations().items():
        for job, scene in words:
            code = ends(verb, job, *(one.format(root=jobs.root) for one in options))
            said = capsys.readouterr()
            if code != (remote if kind == "url" else here):
                wrong.append((kind, job, code, said))
            if code == REFUSED:
                assert "is a remote" in said.err or "the second alone" in said.err, said
                assert f"ckptd {verb}" in said.err.partition("→")[2]
            if code == HELD:
                assert str(scene.save_dir) in said.err
    assert not wrong


def test_the_page_takes_every_notation(jobs: Jobs) -> None:
    for words in jobs.notations().values():
        for job, scene in words:
            (shown,) = read_page(wanted([job])).jobs
            assert shown.verdict == "SAFE", job
            assert str(scene.nas) in shown.where or shown.where == str(scene.save_dir), job
    assert read_page(wanted([])).jobs


def test_a_verb_that_needs_a_node_names_the_job_that_uploads_there(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends("pause", f"file://{jobs.by_file.nas}/") == 2
    assert f"→ ckptd pause {jobs.by_file.save_dir}: job file-" in capsys.readouterr().err


def test_run_alone_with_a_save_dir_says_how_it_was_started(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends("run", str(jobs.by_hand.save_dir)) == 2
    assert f"→ ckptd run {jobs.by_hand.save_dir} {jobs.by_hand.nas}: as it was" in capsys.readouterr().err
    assert ends("run", str(jobs.by_file.save_dir)) == 2
    assert f"→ ckptd run {jobs.root}/elsewhere.toml: the job file" in capsys.readouterr().err
    assert ends("run", f"file://{jobs.by_file.nas}") == 2
    assert "which goes second: ckptd run SAVE_DIR URL" in capsys.readouterr().err


def test_a_name_nobody_has_is_told_with_those_that_run(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("status", "list", "pause"):
        assert ends(verb, "no-such-job") == 66
        said = capsys.readouterr().err
        assert f"(known: conf-{os.getpid()})" in said
        assert f"hand-{os.getpid()}" in said.partition("; running: ")[2]


def test_a_name_that_two_daemons_have_means_neither(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"hand-{os.getpid()}"
    other = Scene(jobs.root / "twin")
    other.save(2)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    environ |= {"CKPTD_NAME": name, "CKPTD_SETTLE": "0.3s"}
    daemon = start(jobs.root, environ, str(other.save_dir), str(other.nas), "--same-filesystem")
    try:
        until_committed(other)
        capsys.readouterr()
        with pytest.raises(UsageError, match="2 jobs called"):
            running_job(name)
        for verb in ("status", "gc", "pause"):
            assert ends(verb, name) == 2
            assert f"{other.save_dir}" in capsys.readouterr().err
    finally:
        daemon.terminate()
        daemon.wait(60)
    assert running_job(name) is not None


def test_a_state_directory_elsewhere_is_that_of_the_daemon(jobs: Jobs) -> None:
    """$CKPTD_STATE_DIR was set for the daemon alone."""
    scene = jobs.by_hand
    place = jobs.root / "state" / f"hand-{os.getpid()}"
    running = running_in(scene.save_dir)
    assert running is not None and running.place == place
    assert running.pid in {daemon.pid for daemon in running_daemons()}
    job = job_named(str(scene.save_dir), os.environ)
    assert (job.name, job.remotes[0].url) == (place.name, str(scene.nas))
    assert state_dir_for(job, os.environ, None) == place


@pytest.mark.parametrize("which", ["hand", "file", "conf"])
def test_a_folder_of_a_jobs_name_is_not_the_job(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """`restore … --to ./llama-7b` leaves one; `uninstall llama-7b` beside it took the daemon's state away."""
    name = f"{which}-{os.getpid()}"
    meant = {"hand": jobs.by_hand, "file": jobs.by_file, "conf": jobs.configured}[which]
    shutil.copytree(meant.save_dir / "global_step2", tmp_path / name / "global_step2")
    monkeypatch.chdir(tmp_path)
    assert job_named(name, os.environ).save_dir == meant.save_dir
    assert ends("uninstall", name) == HELD
    running = running_in(meant.save_dir)
    assert running is not None and (running.place / "journal.db").exists()
    # with a / it is the folder, of which nothing is known here
    assert job_named(f"./{name}", os.environ).save_dir == tmp_path / name
    assert ends("list", f"./{name}") == 66


def test_the_state_of_a_daemon_that_runs_is_never_removed(jobs: Jobs) -> None:
    """Whatever save_dir it is taken for."""
    running = running_in(jobs.by_hand.save_dir)
    assert running is not None
    other = Scene(jobs.root / "other")
    other.save(1)
    with pytest.raises(LockHeld, match="keeps its state"):
        JobUninstall(job_named(str(other.save_dir), os.environ), running.place)


def test_every_verb_says_the_same_of_job() -> None:
    commands = get_group(build_app()).commands
    assert set(TABLE) | OTHERS | ENDLESS == set(VERBS)
    for verb in {*TABLE, *ENDLESS}:
        job = commands[verb].params[0]
        assert (job.metavar or "").split() in (["JOB"], ["JOB", "..."]), verb
        assert str(getattr(job, "help", "")).startswith(JOB_HELP), verb


@pytest.mark.parametrize(
    ("program", "is_one"), [("dumb-init", False), ("/usr/bin/sudo", False), ("python3", True)]
)
def test_what_starts_a_daemon_is_none(program: str, is_one: bool) -> None:
    """`sudo ckptd run` has the same words, and passes the signals on."""
    code = "import signal, time; signal.signal(signal.SIGHUP, print); print('up', flush=True); time.sleep(60)"
    words = [program, "-c", code, "ckptd", "run", "/nvme/run", "/mnt/nas/run"]
    with subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            assert is_daemon(process.pid, signal.SIGHUP) is is_one
        finally:
            process.kill()


def test_a_job_of_two_arguments_keeps_its_name_after_its_daemon_has_ended(tmp_path: Path) -> None:
    """Where its state lies by name, and not in its save_dir."""
    scene, name = Scene(tmp_path), f"ended-{os.getpid()}"
    scene.save(2)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ckptd.toml").write_text(f'state_dir = "{tmp_path}/state"\n')
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    environ |= {"CKPTD_CONFIG_DIR": str(tmp_path / "conf"), "CKPTD_SETTLE": "0.3s"}

    def ckptd(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ckptd", *map(str, words)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environ | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    start = ("run", scene.save_dir, scene.nas, "--same-filesystem", "--once")
    assert ckptd(*start, CKPTD_NAME=name).returncode == 0
    for words, code, told in (
        (("status",), 1, "NOT WATCHED"),
        (("logs",), 0, "global_step2"),
        (("list",), 0, "global_step2"),
        (("plan",), 0, "nothing would be deleted"),
        (("uninstall", "--dry-run"), 0, f"{tmp_path}/state/{name}/journal.db"),
        (("uninstall",), 0, f"removed: {tmp_path}/state/{name}/journal.db"),
        (("uninstall",), 66, ""),
    ):
        done = ckptd(words[0], name, *words[1:])
        assert (done.returncode, told in done.stdout) == (code, True), (words, done)
