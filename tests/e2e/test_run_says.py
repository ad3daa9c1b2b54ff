"""What `ckptd run` prints to who started it by hand: a few lines, each once, and what is safe at the end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import ckptd
from tests.support.synthetic import write_stage12

GROUPS = [{"w": (16, 8), "b": (8,)}]


def command(root: Path, *words: str) -> list[str]:
    """`ckptd run SAVE_DIR URL WORDS`, which allows the same disk."""
    return [sys.executable, "-m", "ckptd", "run", f"{root}/run", f"{root}/nas", "--same-filesystem", *words]


def run(words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run to its end; `more`: of the environment."""
    environment = os.environ | {"CKPTD_SETTLE": "0.2s", "COLUMNS": "400"} | more
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment)


def save(root: Path) -> None:
    """One checkpoint."""
    (root / "run").mkdir()
    write_stage12(root / "run" / "global_step5", GROUPS, 2, step=5)
    (root / "run" / "latest").write_text("global_step5")


def test_the_last_line_says_what_is_safe(tmp_path: Path) -> None:
    save(tmp_path)
    done = run(command(tmp_path, "--once"))
    assert done.returncode == 0, done
    lines = [line.split(maxsplit=3)[-1] for line in done.stderr.splitlines()]
    assert lines[0].endswith(f"watching {tmp_path}/run: 1 checkpoint there")
    assert "ckptd: run: SAFE  step 5 on the remote" in lines[-1]
    # nobody who reads it knows the words of the journal
    assert not [line for line in lines if "generation" in line or "branch" in line or "first-start" in line]


def test_an_exit_code_is_explained_above_what_is_safe(tmp_path: Path) -> None:
    save(tmp_path)
    done = run(command(tmp_path, "--once"), CKPTD_MIN_FREE="4096TB")
    assert done.returncode == 1, done
    *_, why, safe = done.stderr.splitlines()
    assert why.endswith("ckptd: run: exit code 1: disk-low; `ckptd status` says more"), done.stderr
    assert "ckptd: run: SAFE  step 5" in safe


def test_the_start_says_what_is_uploaded_and_what_it_costs(tmp_path: Path) -> None:
    """In the words of `check`, before anything is uploaded; a later start says the cost alone."""
    save(tmp_path)
    for step in (10, 15):
        write_stage12(tmp_path / "run" / f"global_step{step}", GROUPS, 2, step=step)
    (tmp_path / "run" / "latest").write_text("global_step15")
    words = [sys.executable, "-m", "ckptd", "check", f"{tmp_path}/run", f"{tmp_path}/nas"]
    checked = " ".join(run([*words, "--same-filesystem"]).stdout.split())
    existing = (
        "3 checkpoints lie here already: global_step15 will be uploaded; the other 2 stay on this node "
    )
    halves = 'forms = ["zero"] halves it: `ckptd convert` makes the universal form when it is needed'
    for start in (1, 2):
        told = run(command(tmp_path, "--once")).stderr
        before, _, _ = told.partition("is complete: step")
        assert (existing in before) == (start == 1), told
        assert ("a save of this size uploads about " in before, halves in before) == (True, True), told
    assert (existing in checked, halves in checked) == (True, True), checked


def test_what_ran_once_is_started_to_watch(tmp_path: Path) -> None:
    save(tmp_path)
    assert run(command(tmp_path, "--once")).returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "status", f"{tmp_path}/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"ckptd run {tmp_path}/run" in done.stdout
    assert "--once" not in done.stdout


def test_a_save_dir_that_is_not_there_is_said_and_is_not_success(tmp_path: Path) -> None:
    done = run(command(tmp_path, "--once"))
    assert done.returncode == 3, done
    assert f"{tmp_path}/run does not exist yet: ckptd waits for it" in done.stderr


