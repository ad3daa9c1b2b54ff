"""A run of long tests that is cut goes on where it was; what failed, or was skipped, is run again."""

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
        done = pytester.runpytest_inprocess("-p", "tests.support.resumable", "--minutes", minutes)
        return int(done.ret), done.parseoutcomes()

    assert run("0") == (0, {"passed": 1})
    assert run("9") == (1, {"failed": 1, "passed": 1, "deselected": 1})
    assert run("9") == (1, {"failed": 1, "deselected": 2})
    pytester.path.joinpath("mended").touch()
    assert run("0") == (0, {"passed": 1, "deselected": 2})
    assert run("0") == (0, {"deselected": 3})
    (pytester.mkdir("ckptd") / "other.py").write_text("x = 1")
    assert run("9") == (0, {"passed": 3}), "another ckptd: all of it anew"


SKIPPED = """
import pathlib, pytest

is_able = pathlib.Path("able").exists()

@pytest.fixture
def machine():
    if not is_able:
        pytest.skip("not on this machine")

@pytest.mark.skipif(not is_able, reason="not on this machine")
def test_marked(): pass
def test_asks(machine): pass
def test_finds_out():
    if not is_able:
        pytest.skip("not on this machine")
def test_anywhere(): pass
"""


def test_what_this_machine_cannot_run_is_left_for_one_that_can(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_long=SKIPPED)

    def run() -> dict[str, int]:
        done = pytester.runpytest_inprocess("-p", "tests.support.resumable", "--minutes", "9")
        assert done.ret == 0
        return done.parseoutcomes()

    assert run() == {"passed": 1, "skipped": 3}
    assert run() == {"skipped": 3, "deselected": 1}
    pytester.path.joinpath("able").touch()
    assert run() == {"passed": 3, "deselected": 1}
    assert run() == {"deselected": 4}
