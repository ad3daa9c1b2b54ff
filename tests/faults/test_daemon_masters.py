"""A trainer that changes the model after its last step: refused, and with one key in the job file taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_daemon_service import House, codes_of
from tests.faults.test_daemon_service import house as house
from tests.unit.conversion.test_convert_proof import saved

pytestmark = [pytest.mark.real, pytest.mark.faults]

FORMS = ("universal", "weights-fp32")


def ckptd(*words: str) -> subprocess.CompletedProcess[str]:
    """A command, until its end."""
    command = [sys.executable, "-m", "ckptd", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def commits(house: House) -> set[str]:
    """Forms that are committed."""
    return {path.stem.rpartition("~")[2] for path in (house.root / "nas/a/_ckptd/commits").glob("*.json")}


def test_masters_other_than_the_weights_are_taken_where_the_job_file_says_so(house: House) -> None:
    """Made here and made as they are sent; what was refused before is tried again with the new job file."""
    folder = house.root / "nvme" / "a" / "global_step1"
    folder.parent.mkdir()
    key = "compare_masters = false\n"
    job = house.config / "jobs.d" / "a.toml"
    text = (
        f'save_dir = "{folder.parent}"\nsettle = "0.5s"\n[[remote]]\nname = "nas"\n'
        f'url = "{house.root}/nas/a"\nsame_filesystem = true\nforms = ["zero", "universal", "weights-fp32"]\n'
    )
    job.write_text(text)
    folder.mkdir()
    saved(folder, lambda module: module.update(a=module["b"]))
    house.start()
    refused = ["conversion-refused"] * len(FORMS)
    house.wait("the refusals", lambda: codes_of(house, "a") == refused)
    (problem, _) = house.jobs()["a"]["problems"]
    assert "a is not the weight of the model: element 0" in problem["text"]
    assert "compare_masters = false" in problem["next_step"]
    assert commits(house) == {"zero"}

    job.write_text(key + text)
    assert house.reload("a").returncode == 0
    house.wait("all forms", lambda: commits(house) == {"zero", *FORMS})
    house.wait("no problem", lambda: not house.jobs()["a"]["problems"])


def test_resume_takes_them_as_well(tmp_path: Path) -> None:
    """A form that is made as a trainer is started again on another number of ranks."""
    folder = tmp_path / "run" / "global_step1"
    folder.mkdir(parents=True)
    saved(folder, lambda module: module.update(a=module["b"]))
    job, words = tmp_path / "a.toml", ["resume", str(tmp_path / "a.toml"), "--world-size", "1"]
    text = f'save_dir = "{folder.parent}"\n[[remote]]\nname = "nas"\nurl = "{tmp_path}/nas"\n'
    job.write_text(f"{text}same_filesystem = true\n")
    (tmp_path / "nas").mkdir()
    assert ckptd("check", str(job), "--init-remote").returncode == 0
    done = ckptd(*words)
    assert (done.returncode, done.stdout) == (65, "")
    assert "a is not the weight of the model: element 0" in done.stderr
    assert "compare_masters = false in the job file" in done.stderr
    job.write_text(f"compare_masters = false\n{text}same_filesystem = true\n")
    done = ckptd(*words)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip(), "zero").is_dir()
