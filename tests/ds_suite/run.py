"""Runs DeepSpeed's own tests of universal checkpoints on CPU with ckptd as the converter.

`python -m tests.ds_suite.run SOURCE [--of dp|autotp] [--compat strict|superset] [--jobs 2] [-- pytest
arguments]`: SOURCE is a DeepSpeed source tree near the installed version. Its tests folder is copied, because
its conftest would put the source tree before the installed DeepSpeed. Skips with a reason where it cannot.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.real import REPOSITORY

MODULES = {
    "dp": "unit/checkpoint/test_universal_checkpoint.py",
    "autotp": "unit/checkpoint/test_autotp_uc_checkpoint.py",
}
REFUSED = {"autotp": "TestRealCheckpointUniversalConversionTPxPP::test"}
"""What ckptd does not convert: a tensor-parallel save that says nothing of how its ranks join. Stock joins
them along dimension 0, also these weights, which each rank holds whole, and the test looks at no value. The
other ranks would wait ten minutes for the one that converts."""
PLACE = REPOSITORY / ".build" / "ds_suite"
HOOK = Path(__file__).resolve().parent / "hook"
ONE_TEST_SECONDS = 200


def reason_to_skip(source: Path | None) -> str | None:
    """Why the suite cannot run here; None when it can."""
    if source is None or not (source / "tests" / MODULES["dp"]).is_file():
        return (
            f"{source or 'DEEPSPEED_SRC'} is no DeepSpeed source tree: "
            "make ds-suite DEEPSPEED_SRC=<a clone of the installed version>"
        )
    try:
        importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "DeepSpeed is not installed: make setup"
    return None


def copy_tests(source: Path) -> Path:
    """The tests folder away from its source tree, made anew."""
    shutil.rmtree(PLACE, ignore_errors=True)
    shutil.copytree(source / "tests", PLACE / "tests")
    return PLACE / "tests"


def start(tests: Path, module: str, compat: str, shard: str, arguments: list[str]) -> subprocess.Popen[str]:
    """One pytest over its share of the suite."""
    name = shard.replace("/", "of")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{HOOK}:{REPOSITORY}",
        "DS_SUITE_CKPTD": str(REPOSITORY),
        "DS_SUITE_COMPAT": compat,
        "DS_SUITE_LOG": str(PLACE / "conversions.log"),
        "DS_SUITE_SHARD": shard,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",
        "OMP_NUM_THREADS": "1",
        "DS_UNITTEST_TIMEOUT": str(ONE_TEST_SECONDS),
    }
    options = ["-p", "ds_suite_plugin", "-p", "no:cacheprovider", "-p", "no:cov", "--import-mode=prepend"]
    options += ["--basetemp", str(PLACE / f"tmp{name}"), "-c", "pytest.ini", "--rootdir", ".", *arguments]
    with (PLACE / f"output{name}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, module],
            cwd=tests,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def main() -> int:
    """Run the suite; returns pytest's worst exit code, 0 when skipped."""
    parser = argparse.ArgumentParser(description="DeepSpeed's universal checkpoint tests over ckptd")
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--of", choices=tuple(MODULES), default="dp")
    parser.add_argument("--compat", choices=("strict", "superset"), default="strict")
    parser.add_argument("--jobs", type=int, default=2)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, to_pytest = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    skipped = reason_to_skip(given.source)
    if skipped:
        say(f"ds-suite skipped: {skipped}")
        return 0
    tests = copy_tests(given.source)
    own = (tests, MODULES[given.of], given.compat)
    if given.of in REFUSED:
        test = REFUSED[given.of]
        say(f"left out, since ckptd refuses it: {test}")
        to_pytest += ["--deselect", f"{MODULES[given.of]}::{test}"]
    runs = [start(*own, f"{i}/{given.jobs}", to_pytest) for i in range(given.jobs)]
    codes = [run.wait() for run in runs]
    outcomes: Counter[str] = Counter()
    for output in sorted(PLACE.glob("output*.txt")):
        text = re.sub(r"\x1b\[[0-9;]*m", "", output.read_text(errors="replace"))
        last = text.strip().splitlines()[-1:] or ["no output"]
        say(f"{output.name}: {last[0].strip('= ')}")
        for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last[0]):
            outcomes[word.removesuffix("s") if word.startswith("error") else word] += int(count)
    log = PLACE / "conversions.log"
    conversions = log.read_text().splitlines() if log.exists() else []
    good = sum(line.startswith("0 ") for line in conversions)
    said = ", ".join(f"{count} {word}" for word, count in outcomes.items()) or "nothing ran"
    say(f"ds-suite, {given.compat} layout: {said}; conversions by ckptd: {good} of {len(conversions)} good")
    return max(codes) or (0 if good else 1)


def say(line: str) -> None:
    """One line to the terminal."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