def test_a_refused_remote_is_said_once(tmp_path: Path) -> None:
    save(tmp_path)
    words = [word for word in command(tmp_path, "--once") if word != "--same-filesystem"]
    done = run(words)
    assert done.returncode == 1, done
    assert done.stderr.count("lies on the same file system as save_dir") == 1
    assert "--same-filesystem, or same_filesystem = true in the job file" in done.stderr
    assert "NOT SAFE" in done.stderr.splitlines()[-1]


@contextlib.contextmanager
def running(words: list[str], log: Path) -> Iterator[psutil.Process]:
    """A daemon, until the end of the block."""
    with log.open("w") as err:
        process = subprocess.Popen(words, stderr=err, env=os.environ | {"CKPTD_SETTLE": "0.2s"})
        try:
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for it."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def status(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`ckptd status SAVE_DIR`, in one line."""
    done = run([sys.executable, "-m", "ckptd", "status", f"{root}/run", *words])
    done.stdout = " ".join(done.stdout.split())
    return done


def test_a_save_in_doubt_is_logged_once(tmp_path: Path) -> None:
    """As those are that are complete, with what to type; also where turn follows turn."""
    save(tmp_path)
    folder, log = tmp_path / "run" / "global_step10", tmp_path / "log"
    write_stage12(folder, GROUPS, 2, step=10)
    for number, shard in enumerate(sorted(folder.glob("*.pt"))):
        os.utime(shard, (1_700_000_000 + 9000 * number,) * 2)
    with running(command(tmp_path), log):
        until(lambda: "global_step10: two saves?" in log.read_text(), "it is not logged")
        until(lambda: "global_step5 (zero) committed" in log.read_text(), "no other turn comes")
    lines = [line for line in log.read_text().splitlines() if "global_step10: two saves?" in line]
    assert len(lines) == 1, lines
    assert "WARNING" in lines[0]
    assert f"ckptd accept {tmp_path}/run global_step10; else ckptd resume moves it aside" in lines[0]


def test_what_was_accepted_is_waited_for(tmp_path: Path) -> None:
    """`wait` said for seconds that it will not be committed, until the daemon had read the word."""
    save(tmp_path)
    folder = tmp_path / "run" / "global_step10"
    write_stage12(folder, GROUPS, 2, step=10)
    for number, shard in enumerate(sorted(folder.glob("*.pt"))):
        os.utime(shard, (1_700_000_000 + 9000 * number,) * 2)
    with running(command(tmp_path), tmp_path / "log"):
        until(lambda: "global_step10 is suspect" in status(tmp_path).stdout, "it is not suspect")
        program = [sys.executable, "-m", "ckptd"]
        done = run([*program, "accept", f"{tmp_path}/run", "global_step10"])
        assert (done.returncode, done.stderr) == (0, ""), done
        done = run([*program, "wait", f"{tmp_path}/run", "--step", "10", "--timeout", "60s"])
        assert (done.returncode, "step 10 (global_step10) is committed" in done.stdout) == (0, True), done


@pytest.mark.parametrize("is_there", [True, False], ids=["empty", "no save_dir"])
def test_a_remote_that_is_not_there_is_said_before_the_first_save(tmp_path: Path, is_there: bool) -> None:
    """In words, with the next step, by log and status; nothing is made there; and it goes on by itself."""
    (tmp_path / "run").mkdir() if is_there else None
    url, log = tmp_path / "mnt" / "nas", tmp_path / "log"
    words = [*command(tmp_path)[:5], str(url), "--same-filesystem"]
    with running(words, log):
        until(lambda: "its parent" in status(tmp_path).stdout, "it says nothing")
        done = status(tmp_path)
        said = f"{url} is not there: its parent {url.parent} does not exist"
        assert (done.returncode, said in done.stdout) == (3, True), done
        assert f"mkdir -p {url.parent}" in done.stdout
        assert log.read_text().count("does not exist; is the disk or share mounted?") == 1
        url.parent.mkdir()
        until(lambda: "it answers, and the first save makes it" in status(tmp_path).stdout, "it is not tried")
        done = status(tmp_path)
        assert (done.returncode, "● WAITING no checkpoint yet" in done.stdout) == (3, True), done
        assert not url.exists(), "nothing is made before there is something to upload"
        (tmp_path / "run").mkdir(exist_ok=True)
        write_stage12(tmp_path / "run" / "global_step5", GROUPS, 2, step=5)
        (tmp_path / "run" / "latest").write_text("global_step5")
        until(lambda: "● SAFE step 5" in status(tmp_path).stdout, log.read_text())


