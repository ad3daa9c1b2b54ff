"""The examples run as their README says (CKPTD_FULL=1), and the suite of DeepSpeed says why it skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ds_suite.run import reason_to_skip
from tests.support.real import REPOSITORY

if os.environ.get("CKPTD_FULL"):  # three starts of training each

    @pytest.mark.real
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("stage", [1, 3])
    def test_elastic_resume(stage: int, tmp_path: Path) -> None:
        script = REPOSITORY / "examples" / "elastic_resume" / "run.py"
        short = ["--steps", "8", "--stage", str(stage), "--device", "cpu", "--out", str(tmp_path / "out")]
        done = subprocess.run(
            [sys.executable, str(script), *short], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("| good |") == 7
        assert (tmp_path / "out" / "elastic-resume.png").stat().st_size > 10_000


def test_the_suite_of_deepspeed_says_what_it_needs(tmp_path: Path) -> None:
    assert "DEEPSPEED_SRC" in str(reason_to_skip(None))
    assert str(tmp_path) in str(reason_to_skip(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.ds_suite.run", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[0].startswith("ds-suite skipped: ")) == (0, True)
