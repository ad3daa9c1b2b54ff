"""What `ckptd run` prints to who started it by hand: a few lines, each once, and what is safe at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.synthetic import write_stage12

GROUPS = [{"w": (16, 8), "b": (8,)}]


def command(root: Path, *words: str) -> list[str]:
    """`ckptd run SAVE_DIR URL WORDS`, which allows the same disk."""
    return [sys.executable, "-m", "ckptd", "run", f"{root}/run", f"{root}/nas", "--same-filesystem", *words]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run to its end."""
    environment = os.environ | {"CKPTD_SETTLE": "0.2s"}
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
