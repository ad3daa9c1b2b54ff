"""kill -9 at random moments of a conversion to dcp, and of one back to universal (P7)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import CkptdError
from ckptd.maintenance.inspection import inspect_folder
from tests.faults.test_convert_killed import GROUPS, tree
from tests.support.processes import kill_with_children
from tests.support.real import REPOSITORY
from tests.support.synthetic import write_stage3

pytestmark = pytest.mark.faults
KILLS = 150 if os.environ.get("CKPTD_FULL") else 3
SMALL_BYTES = 20_000
"""Of a file of dcp: several are made."""


def killed(arguments: list[str], seconds: float) -> bool:
    """Start `ckptd convert`, kill it and its children at once after so long; whether it had not ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd", "convert", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_with_children(process)
        return True
    return False


@pytest.mark.parametrize("form", ["dcp", "universal"])
def test_a_kill_leaves_nothing_or_all(form: str, tmp_path: Path) -> None:
    """What is seen after it is whole or not there; the same command again completes and tidies up."""
    zero, source, target = tmp_path / "global_step7", tmp_path / "source", tmp_path / "made"
    write_stage3(zero, GROUPS, 2)
    dcp = ConvertOptions(form="dcp", max_shard_bytes=SMALL_BYTES)
    options = dcp if form == "dcp" else ConvertOptions()
    if form == "dcp":
        source = zero
    else:
        convert(zero, source, dcp)
    convert(source, tmp_path / "whole", options)
    whole = tree(tmp_path / "whole")
    assert len(whole) > 5
    arguments = [str(source), str(target), "--form", form]
    arguments += ["--max-shard-size", str(SMALL_BYTES)] if form == "dcp" else []
    began = time.monotonic()
    assert not killed(arguments, 200)
    usual_seconds = time.monotonic() - began
    chance, deaths, published = random.Random(form), 0, 0
    there = sorted(path.name for path in tmp_path.iterdir())
    while deaths < KILLS:
        shutil.rmtree(target)
        deaths += killed(arguments, chance.uniform(0.2, 1.0) * usual_seconds)
        if target.exists():
            published += 1
            assert tree(target) == whole
            (seen,) = inspect_folder(target).checkpoints
            assert seen.is_complete
        try:
            convert(source, target, options)
        except CkptdError as error:  # it was published, and tidied up
            assert (error.exit_code, target.exists()) == (73, True)
        assert tree(target) == whole
        assert sorted(path.name for path in tmp_path.iterdir()) == there