def test_after_the_loss_of_a_node_the_list_has_what_the_remote_holds(tmp_path: Path) -> None:
    """From what the daemon knows of its remotes, before the first checkpoint and after a resume."""
    save(tmp_path)
    for step in (10, 15):
        write_stage12(tmp_path / "run" / f"global_step{step}", GROUPS, 2, step=step)
    (tmp_path / "run" / "latest").write_text("global_step15")
    assert run(command(tmp_path, "--once", "--existing", "all")).returncode == 0
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with running(command(tmp_path), tmp_path / "log"):
        told = "WAITING no checkpoint here yet; global_step15 is on the remote"
        until(lambda: told in status(tmp_path).stdout, "it does not say what the remote holds")
        row = r"global_step{} +{} +\S+ kB +– +✓ zero"
        shown = status(tmp_path).stdout
        assert all(re.search(row.format(step, step), shown) for step in (5, 10, 15)), shown
        done = run([sys.executable, "-m", "ckptd", "resume", f"{tmp_path}/run", f"{tmp_path}/nas"])
        assert done.returncode == 0, done
        here = re.compile(r"● SAFE step 15 .* global_step15 +15 +\S+ kB +zero\b.* ✓ zero")
        until(lambda: here.search(status(tmp_path).stdout) is not None, "the resumed one is not known")
        shown = status(tmp_path).stdout
        assert all(re.search(row.format(step, step), shown) for step in (5, 10)), shown
        assert len(re.findall(r"global_step15 +15 ", shown)) == 1, shown
        assert status(tmp_path, "--html", f"{tmp_path}/page.html").returncode == 0
        report = ckptd.status(tmp_path / "run")
    page = (tmp_path / "page.html").read_text()
    assert all(f"global_step{step}" in page for step in (5, 10, 15))
    assert [one.tag for one in report.checkpoints] == ["global_step15", "global_step10", "global_step5"]
    assert report.checkpoints[2].remotes["remote"]["zero"] == "committed"


def test_a_remote_of_another_job_is_said_before_the_first_save(tmp_path: Path) -> None:
    save(tmp_path)
    assert run(command(tmp_path, "--once")).returncode == 0
    words = [word.replace("/run", "/other") for word in command(tmp_path)]
    (tmp_path / "other").mkdir()
    with running(words, tmp_path / "log"):
        told = f"{tmp_path}/nas belongs to job run"
        until(lambda: told in (tmp_path / "log").read_text(), "it says nothing")
    done = run([*words, "--once"])
    assert (done.returncode, done.stderr.count(told)) == (1, 1), done


def test_a_remote_that_waits_costs_no_process(tmp_path: Path) -> None:
    """What answered is left alone until there is something to upload."""
    save(tmp_path)
    assert run(command(tmp_path, "--once")).returncode == 0
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with running(command(tmp_path), tmp_path / "log") as daemon:
        until(lambda: '"attached": true' in status(tmp_path, "--json").stdout, "it does not attach")
        until(lambda: not daemon.children(), "its process stays")


def test_an_error_of_the_only_job_is_printed_once(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "ckptd", "run", "--job", f"{tmp_path}/none.toml"])
    assert done.returncode != 0
    assert done.stderr.count("no file") == 1, done.stderr


@pytest.mark.parametrize("after_seconds", [0.6, 0.9, 1.3, 2.5])
def test_ctrl_c_prints_no_traceback(tmp_path: Path, after_seconds: float) -> None:
    """A terminal sends it to the whole group: also to a child that has just been started."""
    save(tmp_path)
    process = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True, process_group=0)
    time.sleep(after_seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert "Traceback" not in told, told
