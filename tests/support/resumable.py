"""For tests of hours: `pytest -p tests.support.resumable --minutes M …` ends in time, the next run goes on
there.

What has passed is remembered in `.build/finished`, by the code that it passed with; what failed, or was
skipped, is run again.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long it may take; the test that is under way then is the last one."""
    parser.addoption("--minutes", type=float, default=30.0)


def pytest_configure(config: pytest.Config) -> None:
    """One book for one run."""
    config.pluginmanager.register(Book(config))


def digest(root: Path) -> str:
    """Of all code that a test runs."""
    sha = hashlib.sha256()
    for path in sorted(p for part in ("ckptd", "tests", "bench") for p in (root / part).rglob("*.py")):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


class Book:
    """Tests that have passed with this code; one line each."""

    def __init__(self, config: pytest.Config) -> None:
        self._deadline = time.monotonic() + 60 * float(config.getoption("--minutes"))
        self._path = config.rootpath / ".build" / "finished" / digest(config.rootpath)
        self._done = set(self._path.read_text().splitlines()) if self._path.exists() else set()
        self._failed: set[str] = set()
        self._passed: set[str] = set()
        self._left = 0
        self._session: pytest.Session | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has passed."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._done])
        items[:] = [item for item in items if item.nodeid not in self._done]
        self._left = len(items)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """To stop it."""
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what passed; stop in time."""
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        if report.when != "teardown":
            return
        self._left -= 1
        if report.nodeid in self._passed - self._failed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as out:
                out.write(f"{report.nodeid}\n")
        if self._left and time.monotonic() > self._deadline and self._session is not None:
            self._session.shouldstop = f"{self._left} tests are left for the next run"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """An end in time is no failure; nor is it that nothing was left to do."""
        ends = {
            pytest.ExitCode.INTERRUPTED: bool(session.shouldstop),
            pytest.ExitCode.NO_TESTS_COLLECTED: True,
        }
        if ends.get(pytest.ExitCode(session.exitstatus)) and not self._failed:
            session.exitstatus = pytest.ExitCode.OK
