"""Job files on the command line: named otherwise than their job, not readable, taken for a SAVE_DIR."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.cli.main import main
from ckptd.config.loader import LoadedConfig
from ckptd.maintenance.status.published import is_meant
from tests.support import status_gallery as gallery
from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]
NOBODY = 65534


@pytest.fixture
def job_file(scene: Scene) -> Path:
    """jobfile.toml of the job run-9."""
    path = scene.root / "jobfile.toml"
    path.write_text(
        f'name = "run-9"\nsave_dir = "{scene.save_dir}"\nsettle = "0.5s"\n[local]\nmin_free = "0%"\n'
        f'[[remote]]\nname = "nas"\nurl = "{scene.nas}"\nsame_filesystem = true\n'
    )
    return path


@contextmanager
def daemon(job_file: Path) -> Iterator[None]:
    """`ckptd run --job` of it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd", "run", "--job", str(job_file)], stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(200)


def ckptd(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command, as a person types it."""
    words = [sys.executable, "-m", "ckptd", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=dict(os.environ))


def test_a_file_that_is_not_named_as_its_job(scene: Scene, job_file: Path) -> None:
    scene.save(1)
    with daemon(job_file):
        deadline = time.monotonic() + 200
        while (done := ckptd("wait", job_file, "--step", 1, "--timeout", "10s")).returncode:
            assert time.monotonic() < deadline, done.stderr
        # committed is not yet safe: that it is there is looked at once more
        while (done := ckptd("status", job_file)).returncode == 3:
            assert time.monotonic() < deadline, done.stdout
        for command, said in (
            (("status", job_file), "run-9  ● SAFE  step 1"),
            (("pause", job_file), "run-9: paused"),
            (("pause", job_file, "--off"), "run-9: goes on"),
            (("drain", job_file, "--deadline", "60s"), "run-9: drained, all that is complete here"),
        ):
            done = ckptd(*command)
            assert (done.returncode, said in done.stdout) == (0, True), (command, done)
    done = ckptd("status", job_file)
    assert (done.returncode, "run-9  ● NOT WATCHED  the daemon was stopped" in done.stdout) == (1, True), done


def test_another_job_of_that_name_is_not_meant(scene: Scene, job_file: Path) -> None:
    """`pause jobfile.toml` would rest a run that nobody asked about."""
    other = gallery.job("jobfile", save_dir="/nvme/other")
    assert not is_meant(other, str(job_file))
    assert is_meant(replace(other, name="run-9"), str(job_file))
    assert is_meant(replace(other, save_dir=str(scene.save_dir)), str(job_file))
    # a file that does not run is published by its own name
    assert is_meant(replace(other, state="invalid"), str(job_file))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("status {file}/", 66, "is a file, no SAVE_DIR"),
        ("status {root}/notes", 66, "the name of a job file ends in .toml"),
        ("status {file}", 66, "start it with: ckptd run {file}\n"),
        ("status s3://bucket/run --live", 2, "--live is of this node's daemon"),
        ("status {root}/remote --retention", 2, "--retention is of this node's daemon"),
        ("status {root}/remote --watch", 2, "--watch is of this node's daemon"),
        ("restore {file} --to s3://bucket/run", 2, "into a directory of this machine"),
        ("uninstall {root}/gone --dry-run", 66, "{root}/gone is not there"),
        ("convert {root}/empty {root}/out", 66, "holds no shards and no `latest`\n"),
    ],
)
def test_what_names_no_job_is_said(
    scene: Scene, job_file: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, said: str
) -> None:
    (scene.root / "notes").write_text("of somebody")
    (scene.root / "empty").mkdir()
    (scene.root / "remote" / "_ckptd").mkdir(parents=True)
    (scene.root / "remote" / "_ckptd" / "remote.json").write_text("{}")
    place = {"root": str(scene.root), "file": str(job_file)}
    with pytest.raises(SystemExit) as end:
        main([word.format(**place) for word in words.split()])
    told = capsys.readouterr().err
    assert (end.value.code, said.format(**place) in told) == (code, True), told
    assert not told.rstrip("\n").endswith(": "), told


@pytest.mark.parametrize(("folder", "name"), [("my run", "my-run"), ("läufe", "l-ufe"), (".日本", "run")])
def test_a_save_dir_whose_name_no_job_takes(tmp_path: Path, folder: str, name: str) -> None:
    """Typed alone there is no file to name the job in."""
    scene = Scene(tmp_path)
    scene.save(1)
    save_dir = scene.save_dir.rename(scene.root / folder)
    run = ("run", save_dir, scene.nas, "--same-filesystem", "--once")
    assert ckptd(*run).returncode == 0
    done = ckptd("status", save_dir)
    assert done.stdout.startswith(f"{name}  ● NOT WATCHED  the daemon was stopped"), done
    assert "step 1 on the remote, " in done.stdout
    shutil.rmtree(save_dir)
    again = ckptd("resume", save_dir, scene.nas)
    assert (again.returncode, (save_dir / "global_step1").is_dir()) == (0, True), again
    assert f'name = "{name}"' in ckptd("init", save_dir, scene.nas).stdout


def _as_nobody(
    command: list[str], answers: multiprocessing.Queue[tuple[object, list[str], list[int]]]
) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    answers.put(told_to_run(command))


def told_to_run(command: list[str]) -> tuple[object, list[str], list[int]]:
    """The exit code, the jobs that a daemon was told to run, and the codes of those that it was not."""
    jobs: list[str] = []
    codes: list[int] = []

    class Told:
        def __init__(self, loaded: LoadedConfig, *_: object, **__: object) -> None:
            jobs.extend(job.name for job in loaded.jobs)
            codes.extend(error.exit_code for _, error in loaded.problems)
            self.jobs: list[object] = []

        def run(self) -> int:
            return 0

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr("ckptd.daemon.loop.Daemon", Told)
        try:
            main(command)
        except SystemExit as end:
            return end.code, jobs or said.getvalue().split(), codes
    raise AssertionError("it did not exit")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_file_that_may_not_be_read_stops_its_own_job_alone() -> None:
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o755)
        fine, closed = base / "fine.toml", base / "closed.toml"
        for path in (fine, closed):
            path.write_text(
                f'save_dir = "{base}/{path.stem}"\n[[remote]]\nname = "nas"\nurl = "{base}/nas/{path.stem}"\n'
            )
        closed.chmod(0o600)
        both = ["run", "--job", str(closed), "--job", str(fine)]
        alone = ["check", "--no-probe", str(closed)]
        context = multiprocessing.get_context("fork")
        found = []
        for command in (both, alone):
            told_to_run(command)  # what it imports is there before another user needs it
            answers: multiprocessing.Queue[tuple[object, list[str], list[int]]] = context.Queue()
            process = context.Process(target=_as_nobody, args=(command, answers))
            process.start()
            found.append(answers.get(timeout=40))
            process.join()
    finally:
        shutil.rmtree(base)
    assert found[0] == (0, ["fine"], [77])
    assert (found[1][0], f"{closed}: Permission denied" in " ".join(found[1][1])) == (77, True), found
