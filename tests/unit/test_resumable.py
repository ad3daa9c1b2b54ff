"""A run of long tests that is cut goes on where it was, and what failed is run again."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pathlib

def test_one(): pass
def test_two(): assert pathlib.Path("mended").exists()
def test_three(): pass
"""


def test_it_ends_in_time_and_goes_on(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_long=TESTS)

    def run(minutes: str) -> tuple[int, dict[str, int]]:
        done = pytester.runpytest_inprocess("-p", "tests.resumable", "--minutes", minutes)
        return int(done.ret), done.parseoutcomes()

    assert run("0") == (0, {"passed": 1})
    assert run("9") == (1, {"failed": 1, "passed": 1, "deselected": 1})
    assert run("9") == (1, {"failed": 1, "deselected": 2})
    pytester.path.joinpath("mended").touch()
    assert run("0") == (0, {"passed": 1, "deselected": 2})
    assert run("0") == (0, {"deselected": 3})
    (pytester.mkdir("ckptd") / "other.py").write_text("x = 1")
    assert run("9") == (0, {"passed": 3}), "another ckptd: all of it anew"
