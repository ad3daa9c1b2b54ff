"""The shell completes jobs, tags and forms, as it asks for them: without a remote, and fast."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.observe.status import FILE_NAME
from tests.support.recover_scene import Scene

NAME = f"complete-{os.getpid()}"
BIN = Path(sys.executable).parent
CPU_SECONDS = 0.5
"""A completion takes 0.15 s alone on a machine."""


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with one job, of which a daemon has committed step 2 and gone."""
    root = tmp_path_factory.mktemp("completion")
    scene = Scene(root)
    scene.save(2)
    jobs = root / "conf" / "jobs.d"
    jobs.mkdir(parents=True)
    (jobs / f"{NAME}.toml").write_text(
        f'save_dir = "{scene.save_dir}"\nsettle = "0.3s"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
        "same_filesystem = true\n"
    )
    command = [sys.executable, "-m", "ckptd", "run", "--once"]
    subprocess.run(command, env=environment(root / "conf"), check=True, capture_output=True, timeout=200)
    assert (scene.save_dir / "_ckptd" / "state" / FILE_NAME).exists()
    # what only remotes hold is known too, and they need not answer
    shutil.rmtree(scene.nas)
    return root / "conf"


def environment(conf: Path) -> dict[str, str]:
    """Of the shell."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    return clean | {"CKPTD_CONFIG_DIR": str(conf), "PATH": f"{BIN}:{os.environ['PATH']}"}


def completed(conf: Path, line: str, shell: str = "bash") -> list[str]:
    """What `ckptd` answers the shell for the last word of a line."""
    words = line.split(" ")
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = subprocess.run(
        [str(BIN / "ckptd")],
        env=environment(conf) | asked | {"_CKPTD_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_jobs_and_tags(conf: Path, shell: str) -> None:
    assert NAME in " ".join(completed(conf, f"ckptd pin {NAME[:9]}", shell))
    assert "global_step2" in " ".join(completed(conf, f"ckptd pin {NAME} ", shell))


def test_every_notation_of_the_job_has_its_tags(conf: Path) -> None:
    for job in (NAME, f"{conf}/jobs.d/{NAME}.toml", f"{conf.parent}/nvme/run"):
        assert completed(conf, f"ckptd restore {job} glob") == ["global_step2"], job
    assert completed(conf, "ckptd pin no-such-job ") == []
    # a path is the shell's to complete
    assert completed(conf, "ckptd pin ./") == []


def test_forms(conf: Path) -> None:
    weights = ["weights-fp32", "weights-bf16", "weights-fp16"]
    assert completed(conf, f"ckptd restore {NAME} --form ") == ["universal", *weights, "zero"]
    assert completed(conf, "ckptd convert a b --form w") == weights


def test_a_completion_is_quick(conf: Path) -> None:
    for line in ("ckptd pi", "ckptd pin ", f"ckptd pin {NAME} "):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert completed(conf, line)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert taken < CPU_SECONDS, line


def test_bash_itself(conf: Path) -> None:
    script = (
        'eval "$(_CKPTD_COMPLETE=source_bash ckptd)"\n'
        'COMP_WORDS=(ckptd pin "$1" ""); COMP_CWORD=3\n'
        "$(complete -p ckptd | sed -E 's/.*-F ([^ ]+).*/\\1/') ckptd\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", NAME],
        env=environment(conf),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.stdout.strip(), done.stderr) == ("global_step2", "")
